"""Nothing that is loaded runs code: safetensors only and no remote code, on every path from a caller to a loader."""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path

import pytest
import torch
import transformers
from specdec import load_embedded_pair, load_model, load_pair
from support import ROOT
from support.commands import invoke, save
from transformers import PreTrainedModel

SOURCES = [
    f for part in ("python", "specdec_kernels", "bench", "tools", "examples") for f in (ROOT / part).rglob("*.py")
]
LOADERS = ("AutoConfig", "AutoModelForCausalLM", "AutoTokenizer")
PICKLES = {"pickle", "dill", "joblib", "cloudpickle"}
# Names that unpickle, or fetch code.
UNSAFE = {
    "get_class_from_dynamic_module",
    "load_custom_generate",
    "load_state_dict_from_url",
    "read_pickle",
    "unpickle",
}
MARKS = re.compile(
    "|".join(["from_pretrained", "load_adapter", "trust_remote_code", r"torch\.load", *PICKLES, *UNSAFE])
)


def constant(call: ast.Call, name: str) -> object:
    value = next((keyword.value for keyword in call.keywords if keyword.arg == name), None)
    return value.value if isinstance(value, ast.Constant) else None


def test_no_call_leaves_it_to_a_default():
    found = set()
    for file in SOURCES:
        if not MARKS.search(text := file.read_text("utf-8")):
            continue  # parsing takes long
        for node in ast.walk(ast.parse(text)):
            at = f"{file.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"
            if isinstance(node, ast.Import | ast.ImportFrom):
                modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [a.name for a in node.names]
                assert not {m.split(".")[0] for m in modules} & PICKLES, at
                assert not {a.name for a in node.names} & UNSAFE, at
            if isinstance(node, ast.keyword) and node.arg == "trust_remote_code":
                assert isinstance(node.value, ast.Constant) and node.value.value is False, at
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            name, owner = node.func.attr, ast.unparse(node.func.value)
            assert name not in UNSAFE, at
            if (owner, name) == ("torch", "load"):  # the converter makes safetensors of older files
                assert file.name == "convert_head.py" and constant(node, "weights_only") is True, at
            if name == "from_pretrained":
                assert owner in LOADERS, at  # of others this test does not know what makes them safe
                assert constant(node, "trust_remote_code") is False, at
                assert owner != "AutoModelForCausalLM" or constant(node, "use_safetensors") is True, at
                found.add(f"{file.name} {owner}")
            if name == "load_adapter":
                assert constant(node, "use_safetensors") is True, at
                found.add(f"{file.name} load_adapter")
    ours = {"saved_model.py AutoConfig", "loading.py AutoTokenizer", "saved_model.py AutoModelForCausalLM"}
    assert ours | {"adapters.py load_adapter"} <= found


@pytest.fixture
def calls(monkeypatch) -> list[tuple[str, dict]]:
    """The loaders that specdec calls, with what they are given. Whatever unpickles fails."""
    seen: list[tuple[str, dict]] = []

    def watch(owner: type, method: str, name: str) -> None:
        genuine = getattr(owner, method)

        def watched(*args, **given):
            if sys._getframe(1).f_globals["__name__"].startswith("specdec."):
                seen.append((name, given))
            return genuine(*args, **given)

        monkeypatch.setattr(owner, method, watched)

    for name in LOADERS:
        watch(getattr(transformers, name), "from_pretrained", name)
    watch(PreTrainedModel, "load_adapter", "load_adapter")
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("unpickled"))
    return seen


def check(calls: list[tuple[str, dict]], *expected: str) -> None:
    # A configuration is read by itself where the default dtype depends on it, which is a matter of the CPU.
    assert {name for name, _ in calls} - {"AutoConfig"} == {*expected} - {"AutoConfig"}
    for name, given in calls:
        assert name == "load_adapter" or given["trust_remote_code"] is False
        assert name in ("AutoConfig", "AutoTokenizer") or given["use_safetensors"] is True
    calls.clear()


@pytest.fixture(scope="module")
def models(pair, tmp_path_factory) -> tuple[Path, Path, Path | None]:
    """A target, a draft, and an adapter of the target, where peft is installed."""
    folder = tmp_path_factory.mktemp("models")
    for name, seed in (("target", 0), ("draft", 1)):
        save(folder / name, seed, tokenizer=pair[2])
    try:
        import peft
    except ImportError:
        return folder / "target", folder / "draft", None
    config = peft.LoraConfig(target_modules=["q_proj"], r=2)
    peft.get_peft_model(load_model(folder / "target"), config).save_pretrained(folder / "adapter")
    return folder / "target", folder / "draft", folder / "adapter"


def test_public_functions(models, calls):
    target, draft, adapter = models
    more = () if adapter is None else ("load_adapter",)
    load_model(target, adapter=adapter)
    check(calls, "AutoModelForCausalLM", *more)
    load_pair(target, draft, adapter=adapter)
    check(calls, "AutoModelForCausalLM", "AutoTokenizer", *more)
    load_embedded_pair()
    check(calls, "AutoModelForCausalLM", "AutoTokenizer")


COMMANDS = {
    "generate": ("x",),
    "chat": (),
    "compare": ("x",),
    "verify": ("x",),
    "job": ("--batch-file", "{folder}/prompts.jsonl", "--output", "{folder}/out.jsonl"),
}


@pytest.mark.parametrize(
    ("command", "drafter"), [*((name, "model") for name in COMMANDS), ("generate", "lookup"), ("generate", "universal")]
)
def test_commands(models, calls, command, drafter, monkeypatch, tmp_path):
    """Up to the drafter, which comes after all models."""
    target, draft, adapter = models
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "x"}) + "\n")

    def loaded(self, *_, **__):
        raise ValueError("seed: all is loaded")

    monkeypatch.setattr("specdec.cli.models.Models.drafter", loaded)
    arguments = [a.format(folder=tmp_path) for a in COMMANDS[command]]
    options = ["--target", target, *([] if drafter == "lookup" else ["--draft", draft])]
    options += [] if adapter is None else ["--adapter", adapter]
    name = "generate" if command == "job" else command
    result = invoke(name, *arguments, *options, "--drafter", drafter)
    assert result.exit_code == 2 and "all is loaded" in " ".join(result.stderr.split())
    expected = {"AutoModelForCausalLM", "AutoTokenizer"} | ({"AutoConfig"} if command == "job" else set())
    check(calls, *expected, *([] if adapter is None else ["load_adapter"]))
