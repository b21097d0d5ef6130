"""What every kind of head in training has: a module that drafts, lessons for it, and files; and the
training-time test of those that draft one token after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from ...checks import refuse
from ...drafters.heads.in_turn import DraftsInTurn
from ...drafters.heads.interface import Head, HeadInput
from ...drafters.heads.layer_ids import written
from ...drafters.heads.vocabulary import target_embedding, target_head
from ...models.forward.cached_model import CachedModel
from ...models.forward.layout import Layout
from ..losses import Wanted, loss_of


@dataclass(frozen=True)
class Lesson:
    """A batch of texts, and what the target thought of them. Nothing here has a gradient.

    Attributes:
        tokens: [B, L] int64.
        states: [B, L, n * h] float32: the hidden states that the head reads, those of one token side by side.
        log_p: [B, L, n] float32: log-probabilities, beside each other, of the tokens that the head can draft; row t is
            about token t + 1.
    """

    tokens: torch.Tensor
    states: torch.Tensor
    log_p: torch.Tensor


def loss_between(weights: Mapping[str, float], ours: torch.Tensor, log_p: torch.Tensor) -> torch.Tensor:
    """Returns the mean over all rows of ``losses.loss_of``, whose names ``weights`` has, without ``data``.

    Args:
        ours: logits [..., n] of the head.
        log_p: [..., n], of the target for the same tokens.
    """
    nothing = torch.empty(0, dtype=torch.int64, device=ours.device)
    return loss_of(weights, ours.flatten(0, -2), Wanted(log_p.flatten(0, -2)), nothing)


def agreement(ours: torch.Tensor, log_p: torch.Tensor) -> float:
    """Returns how often both [..., n] have the same most likely token."""
    return (ours.argmax(-1) == log_p.argmax(-1)).float().mean().item()


Files = tuple[dict[str, Any], dict[str, torch.Tensor]]  # config.json, and tensors on any device
DECAY = 0.8  # the weight of a depth's loss, of the one before: a later draft is only tested after it


class Learner:
    """A head that learns. ``head`` is the drafter's own module, in float32 on the target's device, so that there is no
    second network which could differ from the one that drafts.

    Args:
        target: which ``head`` was built for. Its embedding and its output matrix are lent to ``head``, as by loading.
        loss: weights by the names in ``losses.DIVERGENCES``.
    """

    kind: str
    architecture: str  # of those that the container has, and the entries of their layers in config.json
    sizes: dict[str, Any]
    scaled = False  # whether the head reads the target's embedding with its scale

    def __init__(self, head: Head, target: CachedModel, loss: Mapping[str, float]):
        hidden = target.config.hidden_size
        self.head, self.target, self.loss = head.to(target.device), target, loss
        embed, out = target_embedding(target.model, hidden, self.scaled), target_head(target.model, hidden)
        head.target_embedding = lambda tokens: embed(tokens).float()
        head.target_head = lambda x: out(x.to(target.dtype))

    def reads(self, states: Sequence[int], target: CachedModel) -> None:
        """Says which hidden states it reads, as transformers counts them."""
        self._states = written(states, target.config.num_hidden_layers)
        self._outputs = output_ids(self._states)

    def learn(self, lesson: Lesson, chance: torch.Generator) -> tuple[torch.Tensor, list[float]]:
        """Returns the loss, and how often the most likely draft of each depth is what the target finds most
        likely of the tokens that the head can draft.

        Args:
            chance: on the CPU; all that is random is drawn from it.
        """
        raise NotImplementedError

    def published(self, name: str) -> Files:
        """The files of the head in the layout in which its kind is published.

        Args:
            name: of the target.
        """
        raise NotImplementedError

    def container(self, name: str, num_drafts: int) -> Files:
        """The same in the container of speculators 0.9, of these kinds alone: EAGLE-3, DFlash and DSpark.

        Args:
            num_drafts: K, which engines that read it take.
        """
        raise NotImplementedError

    def config_of_container(self, name: str, num_drafts: int) -> dict[str, Any]:
        """What its config.json has for every kind of head."""
        proposal = {"proposal_type": "greedy", "speculative_tokens": num_drafts}
        return {
            "architectures": [self.architecture],
            "speculators_model_type": self.kind,
            "speculators_version": "0.9.0",
            "transformer_layer_config": dict(self.sizes),
            "tie_word_embeddings": False,
            "speculators_config": {
                "algorithm": self.kind,
                "default_proposal_method": "greedy",
                "proposal_methods": [{**proposal, "verifier_accept_k": 1, "accept_tolerance": 0.0}],
                "verifier": {"name_or_path": name, "architectures": [type(self.target.model).__name__]},
            },
        }

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: tensor.detach() for name, tensor in self.head.state_dict().items()}


def output_rows(target: CachedModel, tokens: torch.Tensor) -> torch.Tensor:
    """Returns the rows of the target's output matrix for ``tokens`` [n], [n, h] float32: what a linear map makes of the
    identity. Raises ValueError naming ``lm_head.weight`` if it is quantised."""
    identity = torch.eye(target.config.hidden_size, dtype=target.dtype, device=target.device)
    with torch.no_grad():
        return target_head(target.model, len(identity), tokens)(identity).T.float()


def small(module: nn.Module) -> None:
    """Draws matrices as Llama's are."""
    for part in module.modules():
        if isinstance(part, nn.Linear):
            nn.init.normal_(part.weight, std=0.02)


