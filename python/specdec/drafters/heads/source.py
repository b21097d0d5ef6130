"""What a head is built from: its files, read for one target."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ...checks import refuse
from ...models.forward.cached_model import CachedModel
from .blocks import Parts, Shape
from .checkpoint import Checkpoint
from .interface import Head
from .layer_ids import LayerIds, resolve
from .vocabulary import ascending, take_d2t, target_embedding, target_head


@dataclass
class Source:
    """What a head is built from.

    Attributes:
        layer_ids: the user's, over what the checkpoint says.
        ids: where the head's states come from, once they are resolved.
    """

    checkpoint: Checkpoint
    target: CachedModel
    layer_ids: Sequence[int] | None = None
    ids: LayerIds | None = None

    @functools.cached_property
    def model(self) -> PreTrainedModel:
        """The target, with an embedding and a head that this rank can use alone."""
        return self.target.with_whole_ends()

    @property
    def num_layers(self) -> int:
        return self.target.config.num_hidden_layers

    @property
    def hidden(self) -> int:
        return self.target.config.hidden_size

    @property
    def config(self) -> dict[str, Any]:
        return self.checkpoint.config

    def resolved(self, block: int | None = None) -> tuple[int, ...]:
        self.ids = resolve(self.config, self.num_layers, self.layer_ids, block)
        return self.ids.states

    def final_state(self) -> tuple[int, ...]:
        """Returns the states of a format that reads the final one alone."""
        if self.layer_ids is not None:
            refuse("layer_ids", [*self.layer_ids], "None for a head that reads the final state")
        self.ids = LayerIds((self.num_layers,), "the format")
        return self.ids.states

    def has_own(self, name: str, module: nn.Module | None) -> bool:
        """Returns whether the head has a matrix ``name`` other than that of ``module``, which is the target's. An equal
        one is dropped, so that the target's is shared."""
        given, theirs = self.checkpoint.tensors.get(name), getattr(module, "weight", None)
        if given is None or not isinstance(theirs, torch.Tensor) or given.shape != theirs.shape:
            return given is not None
        same = torch.equal(given.to(theirs.device, theirs.dtype), theirs) and getattr(module, "bias", None) is None
        if same:
            del self.checkpoint.tensors[name]
        return not same

    def own_embedding(self) -> bool:
        return self.has_own("embed_tokens.weight", self.model.get_input_embeddings())

    def parts(
        self, shape: Shape, states: tuple[int, ...], layers: int, columns: int | None = None, width: int | None = None
    ) -> Parts:
        """Returns what a head of such layers is made of. ``width``: of one of ``states``; None: the target's."""
        device, own = self.target.device, self.own_embedding()
        return Parts(shape, states, width or self.hidden, self.target.vocab_size, layers, device, columns, own)

    def finished(
        self, head: Head, width: int | None = None, d2t: torch.Tensor | None = None, scaled: bool = False
    ) -> Head:
        """Returns ``head`` with its weights, and with the target's embedding and head where it has none of its own.

        Args:
            width: of embedding and head; None: it uses neither.
            scaled: whether the target's embedding comes with the scale that some targets have on it.
        """
        if width is not None and getattr(head, "embed_tokens", None) is None:
            head.target_embedding = target_embedding(self.model, width, scaled)
        if width is not None and getattr(head, "lm_head", None) is None:
            head.target_head = target_head(self.model, width, d2t)
        self.checkpoint.fill(head, self.target.dtype, self.target.device, head.in_float32)
        head.d2t = None if d2t is None else d2t.to(self.target.device)
        return head

    def vocabulary(self, sizes: Mapping[str, Any]) -> tuple[torch.Tensor | None, int | None]:
        """Returns ``d2t``, and the columns of the head's own ``lm_head``; None: it uses the target's."""
        tensors, vocab_size = self.checkpoint.tensors, self.target.vocab_size
        d2t = ascending(self.checkpoint, take_d2t(self.checkpoint, vocab_size))
        if "lm_head.weight" not in tensors and sizes.get("tie_word_embeddings") and "embed_tokens.weight" in tensors:
            tensors["lm_head.weight"] = tensors["embed_tokens.weight"]
        columns, said = len(d2t) if d2t is not None else vocab_size, self.config.get("draft_vocab_size")
        if said is not None and said != columns:
            given = f"{columns} columns" + ("" if d2t is not None else ", as there is no such tensor")
            refuse("d2t", given, f"the draft_vocab_size of config.json, {said}")
        own = self.has_own("lm_head.weight", self.model.get_output_embeddings())
        return d2t, columns if own else None

    def mask_token(self, nested: Mapping[str, Any]) -> int:
        vocab_size, names = self.target.vocab_size, ("mask_token_id", "pard_token", "ptd_token_id")
        found = next((part[n] for part in (nested, self.config) for n in names if part.get(n) is not None), None)
        if not isinstance(found, int) or not 0 <= found < vocab_size:
            refuse("config.json", f"mask_token_id {found!r}", f"an id from 0 to {vocab_size - 1}")
        return found

    def layer_sizes(self) -> Mapping[str, Any]:
        """Returns the part of config.json that describes the layers."""
        nested = self.config.get("speculators_model_type") is not None
        sizes = self.config.get("transformer_layer_config") if nested else self.config
        if not isinstance(sizes, Mapping):
            refuse("config.json", f"transformer_layer_config {sizes!r}", "an object")
        return sizes

    def check_fc(self, count: int) -> None:
        """Raises ValueError unless ``fc`` reads ``count`` of the target's states."""
        hidden = self.hidden
        out, inputs = self.checkpoint.shape("fc.weight", 2)
        if inputs != count * hidden:
            allowed = f"[{out}, {count * hidden}], for {count} states of {hidden} numbers"
            refuse("fc.weight", f"shape {[out, inputs]}", f"{allowed}; other states with layer_ids")
