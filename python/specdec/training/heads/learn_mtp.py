"""An MTP layer (DeepSeek-AI, arXiv 2412.19437, section 2.2) for a target that was trained without one: a decoder layer
of its own kind, over its final states."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ...checks import refuse
from ...drafters.heads.mtp import Mtp, MtpLayer
from ...drafters.heads.mtp_files import DEEPSEEK, QWEN, new_mtp
from ...models.exchanged.layers import layers_path
from ...models.forward.cached_model import CachedModel
from .learner import Files, Learner, Lesson, learn_in_turn, small


class MtpLearner(Learner):
    """It begins as a copy of the target's last layer with attention.

    Args:
        depth: of the training-time test; the one layer makes any number of drafts.
    """

    kind = "mtp"

    def __init__(self, target: CachedModel, loss: Mapping[str, float], depth: int):
        self.depth = depth
        mtp = new_mtp(target)
        layer = mtp.layers[0]
        assert isinstance(mtp, Mtp) and isinstance(layer, MtpLayer)
        if any(weight.dim() > 2 for weight in layer.parameters()):
            refuse("kind", f"'mtp' for model type {target.config.model_type!r}, with experts", "a target without them")
        self.mtp = mtp
        super().__init__(mtp, target, loss)
        small(layer.eh_proj)
        attends = [i for i, slot in enumerate(target.layer_slots()) if slot is not None]
        last = f"{layers_path(target.model)}.{attends[-1]}"
        layer.block.load_state_dict(target.model.get_submodule(last).state_dict())

    def learn(self, lesson: Lesson, chance: torch.Generator) -> tuple[torch.Tensor, list[float]]:
        return learn_in_turn(self.mtp, lesson, self.depth, self.loss)

    def published(self, name: str) -> Files:
        """As Qwen has it beside a target of its hybrid types, and DeepSeek after the last layer of others."""
        config = {k: v for k, v in self.target.config.to_dict().items() if k not in ("_name_or_path", "auto_map")}
        qwen = self.target.config.model_type.startswith("qwen3_")
        root = "mtp.layers.0." if qwen else f"model.layers.{self.target.config.num_hidden_layers}."
        parts = {f"{ours}.weight": f"{theirs}.weight" for theirs, ours in (QWEN if qwen else DEEPSEEK).items()}
        tensors = {}
        for key, tensor in self.tensors.items():
            rest = key.removeprefix("layers.0.")
            beside = "mtp." if qwen else root
            tensors[beside + parts[rest] if rest in parts else root + rest.removeprefix("block.")] = tensor
        return {**config, "mtp_num_hidden_layers" if qwen else "num_nextn_predict_layers": 1}, tensors
