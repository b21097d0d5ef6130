"""Recurrent layers for tests: random inputs for any token of a text, and what each token must give, computed from the
beginning of its text in float64 without windows or states that are kept."""

from __future__ import annotations

import functools
import zlib
from dataclasses import dataclass, field
from typing import Any

import torch
from specdec_layers import DeltaState, Feed, SsdState, conv_window, delta_step, ssd_step

T = 5  # tokens of a window


def numbers(shape: tuple[int, ...], *key: object) -> torch.Tensor:
    """Standard normal numbers that depend on the key alone."""
    seed = zlib.crc32(repr(key).encode())
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@dataclass
class Layer:
    """A layer for R rows. A token is any number; its inputs follow from it."""

    rows: int
    backend: str = "cpu"
    dtype: torch.dtype = torch.float32
    window: int = T
    held: list = field(default_factory=list)

    def inputs(self, token: int) -> list[torch.Tensor]:
        raise NotImplementedError

    def expected(self, text: list[int]) -> torch.Tensor:
        """What the last token gives."""
        raise NotImplementedError

    def run(self, inputs: list[torch.Tensor], feed: Feed) -> torch.Tensor:
        raise NotImplementedError

    def arguments(
        self,
        tokens: dict[int, dict[int, int]],
        starts: dict[int, int],
        commits: dict[int, int],
        columns: int,
        keep: bool = False,
        rows: range | None = None,
        parents: torch.Tensor | None = None,
    ) -> tuple[list[torch.Tensor], Feed]:
        """What ``run`` takes for tokens by row and column; the inputs of the other columns are NaN."""
        rows = range(self.rows) if rows is None else rows
        empty = [torch.full_like(x, float("nan")) for x in self.inputs(0)]
        picked = [
            [self.inputs(tokens[r][c]) if c in tokens.get(r, {}) else empty for c in range(columns)] for r in rows
        ]
        stacked = [
            torch.stack([torch.stack([p[i] for p in row]) for row in picked]).to(self.dtype) for i in range(len(empty))
        ]
        start = self.here(torch.tensor([starts.get(r, 0) for r in rows]))
        commit = self.here(torch.tensor([commits.get(r, 0) for r in rows]))
        valid = self.here(torch.tensor([[c in tokens.get(r, {}) for c in range(columns)] for r in rows]))
        feed = Feed(start, commit, valid, rows.start, keep, None if parents is None else self.here(parents))
        return [*map(self.here, stacked)], feed

    def feed(self, *tokens: Any, **how: Any) -> torch.Tensor:
        """The same, fed."""
        return self.run(*self.arguments(*tokens, **how)).cpu()

    def here(self, x: torch.Tensor) -> torch.Tensor:
        """On the device of the backend."""
        on_gpu = self.backend in ("triton", "cuda") and torch.cuda.is_available()
        return x.to("cuda" if on_gpu else "cpu")

    def windows(self) -> list[torch.Tensor]:
        """The inputs by place, [rows, places, ...] each."""
        return [self.held[0]] if isinstance(self.held[0], torch.Tensor) else list(self.held[0][2:])


