"""Builds the API reference from the docstrings: pages of HTML in build/api, made by pdoc (the extra ``[docs]``).

    python tools/api_reference.py            # build/api/index.html
    python tools/api_reference.py --check    # only the checks, which need no pdoc

It is strict. A public name without a docstring, an argument or attribute that does not exist, a reference that leads
nowhere, and every warning of pdoc (such as an annotation that it cannot resolve) are errors.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import re
import sys
import typing
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
# The pages. Modules without ``__all__`` show all public names that they define.
MODULES = (
    "specdec",
    "specdec.drafters",
    "specdec.drafters.predicted",
    "specdec.loop.step",
    "specdec.loop.typical",
    "specdec_kernels",
    "specdec_layers",
)
# Names of other libraries that docstrings mention; they are looked up there.
OTHERS = ("torch", "transformers", "asyncio", "contextlib", "builtins")

REFERENCE = re.compile(r":(?:class|func|meth|mod|attr):`~?([\w.]+)`|``([A-Za-z_][\w.]*)(?:\(\))?``")
ENTRY = re.compile(r"^ {4}((?:\w+, )*\w+):(?: |$)", re.MULTILINE)


def public_names(module: ModuleType) -> list[str]:
    if hasattr(module, "__all__"):
        return list(module.__all__)
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]


def documented(module: ModuleType) -> Iterator[tuple[str, object, type | None]]:
    """Yields the public functions and classes of a module, and what those classes define: path, object, class."""
    for name in public_names(module):
        value = getattr(module, name)
        path = f"{module.__name__}.{name}"
        if not (inspect.isclass(value) or inspect.isroutine(value)):
            continue
        yield path, value, None
        for member, part in vars(value).items() if inspect.isclass(value) else ():
            if not member.startswith("_") and (isinstance(part, property) or inspect.isroutine(part)):
                yield f"{path}.{member}", getattr(value, member), value


def docstring(value: object) -> str:
    """The docstring, an inherited one too; "" where dataclasses and tuples have made one of their own."""
    found = inspect.getdoc(value) or ""
    return "" if inspect.isclass(value) and found.startswith(f"{value.__name__}(") else found


def section(doc: str, title: str) -> list[str]:
    """The names that a section such as "Args" lists."""
    found = re.search(rf"^{title}:\n((?: +.*\n|\n)*)", doc + "\n", re.MULTILINE)
    return [name for names in ENTRY.findall(found[1]) for name in names.split(", ")] if found else []


def parameters(value: object) -> set[str]:
    if isinstance(value, property) or inspect.isclass(value) and issubclass(value, Exception):
        return set()
    return set(inspect.signature(value).parameters)


def attributes(cls: type) -> set[str]:
    """What an object of the class has, those that its methods set included."""
    known = set(dir(cls))
    for base in cls.__mro__:
        if base.__module__.startswith("specdec"):
            known |= {*inspect.get_annotations(base), *re.findall(r"\bself\.(\w+)", inspect.getsource(base))}
    return known


def resolves(name: str, module: ModuleType, owner: type | None) -> bool:
    """Whether a dotted name exists: in the module, in the class, in what is public, or in another library."""
    first, *rest = name.split(".")
    places = [module, *map(importlib.import_module, (*MODULES, *OTHERS))]
    if owner is not None and not rest and first in attributes(owner):
        return True
    if first in ("specdec", "specdec_kernels", "specdec_layers", *OTHERS):
        for end in range(len(rest) + 1, 0, -1):
            try:
                value: object = importlib.import_module(".".join((first, *rest)[:end]))
            except ImportError:
                continue
            return _has(value, [first, *rest][end:])
    return any(hasattr(place, first) and _has(getattr(place, first), rest) for place in places)


def _has(value: object, names: list[str]) -> bool:
    for name in names:
        if not hasattr(value, name):
            return inspect.isclass(value) and name in attributes(value)
        value = getattr(value, name)
    return True


def faults(module: ModuleType) -> list[str]:
    """Returns what is wrong with the docstrings of a module's public names, each with its place."""
    found = [] if inspect.getdoc(module) else [f"{module.__name__}: no docstring"]
    for path, value, cls in documented(module):
        doc = docstring(value)
        if not doc:
            found.append(f"{path}: no docstring")
        names = parameters(value)
        found += [f"{path}: no argument {name}" for name in section(doc, "Args") if name not in names]
        owner = value if inspect.isclass(value) else cls
        if inspect.isclass(value):
            known = attributes(value)
            found += [f"{path}: no attribute {name}" for name in section(doc, "Attributes") if name not in known]
        home = sys.modules[getattr(inspect.unwrap(value), "__module__", None) or (cls or type(value)).__module__]
        for role, literal in REFERENCE.findall(doc):
            name = role or literal
            # A literal in lower case without a dot is an argument, a word or a value; one with capitals is a name.
            if (role or "." in name or name[:1].isupper()) and name not in names:
                if not resolves(name, home, owner):
                    found.append(f"{path}: {name} leads nowhere")
    return found


def comments(cls: type) -> dict[str, str]:
    """What the comments of a class say of its fields, which is where shapes and dtypes are: those above a field, or
    beside it."""
    found, above = {}, ""
    for line in inspect.getsource(cls).splitlines():
        if comment := re.fullmatch(r" {4}# (.*)", line):
            above = f"{above} {comment[1]}".strip()
            continue
        if field := re.match(r" {4}(\w+)(?:: .*?)?(?: = .*?)?(?:  # (.*))?$", line):
            if said := field[2] or above:
                found[field[1]] = said
        above = ""
    return found


def build(output: Path) -> None:
    """Writes the pages. Raises for whatever pdoc warns of."""
    import pdoc

    for module in map(importlib.import_module, MODULES):
        for name in public_names(module):
            value = getattr(module, name)
            if not inspect.isclass(value):
                continue
            pdoc.doc_ast.walk_tree(value).var_docstrings.update(comments(value))
            if issubclass(value, tuple):
                # The constructor of a NamedTuple knows its annotations as text, and not the module to find them in.
                value.__new__.__annotations__ = typing.get_type_hints(value)
    pdoc.render.configure(docformat="google", footer_text="specdec", search=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pdoc.pdoc(*MODULES, output_directory=output)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only check the docstrings")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "api", help="a folder (%(default)s)")
    options = parser.parse_args()
    found = [fault for name in MODULES for fault in faults(importlib.import_module(name))]
    if found:
        sys.exit("\n".join(found))
    if not options.check:
        build(options.output)
        print(options.output / "index.html")


if __name__ == "__main__":
    main()
