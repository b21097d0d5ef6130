"""What the pages name exists: links, files and folders of the repository, names of Python."""

from __future__ import annotations

import ast
import builtins
import importlib
import re
from functools import cache

import pytest
import torch
import transformers
from support import ROOT
from support.api_reference import reference

PAGES = sorted(
    str(p.relative_to(ROOT))
    for p in (
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("examples/*"),
        ROOT / "bench/README.md",
        ROOT / "python/specdec/embedded/README.md",
    )
    if p.suffix in (".md", ".py")
)
OTHERS_FILES = {  # of other projects, and what commands write
    "docs/bench.md": {"prepare_data.py", "evaluation/speed.py", "speed.py"},
    "docs/migration/README.md": {"main.py", "serving.py"},
    "docs/migration/llama_cpp.md": {"common/speculative.cpp"},
    "docs/migration/llm_speculative_sampling.md": {"main.py", "serving.py", "benchmark.py"},
    "docs/migration/vllm.md": {"vllm/config/speculative.py"},
}
OTHERS_FOLDERS = {"build/", "plots/", "answers/"}
OTHERS_NAMES = {
    "SequenceBias",
    "NoBadWords",
    "MinNewTokensLength",
    "Authorization",
    "BlockMask",
    "Host",
    "Retry",
    "load_dataset",
    "pipe",
    "rate",
}
FILE = re.compile(r"(?<![\w/.*<>-])((?:[\w.-]+/)*[\w.-]+\.(?:py|h|cpp|cu|sh|toml|service))\b(?![\w/*(])")
FOLDER = re.compile(r"`((?:[a-z_]+/)+)`")
DOTTED = re.compile(r"(?<![\w/.-])(specdec(?:_kernels)?(?:\.[A-Za-z_]\w*)+)")
NAME = re.compile(r"`([A-Z][a-z]+(?:[A-Z][A-Za-z]*)?)(?:\.(\w+))?(?:\([^`]*\))?`")
CALL = re.compile(r"`([a-z_]\w+)\([^`]*\)`")


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


@cache
def files() -> tuple[str, ...]:
    folders = ("csrc", "specdec_kernels", "python", "tests", "bench", "docs", "examples", "tools", ".ci")
    found = [*ROOT.iterdir(), *(path for folder in folders for path in (ROOT / folder).rglob("*"))]
    return tuple(f"/{path.relative_to(ROOT)}" for path in found if path.is_file() and "__pycache__" not in path.parts)


@cache
def defined() -> frozenset[str]:
    """The names of all classes and functions of the repository's Python, and the public ones of Python, torch and
    transformers."""
    others = (builtins, torch, torch.Tensor, transformers, transformers.LlamaForCausalLM, transformers.generation)
    found = {name for other in others for name in dir(other)} | OTHERS_NAMES
    for path in files():
        if path.endswith(".py"):
            nodes = ast.walk(ast.parse(text_of(path[1:])))
            kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
            found |= {node.name for node in nodes if isinstance(node, kinds)}
    return frozenset(found)


def exists(name: str) -> bool:
    """Whether a dotted name is a module, or stands in one. ``specdec.harness`` needs lm_eval to be imported, and
    ``_C_cuda`` is there where nvcc is."""
    path = name.replace(".", "/") + ".py"
    in_a_file = any(file.endswith(f"/{path}") for file in files())
    return in_a_file or "._C" in name or reference.resolves(name, importlib.import_module("specdec"), None)


def absent_files(page: str) -> list[str]:
    """A page may name a file by the end of its path, where the rest is plain from what it is about."""
    text = text_of(page)
    named = {*FILE.findall(text)} - {"llama.cpp"} - OTHERS_FILES.get(page, set())
    wrong = [name for name in named if not any(path.endswith(f"/{name.removeprefix('../')}") for path in files())]
    return wrong + [
        f for f in FOLDER.findall(text) if f not in OTHERS_FOLDERS and not any(f"/{f}" in path for path in files())
    ]


def absent_names(page: str) -> list[str]:
    text = text_of(page)
    wrong = [
        name
        for name in DOTTED.findall(text)
        if not exists(name) and name != "specdec.service"  # the unit of systemd
    ]
    for name, attribute in NAME.findall(text):
        if name in defined():
            cls = getattr(importlib.import_module("specdec"), name, None)
            if attribute and cls is not None and attribute not in reference.attributes(cls):
                wrong.append(f"{name}.{attribute}")
        else:
            wrong.append(name)
    return wrong + [f"{name}()" for name in CALL.findall(text) if name not in defined()]


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)\s]+)[^)]*\)", text_of(page)) if page.endswith(".md") else []
    for link in links:
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        goal = (ROOT / page).parent.joinpath(path) if path else ROOT / page
        assert goal.exists(), link
        if anchor and goal.suffix == ".md":
            headings = re.findall(r"^#+ (.*)$", goal.read_text(encoding="utf-8"), flags=re.MULTILINE)
            anchors = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
            assert anchor in anchors, link


@pytest.mark.parametrize("page", PAGES)
def test_files_that_are_named_exist(page):
    assert absent_files(page) == []


@pytest.mark.parametrize("page", PAGES)
def test_names_that_are_named_exist(page):
    assert absent_names(page) == []


def test_what_does_not_exist_is_found(monkeypatch):
    wrong = (
        "In `loop/absent.py` and `absent/`, `specdec.absent.name` has `Absent`, `Stats.absent` and `absent_call(3)`."
    )
    monkeypatch.setitem(globals(), "text_of", lambda page: wrong if page == "x" else (ROOT / page).read_text("utf-8"))
    assert absent_files("x") == ["loop/absent.py", "absent/"]
    assert absent_names("x") == ["specdec.absent.name", "Absent", "Stats.absent", "absent_call()"]