@dataclass
class Convolution(Layer):
    channels: int = 70
    taps: int = 4
    bias: bool = True
    silu: bool = True

    def weights(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        weight, bias = numbers((self.channels, self.taps), "weight"), numbers((self.channels,), "bias")
        return weight, bias if self.bias else None

    @functools.cached_property
    def placed(self) -> list[torch.Tensor | None]:
        """The same where the backend runs, copied there once: not while a graph is captured."""
        return [None if w is None else self.here(w.to(self.dtype)) for w in self.weights()]

    def inputs(self, token: int) -> list[torch.Tensor]:
        return [numbers((self.channels,), "x", token)]

    def expected(self, text: list[int]) -> torch.Tensor:
        weight, bias = self.weights()
        last = [self.inputs(t)[0] for t in text[-self.taps :]]
        y = sum(x * weight[:, self.taps - len(last) + i] for i, x in enumerate(last))
        y = y if bias is None else y + bias
        return y * torch.sigmoid(y) if self.silu else y

    def run(self, inputs: list[torch.Tensor], feed: Feed) -> torch.Tensor:
        if not self.held:
            shape = self.rows, self.window + self.taps - 1, self.channels
            self.held = [self.here(torch.full(shape, float("nan"), dtype=self.dtype))]
        return conv_window(self.held[0], inputs[0], *self.placed, feed, silu=self.silu, backend=self.backend)


@dataclass
class Delta(Layer):
    heads: int = 4
    key_heads: int = 2
    dk: int = 9
    dv: int = 21
    by_channel: bool = False
    normalize: bool = True

    def inputs(self, token: int) -> list[torch.Tensor]:
        h, kh, decays = self.heads, self.key_heads, (self.dk,) if self.by_channel else ()
        q, k = numbers((kh, self.dk), "q", token), numbers((kh, self.dk), "k", token)
        if not self.normalize:
            k = k / k.norm(dim=-1, keepdim=True)
        g = -numbers((h, *decays), "g", token).abs() * 0.3
        return [q, k, numbers((h, self.dv), "v", token), g, torch.sigmoid(numbers((h,), "beta", token)) * 2]

    def expected(self, text: list[int]) -> torch.Tensor:
        S = torch.zeros(self.heads, self.dk, self.dv, dtype=torch.float64)
        for token in text:
            q, k, v, g, beta = self.inputs(token)
            if self.normalize:
                q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
            q, k = (x.repeat_interleave(self.heads // self.key_heads, 0) for x in (q, k))
            S = torch.diag_embed(g.exp() if self.by_channel else g.exp()[:, None].expand(-1, self.dk)) @ S
            u = beta[:, None] * (v - torch.einsum("hkv,hk->hv", S, k))
            S = S + torch.einsum("hk,hv->hkv", k, u)
            out = torch.einsum("hkv,hk->hv", S, q) / self.dk**0.5
        return out

    def run(self, inputs: list[torch.Tensor], feed: Feed) -> torch.Tensor:
        if not self.held:
            self.held = [spoiled(DeltaState.empty(self.rows, self.window, *inputs[1:]))]
        return delta_step(self.held[0], *inputs, feed, normalize=self.normalize, backend=self.backend)


@dataclass
class Ssd(Layer):
    heads: int = 6
    size: int = 3
    groups: int = 2
    states: int = 10
    by_number: bool = False
    skip: bool = True

    def constants(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        shape = (self.heads, self.states) if self.by_number else (self.heads,)
        return -numbers(shape, "A").exp(), numbers((self.heads,), "D") if self.skip else None

    @functools.cached_property
    def placed(self) -> list[torch.Tensor | None]:
        """The same where the backend runs, copied there once: not while a graph is captured."""
        wide = torch.promote_types(self.dtype, torch.float32)
        return [None if c is None else self.here(c.to(wide)) for c in self.constants()]

    def inputs(self, token: int) -> list[torch.Tensor]:
        x, dt = numbers((self.heads, self.size), "x", token), numbers((self.heads,), "dt", token).abs() * 0.5
        return [x, dt, *(numbers((self.groups, self.states), name, token) for name in "BC")]

    def expected(self, text: list[int]) -> torch.Tensor:
        A, D = self.constants()
        S = torch.zeros(self.heads, self.size, self.states, dtype=torch.float64)
        for token in text:
            x, dt, B, C = self.inputs(token)
            B, C = (b.repeat_interleave(self.heads // self.groups, 0) for b in (B, C))
            decay = (dt[:, None] * A if self.by_number else (dt * A)[:, None]).exp()
            S = S * decay[:, None] + torch.einsum("hp,hn->hpn", dt[:, None] * x, B)
            out = torch.einsum("hpn,hn->hp", S, C)
            out = out if D is None else out + x * D[:, None]
        return out

    def run(self, inputs: list[torch.Tensor], feed: Feed) -> torch.Tensor:
        if not self.held:
            self.held = [spoiled(SsdState.empty(self.rows, self.window, *inputs[:3]))]
        return ssd_step(self.held[0], *inputs, *self.placed, feed, backend=self.backend)


def spoiled(state):
    """What a row held before must not matter."""
    for tensor in state:
        tensor.fill_(7 if tensor.dtype == torch.int64 else float("nan"))
    return state
