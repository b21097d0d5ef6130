"""The C++ backend on every instruction set that this machine has: the same tokens as the reference, the corners, the
right distribution, and the environment variable that chooses one.

Sets are changed within the process, so that a case costs milliseconds. ``-m nightly`` runs the tests of the backend as
a whole on each set, by the environment variable."""

from __future__ import annotations

import functools
import importlib
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from support import ROOT
from support.arrangements import INF, NAN, drafted, rules_for, step
from support.cells import check, narrow_batch

from specdec_kernels import SamplingParams, Status, backends, build_info, draft_step
from specdec_kernels.backends import native
from specdec_kernels.ops import RULES, TREE_RULES
from specdec_kernels.testing import (
    assert_same_children,
    assert_same_draft,
    assert_same_step,
    assert_same_tree_step,
    random_step,
    random_tree_step,
    reference_draft,
)

assert native.missing() is None
EXTENSION = importlib.import_module("specdec_kernels._C")
SETS: list[str] = EXTENSION.instruction_sets()
FUSED = [name for name in SETS if name != "baseline"]  # those with fused multiply-adds

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SAMPLING = {"top_k": (0, 20, 1, 0, 5), "top_p": (1.0, 0.9, 0.3), "min_p": (0.0, 0.02)}
PENALTIES = {"repetition_penalty": (1.3, 0.8), "presence_penalty": (0.0, 0.5), "frequency_penalty": (0.2, -0.1)}
FORMS: tuple[dict, ...] = ({"stats": True}, {}, {"reduced": 30}, {"kind": "one_hot"})
CASES = range(60)


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    used = build_info()["native"]["instruction_set"]
    yield
    EXTENSION.use_instruction_set(used)


@pytest.fixture(params=SETS)
def instruction_set(request: pytest.FixtureRequest) -> str:
    EXTENSION.use_instruction_set(request.param)
    return request.param


