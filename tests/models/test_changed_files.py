"""Every entry of a model's files, changed one at a time: a working model, or one error that names the argument."""

from __future__ import annotations

import json
import shutil
from importlib import resources
from pathlib import Path

import pytest
from specdec import load_model
from specdec.fields import MOST, Number
from specdec.models.load.gguf.file import OF_FILE, OF_MODEL
from specdec.models.load.loading import load_tokenizer, read_config
from support.mutated import DAILY, VALUES, changed, entries, outcome

EMBEDDED = Path(str(resources.files("specdec") / "embedded"))
# Entries that transformers reads wherever they stand.
ALSO = ("quantization_config", "draft_vocab_size", "text_config", "torch_dtype", "auto_map", "num_labels", "id2label")
VALUES_OF = [pytest.param(v, marks=[] if v in DAILY else [pytest.mark.nightly]) for v in VALUES]


@pytest.fixture
def folder(tmp_path) -> Path:
    shutil.copytree(EMBEDDED / "draft", tmp_path / "model")
    for file in (EMBEDDED / "tokenizer").iterdir():
        shutil.copy(file, tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("value", VALUES_OF)
@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_folders(file, value, folder):
    whole = json.loads((folder / file).read_text())
    paths = [*entries(whole), *((name,) for name in (ALSO if file == "config.json" else ()))]
    calls = {
        "config.json": (read_config, lambda name, path: load_model(path, name=name)),
        "generation_config.json": (lambda name, path: load_model(path, name=name),),
        "tokenizer_config.json": (load_tokenizer,),
    }
    wrong = {}
    for path in paths:
        (folder / file).write_text(json.dumps(changed(whole, path, VALUES[value])))
        for call in calls[file][: None if value in ("2^63", "null") else 1]:
            if told := outcome(lambda call=call: call("target", folder), "target: "):
                wrong[path] = told
    assert not wrong


def test_a_size_that_nothing_is_built_of_is_named(folder):
    whole = json.loads((folder / "config.json").read_text())
    for entry in ("num_hidden_layers", "hidden_size", "vocab_size", "num_labels"):
        (folder / "config.json").write_text(json.dumps(whole | {entry: 2**62}))
        with pytest.raises(
            ValueError, match=rf"^target: config.json of .* has {entry} {2**62}, allowed: an integer from"
        ):
            load_model(folder, name="target")


def write_changed(path: Path, kind: str, key: str, value: object) -> None:
    gguf_files = pytest.importorskip("support.gguf_files")
    gguf_files.write_gguf(path, kind, metadata={key: value})


@pytest.mark.parametrize("value", [v for v in VALUES_OF if v.values[0] not in ("object", "removed")])
@pytest.mark.parametrize(
    "kind", ["llama", *(pytest.param(k, marks=pytest.mark.nightly) for k in ("qwen3", "gemma2", "gemma3_text", "phi3"))]
)
def test_gguf_files(kind, value, tmp_path):
    """``null`` leaves a key out."""
    path, wrong = tmp_path / "model.gguf", {}
    for key in (*OF_MODEL, *OF_FILE):
        if key == "general.architecture":
            continue  # the writer has it of its own
        write_changed(path, kind, key, VALUES[value])
        calls = [load_tokenizer] if key.startswith("tokenizer") else []
        for call in (*calls, lambda name, path: load_model(path, name=name)):
            if told := outcome(lambda call=call: call("target", path), "target: "):
                wrong[key] = told
    assert not wrong


@pytest.mark.parametrize("key", [key for key, field in OF_MODEL.items() if isinstance(field, Number)])
def test_numbers_of_gguf_files_are_named_with_their_range(key, tmp_path):
    for value in (-1, 2**62, 2**63):
        if OF_MODEL[key].fits(value):
            continue
        write_changed(tmp_path / "model.gguf", "llama", key, value)
        told = rf"^target: got .*model.gguf': llama.{key} is {value}, and has to be an? \w+ from "
        with pytest.raises(ValueError, match=told):
            load_model(tmp_path / "model.gguf", name="target")
    assert MOST == 2**31 - 1


@pytest.mark.parametrize("size", [0, 2**31, 2**62, 2**63, 2**64 - 1])
@pytest.mark.parametrize("place", ["dimension", "dimensions", "offset", "length of a name", "tensors", "keys"])
def test_numbers_in_the_header_of_a_gguf_file(place, size, tmp_path):
    """Those that are no keys: where the tensors are, and how large."""
    write_changed(tmp_path / "model.gguf", "llama", "general.name", "x")
    whole = bytearray((tmp_path / "model.gguf").read_bytes())
    name = b"token_embd.weight"
    at = whole.index(len(name).to_bytes(8, "little") + name)
    after = at + 8 + len(name)  # number of dimensions, two dimensions, type, offset
    places = {"dimension": after + 4, "offset": after + 24, "length of a name": at, "tensors": 8, "keys": 16}
    if place == "dimensions":
        whole[after : after + 4] = min(size, 2**32 - 1).to_bytes(4, "little")
    else:
        whole[places[place] : places[place] + 8] = size.to_bytes(8, "little")
    (tmp_path / "model.gguf").write_bytes(whole)
    assert outcome(lambda: load_model(tmp_path / "model.gguf", name="target"), "target: ") is None


def test_a_dimension_of_0_beside_one_that_no_tensor_has(tmp_path):
    write_changed(tmp_path / "model.gguf", "llama", "general.name", "x")
    whole, name = bytearray((tmp_path / "model.gguf").read_bytes()), b"token_embd.weight"
    after = whole.index(name) + len(name)
    whole[after + 4 : after + 20] = (0).to_bytes(8, "little") + (2**63).to_bytes(8, "little")
    (tmp_path / "model.gguf").write_bytes(whole)
    with pytest.raises(OSError, match=rf"tensor 'token_embd.weight' of the shape \[{2**63}, 0\] has a dimension of 0"):
        load_model(tmp_path / "model.gguf", name="target")


@pytest.fixture(scope="module")
def adapter(tmp_path_factory) -> Path:
    peft, folder = pytest.importorskip("peft"), tmp_path_factory.mktemp("adapter")
    model = peft.get_peft_model(load_model(EMBEDDED / "draft"), peft.LoraConfig(target_modules=["q_proj"], r=2))
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("value", VALUES_OF)
def test_adapters(value, adapter, tmp_path):
    shutil.copytree(adapter, tmp_path / "adapter")
    file, wrong = tmp_path / "adapter" / "adapter_config.json", {}
    whole = json.loads(file.read_text())
    for path in (*entries(whole), ("rank_pattern", "q_proj"), ("alpha_pattern", "q_proj")):
        file.write_text(json.dumps(changed(whole, path, VALUES[value])))
        call = lambda: load_model(EMBEDDED / "draft", adapter=tmp_path / "adapter")  # noqa: E731
        if told := outcome(call, "adapter: ", "path: "):
            wrong[path] = told
    assert not wrong


@pytest.mark.parametrize("file", ["config.json", "adapter_config.json"])
@pytest.mark.parametrize("text", ["[" * 200_000, "[]", "3", "", "{", '"x"', "\ufeff{}", "\x00", "null"])
def test_texts_that_are_no_object(file, text, folder):
    """Nesting that ends python's stack, too."""
    (folder / file).write_text(text)
    told = outcome(lambda: load_model(folder, name="target"), "target: ")
    assert told is None
    if text != "\ufeff{}":
        with pytest.raises((OSError, ValueError)):
            load_model(folder, name="target")
