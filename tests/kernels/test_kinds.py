"""Later calls of a kind, whose kernels are launched on addresses: they are the calls that Triton would have launched.

In Triton's interpreter, where no kernel is compiled, another one stands in for the compiled one: it refuses arguments
for which it was not compiled, and interprets the kernel on the memory that it is given."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch

from specdec_kernels.testing import StepInputs, TreeInputs, device_of, random_step, random_tree_step

triton = pytest.importorskip("triton")
triton_backend = pytest.importorskip("specdec_kernels.backends.triton")
from specdec_kernels.backends.triton import kinds, stages  # noqa: E402

ON_GPU = torch.cuda.is_available()
STREAM = 7
MODULES = (
    stages, triton_backend.draft_children, triton_backend.draft_step, triton_backend.speculative_step,
    triton_backend.verify_tree,
)  # fmt: skip
FILTERS = {"top_k": 3, "top_p": 0.9}
TABLE = {"table": 5, "presence_penalty": 0.5, "repetition_penalty": 1.2}


def of_memory(like: torch.Tensor, address: int) -> torch.Tensor:
    """A tensor of the form of ``like`` at this address."""
    size = sum((n - 1) * step for n, step in zip(like.shape, like.stride(), strict=True)) + 1
    if like.numel() == 0:
        return torch.empty_like(like)
    memory = torch.frombuffer((ctypes.c_char * (size * like.dtype.itemsize)).from_address(address), dtype=like.dtype)
    return memory.as_strided(like.shape, like.stride())


def relocated(like: object, given: Any) -> object:
    """The arguments as tensors. Refuses those for which Triton would have compiled another kernel."""
    if isinstance(like, tuple):
        assert isinstance(given, tuple) and len(like) == len(given)
        parts = [relocated(*pair) for pair in zip(like, given, strict=True)]
        return type(like)(*parts) if hasattr(like, "_fields") else tuple(parts)
    if isinstance(like, torch.Tensor):
        assert isinstance(given, int) and (given - like.data_ptr()) % 16 == 0
        return of_memory(like, given)
    assert type(given) is type(like) and given == like  # integers that are 1 or multiples of 16 are constants
    return given


class Compiled:
    """What a launch of ``kernel`` with these arguments returns on a GPU."""

    function, packed_metadata = "its function", "its metadata"

    def __init__(self, kernel: Any, grid: tuple, arguments: tuple, constants: dict, later: list[str]):
        self.kernel, self.grid, self.arguments, self.constants, self.later = kernel, grid, arguments, constants, later

    def run(self, x: int, y: int, z: int, stream: int, function, metadata, described, before, after, *given) -> None:
        assert (function, metadata) == (self.function, self.packed_metadata) and described is before is after is None
        self[x, y, z](*given, stream=stream)

    def __getitem__(self, grid: tuple) -> Callable:
        assert grid == self.grid

        def launch(*given: object, stream: int) -> None:
            assert stream == STREAM and len(given) == len(self.kernel.arg_names)
            self.later.append(self.kernel.__name__)
            arguments = relocated(self.arguments, given[: len(self.arguments)])
            self.kernel[grid](*arguments, **self.constants)

        return launch


class Kernel:
    def __init__(self, kernel: Any, later: list[str]):
        self.kernel, self.later = kernel, later
        self.__name__, self.arg_names = kernel.__name__, kernel.arg_names

    def __getitem__(self, grid: tuple) -> Callable:
        def launch(*arguments: object, **constants: object) -> Compiled:
            self.kernel[grid](*arguments, **constants)
            return Compiled(self.kernel, grid, arguments, constants, self.later)

        return launch


@pytest.fixture
def later(monkeypatch) -> list[str]:
    """The kernels that were launched on addresses so far; on a GPU nothing is known of them."""
    names: list[str] = []
    monkeypatch.setattr(kinds, "_kinds", {})
    if not ON_GPU:
        monkeypatch.setattr(kinds, "current_stream", lambda: STREAM)
        for module in MODULES:
            for name in [name for name in vars(module) if name.endswith("_kernel")]:
                monkeypatch.setattr(module, name, Kernel(getattr(module, name), names))
    return names


def twice_and_anew(monkeypatch, calls: list[Callable[[], Any]], later: list[str], kernels: int) -> None:
    """Calls of one kind, with other numbers each: those after the first give what they give as the first."""
    results = [[*call()] for call in calls]
    assert len(kinds._kinds) == 1 and (ON_GPU or len(later) == kernels * (len(calls) - 1))
    for call, got in zip(calls, results, strict=True):
        monkeypatch.setattr(kinds, "_kinds", {})
        for a, b in zip(got, call(), strict=True):
            assert a is b is None or torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))


STEPS: dict[str, tuple[int, dict[str, Any]]] = {  # kernels, and the step
    "plain": (2, {"stats": True}),
    "without statistics": (2, {}),
    "filters": (4, {"stats": True, **FILTERS}),
    "filters of both": (4, {**FILTERS, "log_probs": True}),
    "table": (2, {**TABLE}),
    "empty table": (2, {"table": 0}),
    "one_hot": (2, {"kind": "one_hot"}),
    "no drafts": (2, {"num_drafts": 0}),
    "block": (3, {"rule": "block", **TABLE}),
    "coupled": (2, {"rule": "coupled", "log_probs": True}),
    "coupled, filters": (5, {"rule": "coupled", **FILTERS}),
    "reduced": (2, {"reduced": 20, "stats": True}),
    "masked": (4, {"reduced": 20, "allowed": 0.5, "masked_drafts": 1, **FILTERS}),
    "half": (2, {"dtype": torch.bfloat16, "draft_dtype": torch.float16}),
}


def steps(case: str) -> list[StepInputs]:
    options = {"batch": 2, "num_drafts": 2, "vocabulary": 40, "temperature": (0.0, 0.8), **STEPS[case][1]}
    return [random_step(**options, random_state=state).to(device_of("triton")) for state in (0, 1)]


@pytest.mark.parametrize("case", STEPS)
def test_later_steps_of_a_kind(monkeypatch, later, case):
    calls = [lambda inputs=inputs: inputs.run("triton") for inputs in steps(case)]
    twice_and_anew(monkeypatch, calls, later, STEPS[case][0])


@pytest.mark.parametrize("case", ["plain", "filters", "table", "coupled", "coupled, filters", "reduced", "masked"])
@pytest.mark.parametrize("offset", [0, 1])
def test_later_drafts_of_a_kind(monkeypatch, later, case, offset):
    def call(inputs: StepInputs) -> Callable[[], Any]:
        logits = inputs.target_logits if inputs.draft_logits is None else inputs.draft_logits
        return lambda: inputs.draft(logits[:, offset], offset, "triton")

    inputs = steps(case)
    kernels = 2 + bool(inputs[0].params.top_k is not None) * (3 if "coupled" in case else 2)
    twice_and_anew(monkeypatch, [*map(call, inputs)], later, kernels)


@pytest.mark.parametrize("rule", ["walk", "token", "block"])
@pytest.mark.parametrize("options", [{}, {**FILTERS, **TABLE, "reduced": 20}], ids=["plain", "everything"])
def test_later_trees_of_a_kind(monkeypatch, later, rule, options):
    inputs: list[TreeInputs] = [
        random_tree_step((-1, 0, -1), 2, 40, rule=rule, drafter="cpu", random_state=state, **options)
        for state in (0, 1)
    ]
    inputs = [i.to(device_of("triton")) for i in inputs]
    kernels = 2 + 2 * bool(options) + (rule == "walk" and bool(options))  # which races apart behind filters
    twice_and_anew(monkeypatch, [lambda i=i: i.run("triton") for i in inputs], later, kernels)
    if rule == "walk":
        return
    later.clear()
    monkeypatch.setattr(kinds, "_kinds", {})
    calls = [lambda i=i: i.draft(i.draft_logits[:, 1], 1, (0,), 2, "triton") for i in inputs]
    twice_and_anew(monkeypatch, calls, later, 5 if options else 3)


def moved(tensor: torch.Tensor, by: int) -> torch.Tensor:
    """The same numbers, ``by`` elements after the beginning of an allocation."""
    memory = tensor.new_empty(tensor.numel() + by)
    memory[by:] = tensor.flatten()
    return memory[by:].view(tensor.shape)


def test_what_makes_another_kind(later):
    """Whatever Triton compiles another kernel for, or what changes a launch; but not numbers."""
    (inputs, other) = steps("filters of both")
    wide = inputs.target_logits.new_zeros(2, 3, 48)
    wide[..., :40] = inputs.target_logits
    different = {
        "itself": inputs,
        "alignment": inputs.replace(target_logits=moved(inputs.target_logits, 1)),
        "another alignment": inputs.replace(target_logits=moved(inputs.target_logits, 2)),
        "alignment of seeds": inputs.replace(seed=moved(inputs.seed, 1)),
        "strides": inputs.replace(target_logits=wide[..., :40]),
        "dtype": inputs.replace(target_logits=inputs.target_logits.bfloat16()),
        "dtype of q": inputs.replace(draft_logits=inputs.draft_logits.bfloat16()),
        "rule": inputs.replace(rule="block"),
        "log_probs": inputs.replace(log_probs=False),
        "num_drafts": inputs.replace(num_drafts=torch.full_like(inputs.seed, 2)),
        "batch": inputs.map(lambda t: t[:1]),
    }
    for number, (name, its) in enumerate(different.items(), 1):
        its.run("triton")
        assert len(kinds._kinds) == number, name
        before = len(later)
        its.run("triton")
        assert len(kinds._kinds) == number and (ON_GPU or len(later) > before), name
    other.run("triton")
    assert len(kinds._kinds) == len(different)


def test_other_numbers_of_warps_are_other_kernels(later):
    inputs = steps("plain")[0]
    inputs.run("triton")
    before = len(later)
    with kinds.using("decide_kernel", 2):
        inputs.run("triton")
    inputs.run("triton")
    assert len(later) == before


def test_no_more_kinds_than_allowed_are_remembered(monkeypatch, later):
    monkeypatch.setattr(kinds, "MOST_KINDS", 3)
    for vocabulary in range(30, 38):
        random_step(1, 1, vocabulary).run("triton")
        assert 1 <= len(kinds._kinds) <= 3


class Noted:
    """A kernel, and what later launches of it are given."""

    __name__, arg_names = "measure_kernel", ["given", "scratch", "nested", "CONSTANT"]

    def __init__(self) -> None:
        self.given: list[tuple] = []

    def __getitem__(self, grid: tuple) -> Callable:
        return lambda *arguments, **constants: self

    function = packed_metadata = None

    def run(self, *given: Any) -> None:
        self.given.append(given[9:])


def test_arguments_of_later_launches(monkeypatch):
    """Tensors become the later call's, even where the first one was given one of them twice; the rest is what it was.
    Scratch is at multiples of 16 bytes, whole, and no other's, wherever its memory begins."""
    monkeypatch.setattr(kinds, "current_stream", lambda: STREAM)
    f32, u8 = torch.float32, torch.uint8
    shapes = [(f32, (3, 5)), (torch.int64, (2,)), (f32, (0, 4)), (u8, (1,)), (u8, (16,))]
    for shift in (0, 1, 15):
        given, kernel = torch.ones(3), Noted()
        call = kinds.FirstCall([given, None, given], torch.device("cpu"))
        pieces = [call.allocate(dtype, *shape) for dtype, shape in shapes]
        one, none, other = call.tensors
        assert (one == other).all() and none is None
        inner = (other, 5)
        call.launch(kernel, (1, 2, 3), one, tuple(pieces), (inner, 1000, inner, (True,)))
        call.launch(kernel, (1, 2, 3), inner, None, other)
        memory: list[torch.Tensor] = []

        def empty(size: int, shift=shift, memory=memory, new=torch.empty, **how) -> torch.Tensor:
            memory.append(new(size + shift, **how)[shift:])
            return memory[0]

        with monkeypatch.context() as shifted:
            shifted.setattr(torch, "empty", empty)
            call.kind.launch([32, None, 48], torch.device("cpu"))
        (first, scratch, nested, constant), (again, nothing, last, _) = kernel.given
        assert first == 32 and nested == ((48, 5), 1000, (48, 5), (True,)) and constant is None
        assert again == (48, 5) and nothing is None and last == 48
        end = memory[0].data_ptr()
        for address, piece in zip(scratch, pieces, strict=True):
            assert address % 16 == 0 and address >= end
            end = address + piece.nbytes
        assert end <= memory[0].data_ptr() + memory[0].nbytes


def test_a_tensor_that_no_later_call_would_have_is_refused():
    call = kinds.FirstCall([torch.ones(3)], torch.device("cpu"))
    with pytest.raises(LookupError, match="neither given nor a result nor scratch"):
        call.launch(Noted(), (1, 1, 1), call.tensors[0], torch.ones(3), None)


@pytest.mark.skipif(ON_GPU, reason="Triton's own kernels")
@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
def test_hooks_see_later_launches(monkeypatch, later, hook):
    """Profilers have Triton call them around launches, which it then describes to them."""
    ways: list[str] = []
    monkeypatch.setattr(Compiled, "run", lambda self, *given: ways.append("run"))
    monkeypatch.setattr(Compiled, "__getitem__", lambda self, grid: lambda *given, stream: ways.append("described"))
    inputs, chain = steps("plain")[0], getattr(triton.knobs.runtime, hook)
    inputs.run("triton")
    inputs.run("triton")
    monkeypatch.setattr(chain, "calls", [print])
    inputs.run("triton")
    assert ways == ["run"] * 2 + ["described"] * 2
