"""The rooms of ``specdec``: a room imports only rooms to its left, and only public names of the packages of operations,
which know nothing of each other."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import specdec
import specdec_layers
from support import ROOT

import specdec_kernels

# From left to right. What stands in one tuple does not import each other; "" are the root words.
ORDER = (
    ("",),
    ("sampling", "models"),
    ("drafters",),
    ("loop",),
    ("generate",),
    ("decoder",),
    ("serving", "hf"),
    ("evaluation", "jobs"),
    ("training",),
    ("cli",),
)
# Those of ``models``, where "" are what stands in it directly.
IN_MODELS = (("machine",), ("exchanged",), ("cache",), ("forward",), ("ranks",), ("",), ("load",))


def ranks(order: tuple[tuple[str, ...], ...]) -> dict[str, int]:
    return {room: rank for rank, rooms in enumerate(order) for room in rooms}


RANK, RANK_IN_MODELS = ranks(ORDER), ranks(IN_MODELS)
PACKAGE = ROOT / "python" / "specdec"
# The package itself loads public names lazily, and these are other names of what stands on the right.
DOORS = {PACKAGE / name for name in ("__init__.py", "__main__.py", "harness.py", "ray.py", "verify.py")}
FILES = [file for file in sorted(PACKAGE.rglob("*.py")) if file not in DOORS]


def module_of(file: Path) -> tuple[str, ...]:
    """A package's ``__init__.py`` is the package."""
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


def imports(file: Path, lazy: bool = True) -> list[tuple[str, ...]]:
    """Of modules of ``specdec``, all of them: with ``lazy`` those of functions and TYPE_CHECKING, too."""
    package = module_of(file) if file.name == "__init__.py" else module_of(file)[:-1]
    tree = ast.parse(file.read_text())
    found = []
    for node in ast.walk(tree) if lazy else tree.body:
        if isinstance(node, ast.ImportFrom) and node.level:
            base = package[: len(package) - node.level + 1]
            module = (*base, *(node.module or "").split(".")) if node.module else base
            found += [with_name(module, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "specdec":
            found += [with_name(tuple(node.module.split(".")[1:]), alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [tuple(alias.name.split(".")[1:]) for alias in node.names if alias.name.split(".")[0] == "specdec"]
    return found


def with_name(module: tuple[str, ...], name: str) -> tuple[str, ...]:
    """``from module import name``: the name is a module, or stands in one."""
    whole = PACKAGE.joinpath(*module, name)
    return (*module, name) if whole.is_dir() or whole.with_suffix(".py").is_file() else module


def room_of(module: tuple[str, ...], rank: dict[str, int]) -> str:
    return module[0] if module and module[0] in rank else ""


def goes_left(module: tuple[str, ...], other: tuple[str, ...], rank: dict[str, int]) -> bool:
    room, entered = room_of(module, rank), room_of(other, rank)
    return room == entered or rank[entered] < rank[room]


def test_a_file_imports_only_rooms_to_its_left():
    for module, other in ((module_of(file), other) for file in FILES for other in imports(file)):
        assert goes_left(module, other, RANK), f"{'.'.join(other)} is to the right of {'.'.join(module)}"
        if module[:1] == other[:1] == ("models",):
            assert goes_left(module[1:], other[1:], RANK_IN_MODELS), f"{'.'.join(other)} is to the right"


def test_there_are_no_circles():
    graph = {module_of(file): {m for m in imports(file) if m != module_of(file)} for file in FILES}
    left = dict(graph)
    while ends := [module for module, needed in left.items() if not needed & left.keys()]:
        for module in ends:
            del left[module]
    assert not left


def test_a_step_can_be_read():
    """With all that it imports."""
    files = {module_of(file): file for file in FILES}
    found, left = set(), {("loop", "step")}
    while left:
        found |= left
        left = {other for module in left for other in imports(files[module], lazy=False)} - found
    assert len(found) <= 15 and sum(len(files[module].read_text().splitlines()) for module in found) <= 2000


OPERATIONS = {package.__name__: package for package in (specdec_kernels, specdec_layers)}


def test_only_public_names_of_the_operations():
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (package := OPERATIONS.get((node.module or "").split(".")[0])):
                names = {alias.name for alias in node.names}
                public = node.module == package.__name__ and names <= {*package.__all__, "__version__"}
                assert public, f"{file}: from {node.module} import {', '.join(sorted(names))}"
            if isinstance(node, ast.Import):
                assert not any(alias.name.startswith(tuple(f"{p}." for p in OPERATIONS)) for alias in node.names), file


OF_SAMPLING = r"core/(accept|distribution|params|random|tree)\.h"
# What does not stand in some sources. The package ``specdec`` stands in neither.
UNKNOWN = {
    ("specdec_kernels", "csrc/cpu", "csrc/cuda", "csrc/*.*"): r"specdec_layers|layers/",
    ("python/specdec_layers", "csrc/layers"): rf"specdec_kernels|{OF_SAMPLING}|\.\./\.\./(cpu|cuda)/",
    ("csrc/drafters",): r"torch|specdec_(kernels|layers)|\.\./",
    ("csrc/common",): rf"specdec_(kernels|layers)|{OF_SAMPLING}|\.\./(cpu|cuda|layers)/",
}


@pytest.mark.parametrize("parts", UNKNOWN, ids=lambda parts: parts[0])
def test_operations_know_nothing_of_each_other_or_of_models(parts):
    """Those of sampling and those of layers; and the native code that both are made of, nothing of either."""
    unknown = re.compile(rf"{UNKNOWN[parts]}|(from|import) specdec\b")
    files = [
        f for part in parts for found in ROOT.glob(part) for f in (found.rglob("*") if found.is_dir() else [found])
    ]
    sources = [file for file in files if file.suffix in (".py", ".h", ".cpp", ".cu")]
    assert sources and not [str(file) for file in sources if unknown.search(file.read_text())]


def test_public_names_are_where_the_package_looks_for_them():
    assert {name for names in specdec._HOMES.values() for name in names} == set(specdec.__all__)
    for name in specdec.__all__:
        assert getattr(specdec, name).__name__ == name
    assert specdec.SamplingParams is specdec_kernels.SamplingParams
