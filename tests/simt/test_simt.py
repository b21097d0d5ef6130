"""The simulated machine on which the CUDA kernels run without a GPU: which faults it finds; and the kernels under
sanitizers.

Every test with backend "cuda" checks that the kernels' tokens are the reference's and that no fault is found."""

from __future__ import annotations

import ctypes
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import simt.kernels
import torch

from specdec_kernels import SamplingParams, draft_step
from specdec_kernels.testing import assert_same_step, random_step
from specdec_kernels.types import SpeculativeStep

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the kernels themselves run")
SIMT = Path(__file__).parent


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """The kernels of machine_test.cpp by name: each takes a bug and a seed, and returns (fault, result)."""
    built = tmp_path_factory.mktemp("machine") / "machine_test.so"
    command = ["g++", "-std=c++20", "-O1", "-shared", "-fPIC", SIMT / "machine_test.cpp", SIMT / "machine.cpp"]
    subprocess.run([*command, "-o", built], check=True)
    library = ctypes.CDLL(str(built))

    def run(name: str, bug: int, seed: int) -> tuple[str, float]:
        function, result = getattr(library, f"run_{name}"), ctypes.c_float(-1.0)
        function.restype = ctypes.c_char_p
        return function(bug, ctypes.c_uint64(seed), ctypes.byref(result)).decode(), result.value

    return run


@pytest.mark.parametrize(("name", "result"), [("row_max", 4095.0), ("sum_copies", 1023 * 512.0)])
def test_a_right_kernel_has_no_fault(kernels, name, result):
    assert {kernels(name, 0, seed) for seed in range(20)} == {("", result)}


@pytest.mark.parametrize(
    ("bug", "words"),
    [
        (1, ("race", "never written")),  # a missing barrier of a block; which fault is seen depends on the order
        (2, ("race", "never written")),  # a barrier of the block instead of the cluster
        (3, ("race",)),
        (4, ("deadlock",)),
        (5, ("outside",)),
        (6, ("never written",)),
        (7, ("aligned",)),
        (8, ("has ended",)),
        (9, ("says that it runs",)),
        (10, ("race", "never written")),  # a write between the halves of a barrier
        (11, ("race", "never written")),  # a barrier that orders nothing
        (12, ("arrives again",)),
        (13, ("has not arrived",)),
    ],
)
def test_a_bug_is_found_in_every_order(kernels, bug, words):
    for seed in range(20):
        fault, _ = kernels("row_max", bug, seed)
        assert any(word in fault for word in words), (seed, fault)


@pytest.mark.parametrize(
    ("bug", "words"),
    [
        (1, ("not aligned",)),
        (2, ("never initialised",)),
        (3, ("race", "never written")),  # others wait before a barrier tells them that the arrival is initialised
        (4, ("may still write", "never written", "another one has")),  # nobody waits for the copy
        (5, ("another round",)),
        (6, ("race", "another one has")),  # the next copy while lanes still read
        (8, ("may still write", "writes what is read")),  # a read after the next copy has begun
        (9, ("in flight",)),
    ],
)
def test_a_bug_in_copies_is_found_in_every_order(kernels, bug, words):
    for seed in range(20):
        fault, _ = kernels("sum_copies", bug, seed)
        assert any(word in fault for word in words), (seed, fault)


def test_a_wrong_copy_gives_a_wrong_result(kernels):
    """A bug that breaks no rule of the machine can only be seen in the result."""
    assert all(kernels("sum_copies", 7, seed) == ("", 1023 * 512.0 - 128 * 4 * 128) for seed in range(5))


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("slots", [0, 1, 2, 3, -1])
@pytest.mark.parametrize(("dtype", "draft_dtype"), [(torch.bfloat16, torch.float32), (torch.float32, torch.float16)])
def test_slots_hold_logits_of_target_and_draft(rule, slots, dtype, draft_dtype):
    """Rows stay in their slots, or a residual's two rows reuse the slots of the target's rows."""
    inputs = random_step(3, 3, 4096, dtype=dtype, draft_dtype=draft_dtype, stats=True, rule=rule, top_k=(0, 4, 0))
    want, margin = inputs.reference()
    got = simt.kernels.speculative_step(*inputs.operands(), blocks=2, threads=64, slots=slots)
    assert_same_step(SpeculativeStep(*got), want, margin)


