"""What only the Triton backend does: compiling ahead of time for every family of GPUs without spilling registers, the
number of launches, and how cutoffs are found.

A step of every rule and form of q is compared with the reference here. All other test files cover the backend as well,
in Triton's interpreter if there is no GPU."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator

import pytest
import torch
import triton
from support import ROOT

from specdec_kernels import Rule, SamplingParams, draft_step
from specdec_kernels.backends.reference_distribution import cutoff_of
from specdec_kernels.testing import (
    assert_same_step,
    assert_statistics_close,
    device_of,
    random_step,
    random_tree_step,
)

TARGETS = {"sm_80": "cuda 80 32", "sm_90": "cuda 90 32", "sm_100": "cuda 100 32", "gfx942": "hip gfx942 64"}
KERNELS = {
    "measure_kernel", "select_kernel", "select_flat_kernel", "race_kernel", "sums_kernel", "decide_kernel",
    "decide_draft_kernel", "decide_tree_kernel", "first_children_kernel", "decide_children_kernel",
}  # fmt: skip
# Instructions of variants without a table or a reduced vocabulary. While an H200 reads a block, it can issue 496:
# docs/cuda.md. Those of the kernels that decide are 48 KB, which the first step after others has to fetch.
LONGEST = [
    ("measure_kernel", "'N': 4", 4 * 300),
    ("decide_kernel", "'VISITS': 8", 3072),
    ("decide_tree_kernel", "'NODES': 8, 'COLUMNS': 8, 'VISITS': 4", 3072),
]
OTHERS = {  # of layers, and of caches
    "attend_kernel",
    "compact_kernel",
    "rms_norm_kernel",
    "add_rms_norm_kernel",
    "rotate_kernel",
    "rope_angles_kernel",
    "gated_kernel",
    "conv_window_kernel",
    "delta_step_kernel",
    "ssd_step_kernel",
    "store_kernel",
}
INF = float("inf")


@pytest.mark.parametrize(
    ("target", "variants"),
    [
        pytest.param("sm_90", "few", marks=pytest.mark.nvcc),
        pytest.param("gfx942", "few", marks=pytest.mark.nightly),
        *(pytest.param(t, "all", marks=pytest.mark.nightly) for t in TARGETS),
    ],
)
def test_compiles_ahead_of_time(target, variants, tmp_path):
    """No kernel spills registers with the launch table's number of warps."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.compile_triton", *TARGETS[target].split(), variants], cwd=ROOT,
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path)}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    lines = done.stdout.splitlines()
    assert {line.split()[0] for line in lines} == KERNELS | OTHERS
    for kernel, variant, most in LONGEST:
        found = [line for line in lines if line.startswith(kernel) and variant in line]
        numbers = [re.search(r"(\w+) instructions", line)[1] for line in found]
        assert found and all(number == "unknown" or int(number) <= most for number in numbers), found
    found = [(line.split()[0], re.search(r"(\w+) bytes spilled", line)[1]) for line in lines]
    if "unknown" in dict(found).values():
        pytest.skip("compiled; registers are unknown, as this build of Triton has no cuobjdump that runs")
    # Triton 3.6's assembler spills some, to fit one more program on a multiprocessor. With a table, ``select_flat``
    # searches for every token of its tile.
    most = 32 if triton.__version__.startswith("3.6") and target != "gfx942" else 0
    assert all(int(spilled) <= (128 if name == "select_flat_kernel" else most) for name, spilled in found), done.stdout


def test_launch_table():
    """Every kernel has a number of warps for every family of GPUs: a power of 2, with at most 1024 threads."""
    from specdec_kernels.backends.triton import kinds, tables

    assert tables.WARPS.keys() == KERNELS >= tables.WARPS_WITH_TABLE.keys()
    for numbers in (*tables.WARPS.values(), *tables.WARPS_WITH_TABLE.values()):
        for family, number in zip(tables.FAMILIES, numbers, strict=True):
            assert number in (1, 2, 4, 8, 16, 32) and number * (64 if family == "amd" else 32) <= 1024
    device = torch.device("cpu")
    usual = tables.options("select_kernel", device, False)
    with kinds.using("select_kernel", 16):
        changed = tables.options("select_kernel", device, False)
        assert changed == {"num_warps": 16, "DEPENDENT": False} != usual
        assert tables.options("select_kernel", device, True) == changed | {"maxnreg": 128}
    assert tables.options("select_kernel", device, False) == usual