def layer_sizes(config: PreTrainedConfig, layers: int, model_type: str) -> dict[str, Any]:
    """Returns the entries of config.json for a Llama's decoder layers as wide as the target's. Whatever the target's
    rotary embedding is, theirs is the plain one, with its base if it has one.

    Args:
        config: the target's.
        model_type: "llama", or "qwen3" for norms of queries and keys.
    """
    heads, rope = config.num_attention_heads, getattr(config, "rope_parameters", None) or {}
    if "rope_theta" not in rope:  # by kind of layer, or none
        rope = rope.get("full_attention") or {}
    return {
        "model_type": model_type,
        "hidden_size": config.hidden_size,
        "intermediate_size": getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "hidden_act": "silu",
        "rms_norm_eps": getattr(config, "rms_norm_eps", None) or 1e-6,
        "rope_theta": rope.get("rope_theta") or 10000.0,
        "max_position_embeddings": getattr(config, "max_position_embeddings", None) or 2048,
        "vocab_size": config.vocab_size,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
    }


def output_ids(states: Sequence[int]) -> list[int]:
    """Returns the layers whose outputs these hidden states are, as the published layouts have it. Raises ValueError
    naming ``layer_ids``."""
    if min(states) < 1:
        refuse("layer_ids", [*states], "from 1: the embedding is no layer's output")
    return [state - 1 for state in states]


class GrowingCache:
    """Stands where a static cache does when a head drafts. Each layer's new keys and values come after those
    before, whatever their slots, and all of them are visible: the mask says what counts."""

    def __init__(self, layers: int):
        self.layers = [_GrowingLayer() for _ in range(layers)]

    def write_at(self, slots: torch.Tensor, visible: int, first_row: int = 0, defers: bool = False) -> None:
        pass

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *others: object, **more: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As transformers' layers call it."""
        return self.layers[layer].update(keys, values)


class _GrowingLayer:
    def __init__(self) -> None:
        self._keys: list[torch.Tensor] = []
        self._values: list[torch.Tensor] = []

    def update(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Takes keys and values [B, H_kv, q, D], and returns all so far."""
        self._keys.append(keys)
        self._values.append(values)
        return torch.cat(self._keys, 2), torch.cat(self._values, 2)


def learn_in_turn(
    head: DraftsInTurn, lesson: Lesson, depth: int, weights: Mapping[str, float]
) -> tuple[torch.Tensor, list[float]]:
    """The training-time test (EAGLE-3, arXiv 2503.01840, section 3.2): a head whose drafts take one forward each goes
    on from its own outputs, as it will when it drafts. Returns the loss, and how often the token of each depth is the
    target's.

    Row t begins with the pair of the feature of token t and token t + 1, which is about token t + 2. At depth i it has
    gone on to the pair of its own output and token t + 1 + i. It sees the true pairs up to t, and what it made itself
    since, which no other row sees.
    """
    size, length = lesson.tokens.shape
    rows, device = length - depth, lesson.tokens.device
    features = head.combine(lesson.states)[:, :rows]
    causal = torch.ones(rows, rows, dtype=torch.bool, device=device).tril()
    itself = torch.eye(rows, dtype=torch.bool, device=device)
    cache: Any = GrowingCache(head.num_layers)
    total, hits = features.new_zeros(()), []
    for i in range(depth):
        places = (torch.arange(rows, device=device) + i).expand(size, -1)
        mask = torch.cat([causal] + [itself] * i, 1)[None, None]
        tokens = lesson.tokens[:, 1 + i : 1 + i + rows]
        out = head.run(HeadInput(features, tokens, Layout(places, places, mask.shape[-1], mask)), cache)
        ours, log_p = head.logits(out), lesson.log_p[:, 1 + i : 1 + i + rows]
        total = total + DECAY**i * loss_between(weights, ours, log_p)
        hits.append(agreement(ours, log_p))
        features = head.recycled(out)
    return total, hits
