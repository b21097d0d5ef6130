"""What the packages call of torch, triton and transformers exists in the installed version, with the arguments that it
is given: also where only a GPU would call it. The nightly run has the oldest and the newest versions."""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import inspect
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from specdec.models.forward.attention import _kernel_options
from support import ROOT
from torch.nn.attention.flex_attention import FlexKernelOptions

from specdec_kernels.backends.triton.tables import options

LIBRARIES = {"torch", "triton", "transformers"}
PACKAGES = (ROOT / "python" / "specdec", ROOT / "python" / "specdec_layers", ROOT / "specdec_kernels")
SOURCES = [file for package in PACKAGES for file in package.rglob("*.py")]


class Use(NamedTuple):
    """A name of a library in a source file, and the call if it is called."""

    name: str  # with its module
    line: int
    call: ast.Call | None


def uses(source: str) -> Iterator[Use]:
    tree, imported = ast.parse(source), {}
    # What only some versions have is imported where an ImportError is caught.
    tried = (node for node in ast.walk(tree) if isinstance(node, ast.Try))
    guarded = {n for t in tried if any("ImportError" in ast.unparse(h) for h in t.handlers) for n in t.body}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [(a.asname, a.name) if a.asname else (a.name.split(".")[0],) * 2 for a in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [(a.asname or a.name, f"{node.module}.{a.name}") for a in node.names]
        else:
            continue
        imported |= {here: name for here, name in names if name.split(".")[0] in LIBRARIES and node not in guarded}
    yield from (Use(name, 0, None) for name in imported.values())

    def name_of(node: ast.AST) -> str | None:
        if isinstance(node, ast.Attribute):
            return f"{base}.{node.attr}" if (base := name_of(node.value)) else None
        return imported.get(node.id) if isinstance(node, ast.Name) else None

    called = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for node in ast.walk(tree):
        if name := name_of(node):
            yield Use(name, node.lineno, called.get(id(node)))


@functools.cache
def find(name: str) -> object:
    """
    Raises:
        ImportError: it does not exist.
    """
    top, *parts = name.split(".")
    found: object = importlib.import_module(top)
    for i, part in enumerate(parts):
        module = ".".join((top, *parts[: i + 1]))
        try:
            found = getattr(found, part)
        except AttributeError:
            found = importlib.import_module(module)
        except RuntimeError:  # a property that wants a GPU, whose parts cannot be seen without one
            return getattr(type(found), part)
    return found


def fault(use: Use) -> str | None:
    """What is wrong with it; None: nothing, or it is written in C and does not say what it takes."""
    try:
        found = find(use.name)
    except ImportError:
        return f"line {use.line}: {use.name} does not exist"
    if use.call is None:
        return None
    found = getattr(found, "fn", found)  # of a Triton function
    if inspect.ismethod(found) and inspect.ismethod(wrapped := getattr(found, "__wrapped__", None)):
        found = wrapped  # transformers' copies of bound methods, from which ``signature`` takes ``cls`` twice
    try:
        signature = inspect.signature(found)
    except ValueError:
        return None
    given, named = use.call.args, [k.arg for k in use.call.keywords]
    whole = None not in named and not any(isinstance(a, ast.Starred) for a in given)
    bind = signature.bind if whole else signature.bind_partial
    positional = [a for a in given if not isinstance(a, ast.Starred)]
    try:
        bind(*positional, **{name: None for name in named if name})
    except TypeError as error:
        return f"line {use.line}: {use.name}: {error}"
    return None


def test_all_that_is_called_exists():
    faults, keywords = [], set()
    for path in SOURCES:
        for use in uses(path.read_text()):
            keywords |= {(use.name.split(".", 1)[1], k.arg) for k in (use.call.keywords if use.call else ())}
            if why := fault(use):
                faults.append(f"{path.relative_to(ROOT)}, {why}")
    assert not faults, "\n".join(faults)
    only_on_gpus = {
        ("nn.attention.flex_attention.BlockMask.from_kv_blocks", "compute_q_blocks"),
        ("cuda.graph", "capture_error_mode"), ("cuda.Event", "enable_timing"), ("jit", "do_not_specialize"),
    }  # fmt: skip
    assert only_on_gpus <= keywords


@pytest.mark.parametrize(
    "wrong",
    ["torch.cuda.no_such", "torch.cuda.graph(g, errors=1)", "cuda.Event(1, 2, 3, 4, 5)", "tl.sum(x, along=0)"],
)
def test_what_does_not_exist_is_found(wrong):
    source = "import torch\nfrom torch import cuda\nimport triton.language as tl\n"
    assert not [why for use in uses(source) if (why := fault(use))]
    assert [why for use in uses(source + wrong) if (why := fault(use))]


@pytest.mark.parametrize(
    ("kind", "methods"),
    [
        (torch.cuda.CUDAGraph, ("pool", "replay")),
        (torch.cuda.Event, ("elapsed_time", "query", "record", "synchronize")),
        (torch.Tensor, ("pin_memory",)),
    ],
)
def test_methods_that_only_gpus_have(kind, methods):
    assert not [name for name in methods if not callable(getattr(kind, name, None))]


def test_options_of_kernels():
    compiler = pytest.importorskip("triton.backends.nvidia.compiler")
    known = {field.name for field in dataclasses.fields(compiler.CUDAOptions)}
    chosen = {*options("decide_kernel", torch.device("cpu"), table=True)} - {"DEPENDENT"}  # a constant of the kernel
    assert chosen == {"num_warps", "maxnreg"} and chosen | {"launch_pdl"} <= known
    assert {*_kernel_options(8)} <= {*FlexKernelOptions.__annotations__}