@pytest.mark.parametrize("slots", [0, 2, -1])
@pytest.mark.parametrize("log_probs", [False, True])
def test_a_warp_with_more_blocks_than_lanes(slots, log_probs):
    """Its lanes hold the statistics of 32 blocks of logits until these are written."""
    inputs = random_step(1, 4, 8192, stats=True, log_probs=log_probs)  # 40 blocks
    want, margin = inputs.reference()
    got = simt.kernels.speculative_step(*inputs.operands(), blocks=1, threads=32, slots=slots)
    assert_same_step(SpeculativeStep(*got), want, margin)


FLAT_ROWS = {
    "normal": lambda x: x,
    "narrow": lambda x: 20 + 1e-4 * x,
    "three_values": lambda x: 20 + x.clamp(-1, 1).round() / 8,
    "constant": lambda x: 0 * x + 0.7,
}


@pytest.mark.parametrize("kind", FLAT_ROWS)
@pytest.mark.parametrize("setting", [{"top_p": 0.9}, {"top_k": 6000}, {"top_k": 6000, "top_p": 0.9}])
def test_filters_read_flat_rows_few_times(kind, setting):
    """However flat a row whose 8192 logits exceed the list: the row is measured and its kept tokens are summed, and in
    between each filter reads it three times at most. Nor do all lanes add to one word."""
    logits = FLAT_ROWS[kind](torch.randn(1, 8192, generator=torch.Generator().manual_seed(7)))
    simt.kernels.take_counts()
    drawn, expected = (
        draft_step(logits, SamplingParams(**setting), seed=1, position=3, offset=0, backend=backend)
        for backend in ("cuda", "reference")
    )
    work = simt.kernels.take_counts()
    assert torch.equal(drawn.cutoff, expected.cutoff)
    reads = work.loads / (8192 / 4)
    between = len(setting) * (1 if kind == "constant" else 3)
    assert 2 + between <= reads < 3 + between  # also of the one block that a token is drawn from
    assert work.most <= 8192 / 8 and work.additions < 2.2 * 8192 * len(setting)


@pytest.mark.parametrize("slots", [0, 2, -1])
@pytest.mark.parametrize("vocabulary", [2050, 3083])  # the last granule but one of 2050 logits ends behind the row
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_begin_and_end_anywhere(slots, vocabulary, dtype):
    """Such rows are copied ahead as well, and nothing around them counts."""

    def spoiled(t: torch.Tensor) -> torch.Tensor:
        wide = torch.full((*t.shape[:2], vocabulary + 3 + vocabulary % 2), math.nan, dtype=t.dtype)
        return wide[..., 1 : vocabulary + 1].copy_(t)

    inputs = random_step(2, 3, vocabulary, dtype=dtype, draft_dtype=dtype)
    inputs.target_logits -= 40.0  # beside these, a 0 behind the row would have all the mass
    inputs.draft_logits -= 40.0
    want, margin = inputs.reference()
    target, tokens, draft, *others = inputs.operands()
    simt.kernels.take_counts()
    grid = {"blocks": 2, "threads": 64, "slots": slots}
    got = simt.kernels.speculative_step(spoiled(target), tokens, spoiled(draft), *others, **grid)
    assert_same_step(SpeculativeStep(*got), want, margin)
    assert (simt.kernels.take_counts().copies > 0) == (slots != 0)


@pytest.mark.parametrize("rule", ["token", "block"])
def test_a_draft_row_with_a_fault_has_no_cutoff(rule):
    """Filters compute none for it, so none may be read."""
    inputs = random_step(2, 3, 2048, top_k=20, rule=rule)
    inputs.draft_logits[:, 1] = math.nan
    want, margin = inputs.reference()
    got = simt.kernels.speculative_step(*inputs.operands(), blocks=2, threads=64, slots=-1)
    assert_same_step(SpeculativeStep(*got), want, margin)


@pytest.mark.nvcc  # compiles all kernels once more
def test_sanitizers():
    """No sanitizer, of addresses or undefined behaviour, reports a fault in steps of every rule, form of q and
    setting."""
    preloaded = subprocess.run(["g++", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True)
    environment = {
        "LD_PRELOAD": preloaded.stdout.strip(),
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "halt_on_error=1",
        "SPECDEC_SIMT_FLAGS": "-O1 -g1 -fsanitize=address,undefined -fno-sanitize-recover=undefined",
        "PYTHONPATH": os.pathsep.join([str(SIMT.parent), *sys.path]),
    }
    done = subprocess.run(
        [sys.executable, str(SIMT / "under_sanitizers.py")],
        env=os.environ | environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.splitlines() == ["80 steps", "91 steps of recurrent layers"]