@pytest.mark.parametrize(
    ("capability", "hip", "family", "limited"),
    [
        ((8, 0), None, "ampere", True), ((8, 9), None, "ampere", True), ((9, 0), None, "hopper", True),
        ((10, 0), None, "blackwell", True), ((12, 0), None, "blackwell", True), ((9, 4), "6.4", "amd", False),
    ],
)  # fmt: skip
def test_each_gpu_has_its_launches(monkeypatch, capability, hip, family, limited):
    from specdec_kernels.backends.triton import tables

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(tables, "family", tables.family.__wrapped__)  # without what it remembers
    numbers = dict(zip(tables.FAMILIES, tables.WARPS["select_kernel"], strict=True))
    device, dependent = torch.device("cuda", 0), family in ("hopper", "blackwell")
    assert tables.family(device) == family
    later = {"launch_pdl": True} if dependent else {}
    expected = {"num_warps": numbers[family], "DEPENDENT": dependent}
    assert tables.options("select_kernel", device, False) == expected | later
    assert ("maxnreg" in tables.options("select_kernel", device, True)) == limited
    # An operation's first kernel lets the next one begin early, but does not begin early itself.
    first = tables.options("measure_kernel", device, False)
    assert first["DEPENDENT"] == dependent and "launch_pdl" not in first


class Forgetful(dict):
    """Kinds of calls that are not remembered, so that every call is the first of its kind."""

    def get(self, key, default=None):
        return default


def forget_kinds(monkeypatch) -> None:
    from specdec_kernels.backends.triton import kinds

    monkeypatch.setattr(kinds, "_kinds", Forgetful())


@pytest.fixture
def launched(monkeypatch) -> list[str]:
    """The names of the kernels launched so far."""
    from specdec_kernels.backends import triton as modules

    names: list[str] = []

    class Counting:
        def __init__(self, name, kernel):
            self.__name__, self.kernel, self.arg_names = name, kernel, kernel.arg_names

        def __getitem__(self, grid):
            names.append(self.__name__)
            return self.kernel[grid]

    from specdec_kernels.backends.triton import stages

    forget_kinds(monkeypatch)

    for module in (stages, modules.draft_children, modules.draft_step, modules.speculative_step, modules.verify_tree):
        for name in KERNELS & set(vars(module)):
            monkeypatch.setattr(module, name, Counting(name, getattr(module, name)))
    return names


def test_launches(launched):
    """A draft and a step take two launches, whatever B, K and V; an empty batch takes none."""
    inputs = random_step(2, 2, 1300, temperature=(0.0, 1.0))
    inputs.draft(inputs.draft_logits[:, 0], 0, "triton")
    assert launched == ["measure_kernel", "decide_draft_kernel"]
    inputs.run("triton")
    assert launched[2:] == ["measure_kernel", "decide_kernel"]
    inputs.map(lambda t: t[:0]).run("triton")
    assert len(launched) == 4


@pytest.mark.parametrize("rule", Rule)
def test_filters_take_two_launches_more(launched, rule):
    """With every rule, and also with a table; with ``coupled`` the race is one more, and ``block`` has one for sums."""
    for filters, table in itertools.product(({}, {"top_k": 2}), ({}, {"table": 3})):
        inputs = random_step(1, 1, 5, rule=rule, **filters, **table)
        first = ["measure_kernel", *(["select_kernel", "select_flat_kernel"] if filters else [])]
        first += ["race_kernel"] if filters and rule == "coupled" else []
        launched.clear()
        inputs.run("triton")
        assert launched == [*first, *(["sums_kernel"] if rule == "block" else []), "decide_kernel"]
        launched.clear()
        inputs.draft(inputs.target_logits[:, 0], 0, "triton")
        assert launched == [*first, "decide_draft_kernel"]


