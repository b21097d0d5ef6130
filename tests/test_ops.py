"""The registered operations as torch sees them: opcheck, fakes, torch.compile."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from specdec_kernels import SamplingParams, draft_step, speculative_step
from specdec_kernels.backends import operation
from specdec_kernels.testing import StepInputs, device_of, random_step

UTILITIES = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
CASES = {
    "contiguous": {"batch": 3, "num_drafts": 2},
    "strided": {"batch": 3, "num_drafts": 2},
    "empty_batch": {"batch": 0, "num_drafts": 2},
    "no_drafts": {"batch": 3, "num_drafts": 0},
    "one_hot": {"batch": 3, "num_drafts": 2, "kind": "one_hot"},
    "half": {"batch": 2, "num_drafts": 1, "dtype": torch.bfloat16, "draft_dtype": torch.float16},
}


def inputs_for(backend: str, case: str) -> StepInputs:
    stats = case in ("contiguous", "half")
    inputs = random_step(**CASES[case], vocabulary=33, temperature=(0.0, 1.0), stats=stats)
    if case == "strided":
        inputs = inputs.map(lambda t: torch.stack([t, torch.zeros_like(t)], -1)[..., 0])
    return inputs.map(lambda t: t.to(device_of(backend)))


@pytest.mark.parametrize("case", CASES)
def test_opcheck_speculative_step(backend, case):
    inputs = inputs_for(backend, case)
    step = operation("speculative_step", backend, device_of(backend).type)
    lse = None if inputs.draft_stats is None else inputs.draft_stats[1]
    num_drafts = torch.full_like(inputs.seed, CASES[case]["num_drafts"]) if case == "strided" else None
    arguments = (inputs.target_logits, inputs.draft_tokens, inputs.draft_logits, lse, num_drafts)
    arguments += (inputs.params.temperature, inputs.seed, inputs.position)
    done = torch.library.opcheck(step, arguments, test_utils=UTILITIES)
    assert set(done.values()) == {"SUCCESS"}


@pytest.mark.parametrize("case", ["contiguous", "strided", "empty_batch", "half"])
def test_opcheck_draft_step(backend, case):
    inputs = inputs_for(backend, case)
    step = operation("draft_step", backend, device_of(backend).type)
    logits = inputs.draft_logits[:, 0]
    if case == "empty_batch":
        logits = logits.clone(memory_format=torch.contiguous_format)  # opcheck cannot clone an empty strided view
    arguments = (logits, inputs.params.temperature, inputs.seed, inputs.position, 1)
    done = torch.library.opcheck(step, arguments, test_utils=UTILITIES)
    assert set(done.values()) == {"SUCCESS"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_fakes_have_the_real_shapes(backend, dtype):
    """Shape, dtype and strides of every output, under a fake mode and for real, through the public functions."""
    if device_of(backend).type != "cpu":
        dtype = torch.float32  # the fakes do not depend on the device

    def run():
        arguments = {"params": SamplingParams(), "seed": 0, "position": 0, "backend": backend}
        d = draft_step(torch.zeros(3, 20, dtype=dtype), offset=0, **arguments)
        tokens = torch.stack([d.tokens, d.tokens], 1)
        out = speculative_step(
            torch.zeros(3, 3, 20, dtype=dtype), tokens, torch.zeros(3, 2, 20, dtype=dtype), **arguments
        )
        return [(tuple(t.shape), t.dtype, t.stride(), t.device.type) for t in (*d, *out)]

    real = run()
    with FakeTensorMode():
        assert run() == real


def step_of_a_loop(draft_logits, target_logits, seed, position, temperature, backend):
    """What the decoding loop compiles: K drafts, then the verification. Tensors in, tensors out."""
    params = SamplingParams(temperature=temperature) if isinstance(temperature, float) else temperature
    common = {"params": params, "seed": seed, "position": position, "backend": backend}
    drafts = [draft_step(draft_logits[:, i], offset=i, **common) for i in range(draft_logits.shape[1])]
    tokens = torch.stack([d.tokens for d in drafts], 1)
    stats = torch.stack([d.cutoff for d in drafts], 1), torch.stack([d.lse for d in drafts], 1)
    out = speculative_step(target_logits, tokens, draft_logits, draft_stats=stats, **common)
    return out.tokens, out.num_accepted, out.status, position + out.num_accepted + 1


@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@pytest.mark.parametrize("backend_name", ["reference", "cpu", "triton", "auto"])
def test_compile_fullgraph(backend_name, compiler):
    """One graph, no break, no recompilation for new values, no warning; the same results as without compiling."""
    torch._dynamo.reset()
    device = device_of(backend_name)
    compiled = torch.compile(step_of_a_loop, fullgraph=True, backend=compiler, dynamic=False)
    with warnings.catch_warnings(), torch._dynamo.config.patch(error_on_recompile=True):
        warnings.filterwarnings("error", message=".*lru_cache.*")
        for random_state in range(3):
            inputs = random_step(2, 2, 40, random_state=random_state).map(lambda t: t.to(device))
            params = SamplingParams(temperature=0.7)
            arguments = (inputs.draft_logits, inputs.target_logits, inputs.seed, inputs.position, params, backend_name)
            assert all(map(torch.equal, compiled(*arguments), step_of_a_loop(*arguments)))


def test_compile_dynamic_batch():
    torch._dynamo.reset()
    compiled = torch.compile(step_of_a_loop, fullgraph=True, backend="eager", dynamic=True)
    for batch in (2, 3, 5):
        inputs = random_step(batch, 2, 40, random_state=batch)
        arguments = (inputs.draft_logits, inputs.target_logits, inputs.seed, inputs.position, SamplingParams(), "cpu")
        assert all(map(torch.equal, compiled(*arguments), step_of_a_loop(*arguments)))


def test_compile_with_temperatures_of_a_batch():
    torch._dynamo.reset()
    compiled = torch.compile(step_of_a_loop, fullgraph=True, backend="eager")
    inputs = random_step(4, 2, 40)
    params = SamplingParams(temperature=torch.tensor([0.0, 0.5, 1.0, 2.0]))
    arguments = (inputs.draft_logits, inputs.target_logits, inputs.seed, inputs.position, params, "cpu")
    assert all(map(torch.equal, compiled(*arguments), step_of_a_loop(*arguments)))
