"""The registered operations as torch sees them: opcheck, fakes, torch.compile."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterable, Iterator

import pytest
import torch
from support import BACKENDS
from torch._subclasses.fake_tensor import FakeTensorMode

from specdec_kernels import SamplingParams, TokenTable, draft_step, speculative_step
from specdec_kernels.backends import operation
from specdec_kernels.ops import RULES
from specdec_kernels.testing import StepInputs, device_of, random_step

UTILITIES = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
FILTERS = {"top_k": (0, 9), "top_p": (0.9, 1.0), "min_p": (0.0, 0.01)}
SAMPLING = {**FILTERS, "table": 5, "presence_penalty": (0.5, 0.0)}
CASES = {
    "contiguous": {"batch": 3, "num_drafts": 2, "stats": True},
    "strided": {"batch": 3, "num_drafts": 2, **SAMPLING},
    "empty_batch": {"batch": 0, "num_drafts": 2, **SAMPLING},
    "no_drafts": {"batch": 3, "num_drafts": 0},
    # Without drafts no slot is unused, so no log-probability is NaN, which opcheck would find unequal to itself.
    "log_probs": {"batch": 3, "num_drafts": 0, "log_probs": True, **SAMPLING},
    "one_hot": {"batch": 3, "num_drafts": 2, "kind": "one_hot", **FILTERS},
    "half": {"batch": 2, "num_drafts": 1, "dtype": torch.bfloat16, "draft_dtype": torch.float16, "stats": True},
    "block": {"batch": 2, "num_drafts": 2, "rule": "block", **SAMPLING},
    "reduced": {"batch": 2, "num_drafts": 2, "rule": "block", "reduced": 20, "stats": True, **SAMPLING},
    "empty_table": {"batch": 2, "num_drafts": 2, "table": 0},
    "masked": {"batch": 2, "num_drafts": 2, "allowed": 0.5, "masked_drafts": 2, "reduced": 20, "stats": True},
    "coupled": {"batch": 2, "num_drafts": 2, "rule": "coupled", **SAMPLING},
}

# On a CPU, the CUDA kernels are not registered as operators.
OPERATORS = [b for b in BACKENDS if b != "cuda" or torch.cuda.is_available()]


@pytest.fixture(params=OPERATORS)
def backend(request: pytest.FixtureRequest) -> str:
    return request.param


FEW = ("contiguous", "strided", "empty_batch", "reduced")  # of the reference, which is registered as the others are


def of_operators(cases: Iterable[str]) -> Iterator:
    for backend, case in itertools.product(OPERATORS, cases):
        daily = backend == "cpu" or (case in FEW if backend == "reference" else case == "contiguous")
        marks = [] if daily or torch.cuda.is_available() else pytest.mark.nightly
        yield pytest.param(backend, case, marks=marks, id=f"{backend}-{case}")


def inputs_for(backend: str, case: str) -> StepInputs:
    inputs = random_step(**CASES[case], vocabulary=33, temperature=(0.0, 1.0))
    if case == "strided":
        inputs = inputs.map(lambda t: torch.stack([t, torch.zeros_like(t)], -1)[..., 0])
        inputs = inputs.replace(num_drafts=torch.full_like(inputs.seed, 2))
    return inputs.to(device_of(backend))


def check(operation, arguments: tuple) -> None:
    done = torch.library.opcheck(operation, arguments, test_utils=UTILITIES)
    assert set(done.values()) == {"SUCCESS"}


@pytest.mark.parametrize(("backend_name", "case"), of_operators(CASES))
def test_opcheck_speculative_step(backend_name, case):
    run = operation("speculative_step", backend_name, device_of(backend_name).type)
    check(run, inputs_for(backend_name, case).operands())


@pytest.mark.parametrize(
    ("backend_name", "case"),
    of_operators(["contiguous", "strided", "empty_batch", "half", "reduced", "empty_table", "masked", "coupled"]),
)
def test_opcheck_draft_step(backend_name, case):
    inputs = inputs_for(backend_name, case)
    logits = inputs.target_logits[:, 0] if inputs.draft_logits is None else inputs.draft_logits[:, 0]
    if case == "empty_batch":
        # opcheck cannot clone an empty strided view
        inputs = inputs.map(lambda t: t.clone(memory_format=torch.contiguous_format))
        logits = logits.clone(memory_format=torch.contiguous_format)
    arguments = (
        logits, inputs.sampling(), inputs.draft_tokens[:, :1], inputs.d2t, inputs.allowed_to_draft(1), inputs.seed,
        inputs.position, 1, RULES.index(inputs.rule),
    )  # fmt: skip
    check(operation("draft_step", backend_name, device_of(backend_name).type), arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_fakes_have_the_real_shapes(backend, dtype):
    """Shape, dtype and strides of every output of the public functions are the same in a fake mode and for real."""
    device = device_of(backend)
    if device.type != "cpu":
        dtype = torch.float32  # the fakes do not depend on the device

    def run():
        empty = torch.zeros(3, 0, device=device)
        table = TokenTable(empty.long(), empty, empty.bool(), empty.int())
        arguments = {"params": SamplingParams(top_k=5), "seed": 0, "position": 0, "table": table, "backend": backend}
        d = draft_step(torch.zeros(3, 20, dtype=dtype, device=device), offset=0, **arguments)
        tokens = torch.stack([d.tokens, d.tokens], 1)
        q = torch.zeros(3, 2, 20, dtype=dtype, device=device)
        p = torch.zeros(3, 3, 20, dtype=dtype, device=device)
        steps = [speculative_step(p, tokens, q, log_probs=log_probs, **arguments) for log_probs in (False, True)]
        tensors = [*d, *steps[0][:4], *steps[1]]
        return [(tuple(t.shape), t.dtype, t.stride(), t.device.type) for t in tensors]

    real = run()
    with FakeTensorMode():
        assert run() == real


def step_of_a_loop(draft_logits, target_logits, seed, position, params, backend, rule="token", table=None):
    """What the decoding loop compiles: K drafts, then the verification, as a function of tensors."""
    common = {"params": params, "seed": seed, "position": position, "backend": backend, "rule": rule, "table": table}
    drafts, tokens = [], seed.new_empty((len(seed), 0))
    for i in range(draft_logits.shape[1]):
        drafts.append(draft_step(draft_logits[:, i], offset=i, drafts=tokens, **common))
        tokens = torch.cat([tokens, drafts[-1].tokens[:, None]], 1)
    q: dict = {"draft_logits": None}
    if rule != "coupled":
        q["draft_logits"] = draft_logits
        q["draft_stats"] = tuple(torch.stack([getattr(d, n) for d in drafts], 1) for n in ("cutoff", "lse"))
    out = speculative_step(target_logits, tokens, **q, log_probs=True, **common)
    return out.tokens, out.num_accepted, out.status, out.num_emitted, out.log_probs.nan_to_num(7.0), out.num_emitted + 1


@pytest.mark.parametrize(
    ("backend_name", "compiler"),
    [*((b, "aot_eager") for b in ("reference", "cpu", "triton", "auto")), ("cpu", "eager")],
)
def test_compile_fullgraph(backend_name, compiler):
    """One graph without breaks, recompilation for new values or warnings, with the same results as without
    compiling."""
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


def every_day_or_nightly() -> Iterator:
    """What is traced is the call of an operator: without a GPU, every day all rules of ``cpu``, two of the reference,
    and Triton, whose interpreter is slow, in ``test_compile_fullgraph`` alone."""
    for name, rule in itertools.product(OPERATORS, RULES):
        daily = name == "cpu" or (name, rule) in {("reference", "token"), ("reference", "coupled")}
        yield pytest.param(name, rule, marks=[] if daily or torch.cuda.is_available() else pytest.mark.nightly)


@pytest.mark.parametrize(("backend_name", "rule"), every_day_or_nightly())
def test_compile_every_rule_with_filters_and_a_table(backend_name, rule):
    torch._dynamo.reset()
    compiled = torch.compile(step_of_a_loop, fullgraph=True, backend="aot_eager", dynamic=False)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for random_state in range(2):
            inputs = random_step(2, 2, 40, temperature=(0.0, 0.7), random_state=random_state, **SAMPLING)
            inputs = inputs.to(device_of(backend_name))
            arguments = (inputs.draft_logits, inputs.target_logits, inputs.seed, inputs.position, inputs.params)
            arguments += (backend_name, rule, inputs.table)
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


def test_compile_with_the_tensors_of_a_decoding_loop():
    """They are a list of tensors of which some are None, which must not break the graph."""
    torch._dynamo.reset()
    compiled = torch.compile(step_of_a_loop, fullgraph=True, backend="aot_eager")
    inputs = random_step(4, 2, 40, temperature=(0.0, 0.7), **SAMPLING)
    arguments = (inputs.draft_logits, inputs.target_logits, inputs.seed, inputs.position, inputs.sampling(), "cpu")
    assert all(map(torch.equal, compiled(*arguments), step_of_a_loop(*arguments)))


@pytest.mark.parametrize(
    ("sampling", "told"),
    [
        ([torch.ones(2)], "the nine SamplingTensors"),
        ([None] * 9, "the nine SamplingTensors"),
        ([torch.ones(3), *[None] * 8], "temperature has a wrong shape"),
        ([torch.ones(2), None, torch.ones(2, 3), *[None] * 6], "penalties, ends and first_end belong to a table"),
        ([torch.ones(2), None, None, torch.zeros(2, 0).long(), *[None] * 5], "a table has ids, bias"),
    ],
)
def test_other_lists_of_sampling_tensors_are_refused(sampling, told):
    """Also by native code itself, which would read beyond them."""
    zero = torch.zeros(2, dtype=torch.int64)
    with pytest.raises(RuntimeError, match=f"specdec_kernels: .*{told}"):
        operation("draft_step", "cpu", "cpu")(torch.zeros(2, 5), sampling, None, None, None, zero, zero, 0, 0)