@functools.cache
def case(number: int) -> tuple:
    """(inputs of a step, what the reference makes of them and of a draft's logits)."""
    rule, form = RULES[number % 3], FORMS[number % 4]
    if rule == "coupled":  # which needs no q
        form = FORMS[-1]
    vocabulary = (1000, 33, 1025, 1024, 2500, 40, 9133)[number % 7]  # the last is sampled for top-p
    inputs = random_step(
        6, number % 4, vocabulary, dtype=DTYPES[number // 3 % 3], draft_dtype=DTYPES[number // 2 % 3], rule=rule,
        temperature=(0.0, 0.5, 1.0, 1.7), table=9, log_probs=number % 2 == 0, random_state=number,
        **(SAMPLING | PENALTIES if number % 2 else {}), **form,
    )  # fmt: skip
    drawing = inputs.replace(d2t=None)
    logits, offset = inputs.target_logits[:, -1], inputs.draft_tokens.shape[1]
    return inputs, inputs.reference(), drawing, logits, offset, reference_draft(drawing, logits, offset)


def test_every_set_is_what_build_info_shows(instruction_set):
    shown = build_info()["native"]
    assert shown["instruction_set"] == instruction_set and shown["instruction_sets"] == SETS
    assert SETS[0] == "baseline"


def test_same_tokens_as_the_reference(instruction_set):
    near_ties = 0
    for number in CASES:
        inputs, expected, drawing, logits, offset, expected_draft = case(number)
        near_ties += assert_same_step(inputs.run("cpu"), *expected, f"{instruction_set} case {number}")
        drawn = drawing.draft(logits, offset, "cpu")
        near_ties += assert_same_draft(drawn, *expected_draft, drawing, logits, offset)
    assert near_ties <= 2


@functools.cache
def tree_case(number: int) -> tuple:
    """(inputs of a step with a tree, what the reference makes of them and of the root's children)."""
    inputs = random_tree_step(
        (-1, -1, 0, 0, 1, 3), 8, (33, 1100, 2500)[number // 3 % 3], rule=TREE_RULES[number % 3],
        dtype=DTYPES[number % 3], temperature=(0.0, 0.5, 1.0), table=9, random_state=number, **SAMPLING, **PENALTIES,
    )  # fmt: skip
    return inputs, inputs.reference(), inputs.reference_draft(inputs.target_logits[:, 0], 0, (), 5)


def test_same_trees_as_the_reference(instruction_set):
    for number in range(9):
        inputs, expected, children = tree_case(number)
        near_ties = assert_same_tree_step(inputs.run("cpu"), *expected, f"{instruction_set} case {number}")
        drawn = inputs.draft(inputs.target_logits[:, 0], 0, (), 5, "cpu")
        assert near_ties + assert_same_children(drawn, *children, f"{instruction_set} case {number}") == 0


@pytest.mark.skipif(len(FUSED) < 2, reason="needs two instruction sets with fused multiply-adds")
def test_fused_sets_agree_bit_for_bit():
    """The order of sums and what is fused do not depend on the width of vectors."""
    for number in CASES:
        inputs, _, drawing, logits, offset, _ = case(number)
        results = []
        for name in FUSED:
            EXTENSION.use_instruction_set(name)
            results.append([t for t in (*inputs.run("cpu"), *drawing.draft(logits, offset, "cpu")) if t is not None])
        for first, other in zip(*results[-2:], strict=True):
            assert torch.equal(first.nan_to_num(7.0), other.nan_to_num(7.0)), number


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_corners(instruction_set, dtype):
    """Ties, faults and rows that end within a block, wherever they are in a vector."""
    for at in (0, 7, 8, 15, 31, 32, 1023, 1024, 1040, 1299):
        row = torch.zeros(1, 1300, dtype=dtype)
        row[0, at:] = 2.0
        assert drafted("cpu", row, 0.0).tokens.tolist() == [at]
        for value, status in ((NAN, Status.DRAFT_NAN), (INF, Status.DRAFT_POSITIVE_INFINITY)):
            faulty = row.clone()
            faulty[0, at] = value
            for temperature in (0.0, 1.0):
                drawn = drafted("cpu", faulty, temperature)
                assert drawn.tokens.tolist() == [-1] and drawn.status.tolist() == [status]
        row[:] = -INF
        assert drafted("cpu", row, 1.0).status.tolist() == [Status.DRAFT_EMPTY]
        row[0, at] = -3.0
        drawn = drafted("cpu", row, 1e30)  # at which all finite logits weigh the same
        assert drawn.tokens.tolist() == [at] and abs(drawn.log_q.item()) < 1e-6


def test_weights_far_below_the_largest(instruction_set):
    """lse over 80 orders of magnitude, beyond which weights are 0, as float64 has it."""
    row = torch.linspace(-200.0, 0.0, 4200)[None]
    for temperature in (0.001, 0.3, 1.0, 7.0):
        expected = (row.double() / temperature).logsumexp(1)
        assert torch.allclose(drafted("cpu", row, temperature).lse.double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("rule", RULES)
def test_equal_models_are_always_accepted(instruction_set, rule):
    assert rule in rules_for("cpu", 0)
    row = torch.randn(1, 1300, generator=torch.Generator().manual_seed(1)).expand(40, -1)
    tokens = drafted("cpu", row, 0.7, seed=torch.arange(40), rule=rule).tokens[:, None]
    inputs = step([[0.0]] * 2, [0], None, 40, 0.7, rule=rule)
    draft = None if rule == "coupled" else row[:, None]
    inputs = inputs.replace(target_logits=row[:, None].expand(-1, 2, -1), draft_tokens=tokens, draft_logits=draft)
    assert (inputs.run("cpu").num_accepted == 1).all()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", SETS[:-1])  # the best one is what test_chi_square.py runs on
def test_emitted_distribution(name, rule):
    """20,000 draws: with power 0.999 it finds probabilities that are wrong by a factor of 1 +- 0.09."""
    EXTENSION.use_instruction_set(name)
    check(narrow_batch(rule, "stats", "near_equal", "filters"), "cpu", 20_000)


@pytest.fixture
def unread(monkeypatch) -> Iterator[pytest.MonkeyPatch]:
    """As before the first operation, when the environment variable has not been read."""
    cached = (native.missing, backends._loaded)
    for function in cached:
        function.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    for function in cached:
        function.cache_clear()


def test_the_environment_variable_chooses(unread):
    """Refused when the first operation runs, and by build_info; then obeyed."""

    def first_operation():
        return draft_step(torch.zeros(2, 5), SamplingParams(), seed=0, position=0, offset=0)

    unread.setenv("SPECDEC_CPU_ISA", "sse9")
    for refused in (first_operation, build_info):
        with pytest.raises(ValueError, match="SPECDEC_CPU_ISA: got 'sse9', allowed on this machine: baseline"):
            refused()
    unread.setenv("SPECDEC_CPU_ISA", "baseline")
    first_operation()
    assert build_info()["native"]["instruction_set"] == "baseline"


def test_a_set_that_the_machine_lacks_is_refused(unread):
    class Older:
        instruction_sets = staticmethod(lambda: ["baseline", "avx2"])

    unread.setenv("SPECDEC_CPU_ISA", "avx512")
    unread.setattr(native.importlib, "import_module", lambda name: Older)
    with pytest.raises(ValueError, match="SPECDEC_CPU_ISA: got 'avx512', allowed on this machine: baseline, avx2$"):
        native.missing()
    with pytest.raises(ValueError, match="'sse9'"):
        EXTENSION.use_instruction_set("sse9")


@pytest.mark.nightly
@pytest.mark.parametrize("name", SETS)
def test_all_tests_of_the_backend(name):
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-k", "cpu", "tests/kernels", "tests/layers"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"SPECDEC_CPU_ISA": name}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
