"""EAGLE-3 (arXiv 2503.01840): one layer that reads several of the target's hidden states, and then its own output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ...drafters.heads.blocks import Parts, Shape
from ...drafters.heads.eagle3 import Eagle3, Eagle3Flags
from ...models.forward.cached_model import CachedModel
from .learner import Files, Learner, Lesson, layer_sizes, learn_in_turn, output_rows, small


class Eagle3Learner(Learner):
    """
    Args:
        depth: of the training-time test.
        states: which hidden states it reads, as transformers counts them.
        kept: [n] int64, ascending: the tokens that it can draft; None: all.
    """

    kind, architecture = "eagle3", "Eagle3DraftModel"

    def __init__(
        self,
        target: CachedModel,
        loss: Mapping[str, float],
        depth: int,
        states: Sequence[int],
        kept: torch.Tensor | None,
    ):
        self.reads(states, target)
        self.depth = depth
        self.sizes = layer_sizes(target.config, 1, "llama")
        tokens = torch.arange(target.vocab_size) if kept is None else kept
        shape, device = Shape.read(self.sizes, ()), target.device
        parts = Parts(shape, (*states,), target.config.hidden_size, target.vocab_size, 1, device, len(tokens))
        self.eagle = Eagle3(parts, Eagle3Flags())
        super().__init__(self.eagle, target, loss)
        small(self.eagle)
        assert self.eagle.lm_head is not None
        self.eagle.lm_head.weight.data.copy_(output_rows(target, tokens))
        self.eagle.d2t = None if kept is None else kept.to(device)

    def learn(self, lesson: Lesson, chance: torch.Generator) -> tuple[torch.Tensor, list[float]]:
        return learn_in_turn(self.eagle, lesson, self.depth, self.loss)

    def published(self, name: str) -> Files:
        """SpecForge's entry for the states, which counts the outputs of layers from 0."""
        nested = {"eagle_aux_hidden_state_layer_ids": self._outputs, "use_aux_hidden_state": True}
        config = {**self.sizes, **self._vocabulary, "architectures": ["LlamaForCausalLMEagle3"], "eagle_config": nested}
        tensors = {key.replace("layers.0.", "midlayer."): tensor for key, tensor in self.tensors.items()}
        return config, {**tensors, **self._tables}

    def container(self, name: str, num_drafts: int) -> Files:
        common = self.config_of_container(name, num_drafts)
        states = {"eagle_aux_hidden_state_layer_ids": self._states, "norm_before_residual": False}
        embedding = self.head.embedded(torch.arange(self.head.vocab_size, device=self.target.device))
        tensors = {**self.tensors, "embed_tokens.weight": embedding.to(self.target.dtype)}
        return {**common, **self._vocabulary, **states}, {**tensors, **self._tables}

    @property
    def _vocabulary(self) -> dict[str, int]:
        return {"draft_vocab_size": self.head.vocab_size if self.head.d2t is None else len(self.head.d2t)}

    @property
    def _tables(self) -> dict[str, torch.Tensor]:
        """``d2t`` and ``t2d``: how far the token of each column is from its number, and whether a token has one."""
        kept = self.head.d2t
        if kept is None:
            return {}
        taken = torch.zeros(self.head.vocab_size, dtype=torch.bool, device=kept.device)
        taken[kept] = True
        return {"d2t": kept - torch.arange(len(kept), device=kept.device), "t2d": taken}
