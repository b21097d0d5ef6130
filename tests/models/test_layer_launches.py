"""How many launches the layers of a step are on a GPU, counted on a CPU as the operations that are called."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from specdec.models.exchanged import norms as module
from specdec.models.exchanged.elementwise import with_elementwise
from specdec.models.exchanged.norms import NativeRMSNorm
from specdec_layers.backends import operation
from support.model_types import model_of
from support.models import prompts
from support.native_layers import on_a_cpu, unhooked
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode


class Launches(TorchDispatchMode):
    """What is called that is a launch on a GPU: all but views and what makes room."""

    def __init__(self) -> None:
        super().__init__()
        self.made = Counter[str]()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if not operation.is_view and not operation.name().startswith("aten::empty"):
            self.made[operation.name().partition("::")[2]] += 1
        return operation(*args, **(kwargs or {}))


def by_triton(x, delta, weight, epsilon, *, offset, round_first, delta_weight, delta_epsilon):
    given = (x, delta, weight, epsilon, offset, round_first, delta_weight, delta_epsilon)
    return operation("add_rms_norm", "triton", "cpu")(*given)


@pytest.mark.parametrize(("case", "norms"), [("llama", 2), ("qwen3_moe", 2), ("gpt_oss", 2), ("gemma2", 4)])
@pytest.mark.parametrize("queries", [1, 2, 5])
@torch.inference_mode()
def test_how_many_launches_they_are(case, norms, queries, monkeypatch):
    """A layer of Llama's has two fewer, one of Gemma's four; only the first norm of the model stays as it was."""
    monkeypatch.setattr(module, "add_rms_norm", by_triton)
    model = unhooked(model_of(case))
    tokens = torch.tensor([prompts(1, queries, queries)[0]])

    def launches(of: nn.Module) -> Counter[str]:
        with Launches() as launches:
            of(tokens, use_cache=False)
        return launches.made

    before, after = launches(with_elementwise(model)), launches(on_a_cpu(model))
    layers = model.config.num_hidden_layers
    within = sum(isinstance(m, NativeRMSNorm) for m in with_elementwise(model).model.layers[0].self_attn.modules())
    assert after["add_rms_norm_triton"] == 2 * layers
    assert before["rms_norm"] == (norms + within) * layers + 1 and after["rms_norm"] == within * layers + 1
    assert before["add.Tensor"] - after["add.Tensor"] == 2 * layers
    assert before.total() - after.total() == norms * layers