def test_launches_of_trees(launched):
    """Two, three for sampled children, with filters two more, one more if these are raced in, and none for an empty
    batch."""
    for filters in ({}, {"top_k": 2}):
        inputs = random_tree_step((-1, 0), 1, 5, rule="block", drafter="cpu", **filters)
        first = ["measure_kernel", *(["select_kernel", "select_flat_kernel"] if filters else [])]
        launched.clear()
        inputs.run("triton")
        assert launched == [*first, "decide_tree_kernel"]
        launched.clear()
        inputs.replace(rule="walk", draft_logits=None).run("triton")
        assert launched == [*first, *(["race_kernel"] if filters else []), "decide_tree_kernel"]
        launched.clear()
        inputs.draft(inputs.target_logits[:, 1], 1, (0,), 2, "triton")
        assert launched == [*first, "first_children_kernel", "decide_children_kernel"]
        launched.clear()
        inputs.replace(rule="walk").draft(inputs.target_logits[:, 1], 1, (0,), 2, "triton")
        assert launched == [*first, "decide_children_kernel"]
    launched.clear()
    inputs.map(lambda t: t[:0]).run("triton")
    assert launched == []


def outcomes(rule: str) -> list[torch.Tensor]:
    """Results of a step over two blocks (greedy, filtered and without drafts), and of a draft; or of children."""
    if rule == "children":
        tree = random_tree_step((-1,), 2, 1100, rule="token", temperature=(0.0, 1.3), drafter="cpu")
        return list(tree.draft(tree.target_logits[:, 0], 0, (), 3, "triton"))
    options = {"temperature": (0.0, 0.7, 1.3), "min_p": (0.0, 0.01, 0.0), "log_probs": True}
    inputs = random_step(3, 1, 1100, rule=rule, **options).replace(num_drafts=torch.tensor([1, 1, 0]))
    drafted = inputs.draft(inputs.target_logits[:, 1], 1, "triton")
    return [t.cpu() for t in (*inputs.run("triton"), *drafted) if t is not None]


def identical(results: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(a.nan_to_num(-9), b.nan_to_num(-9)) for a, b in zip(results, others, strict=True))


