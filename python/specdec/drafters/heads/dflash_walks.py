"""Heads on DFlash that walk through the block: what is drawn of one token corrects the distribution of the next."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad

from .blocks import Rotation, Shape
from .dflash import DFlash, DFlashLayer, KeysAndValues
from .interface import Logits


class DSpark(DFlash):
    """A term of low rank in each draft's logits depends on the token before it (a Markov head).

    Args:
        rank: of the term.
        num_columns: of the logits.
        sure: how many numbers the confidence head reads: a token's output, and with it perhaps what the Markov head
            makes of the token before; None: there is none.
        others: those of :class:`DFlash`.
    """

    kind, independent = "dspark", False

    def __init__(self, rank: int, num_columns: int, sure: int | None, *others: Any):
        super().__init__(*others)
        first, second = nn.Embedding(self.vocab_size, rank), nn.Linear(rank, num_columns, bias=False)
        self.markov_head = nn.ModuleDict({"markov_w1": first, "markov_w2": second})
        self.says_how_sure = sure is not None
        self.confidence_head = None if sure is None else nn.ModuleDict({"proj": nn.Linear(sure, 1)})

    def walk(self, out: torch.Tensor, previous: torch.Tensor) -> Logits:
        before: list[torch.Tensor] = []
        for own in out.unbind(1):
            before.append(self.markov_head["markov_w1"](previous[:, 0]))
            previous = yield self.logits(own) + self.markov_head["markov_w2"](before[-1])
        if self.confidence_head is None:
            return None
        read = self.confidence_head["proj"]
        features = torch.cat((out, torch.stack(before, 1)), 2)[..., : read.in_features]
        return read(features)[..., 0].float().sigmoid()


class Domino(DFlash):
    """A recurrent network reads the last known token and the drafts, and corrects the logits (arXiv 2605.29707).

    Args:
        state, inner: sizes of its state, and of the layer that makes a correction of state and output.
        num_columns: of the logits.
        pure: how many drafts, from the first on, are not corrected.
        others: those of :class:`DFlash`.
    """

    kind, independent = "domino", False

    def __init__(self, state: int, inner: int, num_columns: int, pure: int, *others: Any):
        super().__init__(*others)
        self.pure, hidden = pure, self.fc.out_features
        self.prefix_gru = nn.GRUCell(hidden, state, bias=False)
        self.embed_proj = nn.Sequential(
            nn.Linear(hidden + state, inner, bias=False), nn.SiLU(), nn.Linear(inner, num_columns, bias=False)
        )

    def walk(self, out: torch.Tensor, previous: torch.Tensor) -> Logits:
        state = out.new_zeros(len(out), self.prefix_gru.hidden_size)
        for i, own in enumerate(out.unbind(1)):
            state, logits = self.prefix_gru(self.embedded(previous)[:, 0], state), self.logits(own)
            if i >= self.pure:
                logits = logits + self.embed_proj(torch.cat((own, state), 1))
            previous = yield logits


class DFlash2(DFlash):
    """Convolutions around the layers, and a selector: each draft is one of the ``most`` likeliest tokens, with logits
    that depend on the token before. All others have q = 0.

    Args:
        rank: of the selector.
        most: how many tokens it selects from.
        others, more: those of :class:`DFlash`.
    """

    kind, independent = "dflash2", False

    def __init__(self, rank: int, most: int, *others: Any, **more: Any):
        super().__init__(*others, **more)
        self.most, self.candidate_selector = most, Selector(self.vocab_size, self.fc.out_features, rank)

    def walk(self, out: torch.Tensor, previous: torch.Tensor) -> Logits:
        logits, wanted = self.logits(out), self.candidate_selector.hidden_projection(out)
        found, candidates = logits.topk(self.most, -1)
        for i in range(out.shape[1]):
            score = found[:, i] + self.candidate_selector(wanted[:, i], previous[:, 0], candidates[:, i])
            previous = yield torch.full_like(logits[:, i], -torch.inf).scatter(1, candidates[:, i], score)


class Selector(nn.Module):
    def __init__(self, vocab_size: int, hidden: int, rank: int):
        super().__init__()
        self.predecessor_codebook, self.successor_codebook = (
            nn.Parameter(torch.empty(vocab_size, rank)) for _ in range(2)
        )
        self.hidden_projection = nn.Linear(hidden, rank, bias=False)

    def forward(self, wanted: torch.Tensor, previous: torch.Tensor, candidates: torch.Tensor) -> torch.Tensor:
        """Returns [n, k]: what ``candidates`` [n, k] int64 gain after the tokens ``previous`` [n] int64, of which
        ``wanted`` [n, rank] is the projected output."""
        pair = self.predecessor_codebook[previous] * wanted
        return (self.successor_codebook[candidates] @ pair[..., None])[..., 0]


class DFlash2Layer(DFlashLayer):
    """
    Args:
        taps, size: tokens that a convolution reads, and channels that share a kernel.
    """

    def __init__(self, taps: int, size: int, shape: Shape):
        super().__init__(shape)
        self.attention_conv, self.mlp_conv = (Convolution(shape.hidden, taps, size) for _ in range(2))

    def forward(self, x: torch.Tensor, rotation: Rotation, known: KeysAndValues, sees: torch.Tensor) -> torch.Tensor:
        attend = functools.partial(self.attend, rotation=rotation, known=known, sees=sees)
        x = x + self.attention_conv(self.input_layernorm(x), attend)
        return x + self.mlp_conv(self.post_attention_layernorm(x), self.mlp)


class Convolution(nn.Module):
    """Two causal convolutions over the tokens of a block, before a layer and after it. Their kernels are those of the
    channels, and added to them what each token wants for each group of channels."""

    def __init__(self, hidden: int, taps: int, size: int):
        super().__init__()
        self.kernels = 2, taps, hidden // size
        self.base_kernel = nn.Parameter(torch.empty(2, taps, hidden))
        self.kernel_projection = nn.Linear(hidden, 2 * taps * (hidden // size), bias=False)

    def forward(self, x: torch.Tensor, layer: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """Returns what ``layer`` makes of x, [n, block, hidden] each."""
        before, after = self.kernel_projection(x).unflatten(-1, self.kernels).unbind(2)
        inside = _convolved(x, before, self.base_kernel[0])
        return _convolved(layer(inside), after, self.base_kernel[1])


def _convolved(x: torch.Tensor, wanted: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """Returns [n, block, hidden]. Tap i, of ``wanted`` [n, block, taps, groups] and ``base`` [taps, hidden], is for the
    token i places before."""
    (block, taps, groups), out = wanted.shape[1:], torch.zeros_like(x)
    for i in range(taps):
        kernel = base[i].view(groups, -1) + wanted[:, :, i, :, None]
        out = out + pad(x, (0, 0, i, 0))[:, :block] * kernel.flatten(2)
    return out
