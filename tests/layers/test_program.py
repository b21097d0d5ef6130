"""Programs: calls that are kept run in their order, on what tensors then hold; and what they keep of PyTorch's."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import threading

import pytest
import torch
from specdec_layers import Program, native_form, rms_norm
from specdec_layers.ops import handle
from support.recorded import Recording

aten = torch.ops.aten
ADD, WRITE, NORM, RESHAPED = map(handle, ("add", "write_rows", "rms_norm", "reshaped"))


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_calls_run_one_after_the_other_on_what_tensors_hold():
    x, weight, y, target = numbers(2, 3, 40), numbers(40, seed=1), torch.zeros(2, 3, 40), torch.zeros(5, 40)
    program, rows = Program(), torch.tensor([3, 1])
    program.keep(NORM, (x, weight, 1e-5, 0.0), results=[y])
    program.keep(ADD, (x, y), results=[z := torch.zeros(2, 3, 40)])
    program.keep(WRITE, (target, rows, z[:, 1]), results=[])
    assert not y.any() and not z.any() and not target.any()
    for step in range(3):
        program.run()
        expected = x + rms_norm(x, weight, 1e-5)
        assert torch.equal(z, expected) and torch.equal(target[[3, 1]], expected[:, 1])
        x.copy_(numbers(2, 3, 40, seed=2 + step))
        weight.data = numbers(40, seed=9 + step)  # other memory


def test_lists_of_results():
    x, weights, positions = numbers(1, 2, 8), [numbers(5, 8), numbers(3, 8)], torch.tensor([[3, 4]])
    results = [torch.zeros(1, 2, 5), torch.zeros(1, 2, 3)]
    angles = [torch.zeros(1, 2, 4) for _ in range(2)]
    program, linear, rope = Program(), handle("linear"), handle("rope_angles")
    program.keep(linear, (x, weights, [None, None], [0, 0]), results=results)
    program.keep(rope, (positions, numbers(2), 1.0), results=angles)
    program.run()
    assert all(map(torch.equal, results, linear(x, weights, [None, None], [0, 0])))
    assert all(map(torch.equal, angles, rope(positions, numbers(2), 1.0)))


def test_errors_are_those_of_the_operations():
    program, target, after = Program(), torch.zeros(4, 2), torch.zeros(2)
    rows = torch.tensor([1, 2])
    program.keep(WRITE, (target, rows, numbers(2, 2)), results=[])
    program.keep(ADD, (numbers(2), numbers(2)), results=[after])
    for wrong in (4, -1):
        rows[1] = wrong
        with pytest.raises(RuntimeError, match="rows has a number that is no row of target"):
            program.run()
        assert not target.any() and not after.any()
    rows[1] = 3
    program.run()
    assert target[[1, 3]].all() and after.all()
    for given, told in (
        ([torch.zeros(3)], "a given result has a wrong shape or dtype"),
        ([torch.zeros(2, dtype=torch.float64)], "a given result has a wrong shape or dtype"),
        ([torch.zeros(4)[::2]], "a given result has a wrong shape or dtype"),
        ([torch.zeros(2), torch.zeros(2)], "more results are given"),
    ):
        wrong_program = Program()
        wrong_program.keep(ADD, (numbers(2), numbers(2)), results=given)
        with pytest.raises(RuntimeError, match=told):
            wrong_program.run()
        assert torch.equal(ADD(numbers(2), numbers(2)), numbers(2) * 2)  # nothing is given to others


def test_what_cannot_be_kept_is_refused_and_the_next_call_runs():
    program = Program()
    with pytest.raises(ValueError, match=r"kept: got aten.mul.Tensor, allowed: specdec_layers.add"):
        program.keep(aten.mul.Tensor, (numbers(2), 2), results=[])
    with pytest.raises(RuntimeError, match="Expected a value of type 'Tensor' for argument 'y'"):
        program.keep(ADD, (numbers(2), "y"), results=[])
    assert torch.equal(ADD(numbers(2), numbers(2)), numbers(2) * 2)
    with pytest.raises(RuntimeError, match="a result is not on a CPU"):
        program.keep(ADD, (numbers(2), numbers(2)), results=[torch.empty(2, device="meta")])
    assert torch.equal(ADD(numbers(2), numbers(2)), numbers(2) * 2)
    program.run()


def test_a_program_is_freed_with_what_it_keeps():
    program, x = Program(), numbers(2)
    before = x._use_count()
    program.keep(ADD, (x, x), results=[torch.zeros(2)])
    assert x._use_count() == before + 2
    del program
    assert x._use_count() == before


def test_nobody_sees_that_a_program_is_made_run_or_freed():
    """Who repeated it would free a program twice."""
    x, y = numbers(2), torch.zeros(2)
    with Recording() as recording:
        program = Program()
    program.keep(ADD, (x, x), results=[y])
    with recording:
        program.run()
        del program
    assert torch.equal(y, 2 * x) and not recording.calls


def test_only_a_program_is_one():
    native = importlib.import_module("specdec_layers._C")
    for call in (native.run_program, native.keep_next):
        with pytest.raises(ValueError, match="PyCapsule"):
            call(3)
    assert torch.equal(ADD(numbers(2), numbers(2)), numbers(2) * 2)


def test_threads_have_programs_of_their_own():
    wrong = []

    def work(seed: int) -> None:
        x, y = numbers(3, 64, seed=seed), torch.zeros(3, 64)
        for _ in range(50):
            program = Program()
            program.keep(NORM, (x, None, 1e-5, 0.0), results=[y.zero_()])
            program.run()
            wrong.extend([seed] * (not torch.equal(y, rms_norm(x, None, 1e-5))))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


FORKED = """
import os, torch
from specdec_layers import Program, linear
torch.set_num_threads(3)
x, weight, y = torch.ones(1, 1, 500), torch.rand(4000, 500), torch.zeros(1, 1, 4000)
program = Program()
program.keep(torch.ops.specdec_layers.linear.default, (x, [weight], [None], [0]), results=[y])
program.run()
child = os.fork()
if child == 0:
    x.mul_(2)
    program.run()
    os._exit(0 if torch.equal(y, linear(x, weight)) else 1)
assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_process_runs_them():
    done = subprocess.run([sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("shape", [(), (0, 3), (7,), (1, 5, 576), (3, 100, 1027)])
def test_sums_have_the_bits_of_pytorch(instruction_set, shape):
    x, y = numbers(*shape) * 1e3, numbers(*shape, seed=1)
    assert native_form(aten.add.Tensor, (x, y), {}) == (ADD, (x, y), {})
    assert torch.equal(ADD(x, y), x + y) and ADD(x, y).stride() == x.stride()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_rows_are_written_as_by_pytorch(dtype):
    source, rows = (numbers(6, 5) * 9).to(dtype), torch.tensor([4, 0, 7, 4, 1, 0])  # the later one stays
    target = torch.zeros(8, 5, dtype=dtype)
    called = native_form(aten.index_copy_.default, (target, 0, rows, source), {})
    assert called == (WRITE, (target, rows, source), {})
    called[0](*called[1])
    assert torch.equal(target, torch.zeros(8, 5, dtype=dtype).index_copy_(0, rows, source))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize(
    ("order", "shape"),
    [
        ((0, 2, 1, 3), (-1, 7)),
        ((0, 2, 1, 3), (15, 14)),
        ((3, 1, 0, 2), (2, 105)),  # rows that are not dense
        ((1, 0, 2, 3), (210,)),
    ],
)
def test_a_reshape_that_copies_has_the_numbers_of_pytorchs(dtype, order, shape):
    x = (numbers(2, 3, 5, 7) * 9).to(dtype).permute(order)
    called = native_form(aten.reshape.default, (x, shape), {})
    assert called == (RESHAPED, (x, x.reshape(shape).shape), {})
    found = called[0](*called[1])
    assert torch.equal(found, x.reshape(shape)) and found.is_contiguous()
    program = Program()
    program.keep(called[0], called[1], results=[found])
    x.add_(1)
    program.run()
    assert torch.equal(found, x.reshape(shape))


def test_reshapes_of_two_rows_and_of_nothing():
    assert torch.equal(RESHAPED(numbers(3, 4).t(), (12,)), numbers(3, 4).t().reshape(12))
    assert RESHAPED(numbers(3, 0, 4).transpose(0, 1), (0, 12)).shape == (0, 12)
    assert RESHAPED(numbers(3, 0), (0, 5)).shape == (0, 5)
    torch.library.opcheck(RESHAPED, (numbers(3, 4).t(), (2, 6)), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize(
    ("operation", "args", "kwargs"),
    [
        (aten.add.Tensor, (numbers(2, 3), numbers(3)), {}),
        (aten.add.Tensor, (numbers(2, 3), 1.0), {}),
        (aten.add.Tensor, (numbers(2, 3), numbers(2, 3)), {"alpha": 2}),
        (aten.add.Tensor, (numbers(2, 3), numbers(2, 3).double()), {}),
        (aten.add.Tensor, (numbers(2, 3), numbers(3, 2).t()), {}),
        (aten.add.Tensor, (torch.empty(2, device="meta"), torch.empty(2, device="meta")), {}),
        (aten.sub.Tensor, (numbers(2), numbers(2)), {}),
        (aten.reshape.default, (numbers(2, 6), (3, -1)), {}),  # a view
        (aten.reshape.default, (torch.empty(2, 3, device="meta").t(), (6,)), {}),
        (aten.reshape.default, (numbers(2, 1, 2, 1, 3).transpose(0, 2), (-1,)), {}),
        (aten.index_copy_.default, (numbers(3, 4), 1, torch.tensor([1]), numbers(3, 1)), {}),
        (aten.index_copy_.default, (numbers(3), 0, torch.tensor([1]), numbers(1)), {}),
        (aten.index_copy_.default, (numbers(4, 3).t(), 0, torch.tensor([1]), numbers(1, 4)), {}),
    ],
)
def test_other_calls_stay_pytorchs(operation, args, kwargs):
    assert native_form(operation, args, kwargs) == (operation, args, kwargs)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: ADD(numbers(2), numbers(3)), "y has another shape or dtype than x"),
        (lambda: ADD(numbers(2).double(), numbers(2).double()), "x has a wrong dtype"),
        (lambda: RESHAPED(numbers(3, 2), (5,)), "shape has another number of numbers than x"),
        (lambda: RESHAPED(numbers(1, 1, 1, 1, 2), (2,)), "x has more than four dimensions, or none"),
        (lambda: WRITE(numbers(3), torch.tensor([0]), numbers(1)), "target has a wrong shape"),
        (lambda: WRITE(numbers(4, 3).t(), torch.tensor([0]), numbers(1, 4)), "target has a wrong shape or strides"),
        (lambda: WRITE(numbers(3, 4), torch.tensor([0.0]), numbers(1, 4)), "rows has a wrong shape or dtype"),
        (lambda: WRITE(numbers(3, 4), torch.tensor(0), numbers(1, 4)), "rows has a wrong shape"),
        (lambda: WRITE(numbers(3, 4), torch.tensor([0]), numbers(1, 3)), "source has a wrong shape or dtype"),
        (lambda: WRITE(numbers(3, 4), torch.tensor([0]), numbers(1, 4).double()), "source has a wrong shape or dtype"),
    ],
)
def test_wrong_tensors_are_refused(call, told):
    with pytest.raises(RuntimeError, match=f"specdec_layers: .*{told}"):
        call()