@pytest.mark.parametrize("rule", [*Rule, "children"])
def test_the_order_of_programs_has_no_effect(monkeypatch, rule):
    """The interpreter runs programs in order. Here it runs them backwards, and starting in the middle."""
    if torch.cuda.is_available():
        pytest.skip("programs run in the order that the GPU takes")
    from triton.runtime.interpreter import interpreter_builder

    usual, set_index, moved = outcomes(rule), interpreter_builder.set_grid_idx, 0
    for order in (lambda x, n: n - 1 - x, lambda x, n: (x + n // 2) % n):

        def set_other_index(x, y, z, order=order):
            nonlocal moved
            place = order(x, interpreter_builder.grid_dim[0])
            moved += place != x
            set_index(place, y, z)

        monkeypatch.setattr(interpreter_builder, "set_grid_idx", set_other_index)
        assert identical(outcomes(rule), usual)
    assert moved > 0


@pytest.mark.parametrize("rule", [*Rule, "children"])
def test_scratch_may_hold_anything(rule):
    """No scratch memory is read before it is written."""
    usual = outcomes(rule)
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills new tensors with NaN or the largest integer
    try:
        assert torch.empty(1, dtype=torch.int32).item() == 2**31 - 1
        assert identical(outcomes(rule), usual)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="programs that run at the same time need a GPU")
@pytest.mark.parametrize("rule", Rule)
def test_same_outcome_every_time(rule):
    """Repeated runs of many sequences, whose programs arrive in different orders."""
    inputs = random_step(64, 3, 32_000, temperature=0.8, rule=rule, log_probs=True)
    usual = [t for t in inputs.run("triton") if t is not None]
    for _ in range(200):
        assert identical([t for t in inputs.run("triton") if t is not None], usual)


SAMPLING = {
    "plain": {},
    "filters": {"top_k": (0, 4, 30), "top_p": (0.8, 1.0, 0.9), "min_p": (0.0, 0.1, 0.02)},
    "table": {"table": 9, "repetition_penalty": 1.3, "presence_penalty": 0.25, "frequency_penalty": 0.5},
}
SAMPLING["all"] = SAMPLING["filters"] | SAMPLING["table"]
Q = {
    "full": {},
    "handed_over": {"stats": True},
    "reduced": {"reduced": 20},
    "one_hot": {"kind": "one_hot"},
}


def compare(inputs, drafts: torch.Tensor | None = None) -> None:
    """Compares a step, and ``draft_step`` on one more row after its drafts, with the reference."""
    want, margin = inputs.reference()
    assert_same_step(inputs.run("triton"), want, margin)
    if drafts is not None:
        got, want = (inputs.draft(drafts, inputs.draft_tokens.shape[1], b) for b in ("triton", "reference"))
        assert torch.equal(got.tokens, want.tokens) and torch.equal(got.status, want.status)
        assert torch.equal(got.cutoff == -INF, want.cutoff == -INF)
        for name in ("log_q", "lse"):
            assert_statistics_close(getattr(got, name), getattr(want, name), want.lse.abs() + 10)


def every_day_or_nightly(repeated: set, *names: Iterable) -> Iterator:
    """Triton's interpreter takes a second for a case: what another case has as well is for the night."""
    for case in itertools.product(*names):
        nightly = case in repeated and not torch.cuda.is_available()
        yield pytest.param(*case, marks=[pytest.mark.nightly] * nightly)


# The settings of a rule are read by the same kernels for all rules.
SETTINGS_OF_TOKEN = {(rule, sampling) for rule in ("block", "coupled") for sampling in ("filters", "table", "all")}
# `block` reads q as `token` does; of the forms that it needs in addition, the residual's, one is left.
FORMS_OF_TOKEN = {("handed_over", "block"), ("full", "block"), ("one_hot", "block")}


@pytest.mark.parametrize(("rule", "sampling"), every_day_or_nightly(SETTINGS_OF_TOKEN, Rule, SAMPLING))
def test_settings(rule, sampling):
    inputs = random_step(3, 1, 30, temperature=(0.0, 0.7, 1.3), rule=rule, log_probs=True, **SAMPLING[sampling])
    drafts = None if rule == "block" else inputs.target_logits[:, 1]  # rule `block` drafts as `token` does
    compare(inputs, drafts)


@pytest.mark.parametrize(("q", "rule"), every_day_or_nightly(FORMS_OF_TOKEN, Q, ("token", "block")))
def test_forms_of_q(rule, q):
    inputs = random_step(2, 2, 33, temperature=(1.0, 0.6), rule=rule, top_k=20, **Q[q], **SAMPLING["table"])
    compare(inputs)


@pytest.mark.parametrize("rule", Rule)
def test_several_blocks(rule):
    """Tables, filters and reduced vocabularies across blocks of 1024."""
    form = {} if rule == "coupled" else {"reduced": 1100}
    inputs = random_step(1, 1, 2100, rule=rule, random_state=3, top_k=300, top_p=0.9, **form, **SAMPLING["table"])
    compare(inputs, inputs.target_logits[:, 1] if rule == "coupled" else None)


def test_races_over_several_blocks():
    """Rule `coupled` without filters: ``measure`` runs its race, of one block of 1024 at a time."""
    compare(random_step(3, 2, 2100, rule="coupled", random_state=3))


def test_blocks_that_stand_in_part():
    """Their residual has a weight, which is not 1 with these drafts."""
    for state in (2, 4, 5, 6):
        compare(random_step(2, 3, 10, rule="block", random_state=state))


@pytest.mark.parametrize("parts", [1, 3])
def test_blocks_that_programs_share(monkeypatch, parts):
    """With rule `block`, how many programs share the blocks of a residual changes nothing."""
    from specdec_kernels.backends.triton import speculative_step as module

    inputs = random_step(2, 3, 20_000, rule="block", temperature=(0.0, 0.8), log_probs=True)
    usual = [t for t in inputs.run("triton") if t is not None]
    forget_kinds(monkeypatch)
    monkeypatch.setattr(module, "PARTS", parts)
    assert identical([t for t in inputs.run("triton") if t is not None], usual)


@pytest.mark.parametrize("size", [2, 4])
def test_blocks_of_a_program(monkeypatch, size):
    """How many blocks a program measures changes no bit, whether they end with the row or not."""
    from specdec_kernels.backends.triton import stages

    inputs = random_step(2, 2, 5300, temperature=(0.0, 0.8), log_probs=True)
    usual = [t for t in inputs.run("triton") if t is not None]
    forget_kinds(monkeypatch)
    monkeypatch.setattr(stages, "blocks_of_a_program", lambda blocks, more: size)
    assert identical([t for t in inputs.run("triton") if t is not None], usual)


def test_more_sequences_than_a_dimension_of_a_grid(monkeypatch):
    from specdec_kernels.backends.triton import stages

    for options in ({}, {"rule": "coupled", "top_k": 9}):
        inputs = random_step(3, 1, 2100, **options)
        usual = [t for t in inputs.run("triton") if t is not None]
        forget_kinds(monkeypatch)
        monkeypatch.setattr(stages, "MOST_SEQUENCES", 2)
        assert identical([t for t in inputs.run("triton") if t is not None], usual)
        monkeypatch.undo()


def test_q_of_a_draft_is_of_processed_logits():
    """Nearly all tokens are in the table."""
    inputs = random_step(3, 1, 10, temperature=(1.0, 0.7, 1.3), **SAMPLING["table"])
    compare(inputs, inputs.target_logits[:, 1])


def test_more_blocks_than_a_pass_reads_at_once():
    inputs = random_step(1, 1, 9000, temperature=1.5, top_p=0.9)
    compare(inputs, inputs.target_logits[:, 0])


HARD = {
    "ties": [2.0, 1.0, 2.0, 1.0, 1.0, 0.0, 2.0, -1.0],
    "zeros": [0.0, -0.0, 0.0, -0.0, -1.0, -0.0],
    "masked": [0.5, -INF, -INF, 0.25, -INF, -3e38],
    "one": [-INF, -7.0, -INF],
    "far": [3e38, -3e38, 1e-38, -1e-38, 0.0, 1.0],
    "equal": [1.25] * 7,
    "tail": [2.0, 1.5, 1.0, *[0.9] * 20],  # which top-p must not count after a top-k of 3
}


@pytest.mark.parametrize("row", HARD)
def test_cutoffs(row):
    """With ties, signed zeros, masked tokens and the extremes of float32, the cutoff is the reference's, bit for bit,
    also with a top_p that keeps almost nothing or almost everything."""
    filters = [
        (1, 1.0, 0.0),
        (2, 1.0, 0.0),
        (4, 1.0, 0.0),
        (50, 1.0, 0.0),
        (0, 0.0, 0.0),
        (0, 0.999, 0.0),
        (5, 0.4, 0.0),
        (3, 0.8, 0.0),
    ]
    logits = torch.tensor(HARD[row]).expand(len(filters), -1)
    top_k, top_p, min_p = (torch.tensor(column) for column in zip(*filters, strict=True))
    params = SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p)
    device = device_of("triton")
    got = draft_step(logits.to(device), params, seed=0, position=0, offset=0, backend="triton").cutoff.cpu()
    temperature = torch.ones(len(filters), dtype=torch.float64)
    want, _ = cutoff_of(logits.double(), temperature, torch.tensor(filters))
    assert torch.equal(got.double(), want)


def test_auto_does_not_interpret():
    """The interpreter is for tests: ``auto`` never chooses it for CPU tensors."""
    from specdec_kernels.backends import operation

    assert "triton" not in str(operation("draft_step", "auto", "cpu"))
