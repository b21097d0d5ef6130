"""Makes a folder in transformers' format of a GGUF file, by transformers' own loader."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from ..checks import refuse
from .gguf_file import SINGLE_DIGITS, GgufFile, complete, read_gguf, refuse_gguf_file
from .model_folder import CONFIG

DTYPES = ("float32", "bfloat16", "float16")
STEPS = ("reading the file", "reading the configuration", "reading the tokenizer", "reading the weights", "writing")


def convert_gguf(
    path: str | os.PathLike,
    folder: str | os.PathLike,
    dtype: str = "float32",
    overwrite: bool = False,
    show: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> GgufFile:
    """Writes a folder that :func:`~specdec.models.loading.load_model` reads: weights in safetensors, configuration,
    tokenizer and chat template. It is whole or not there: it gets its name when all is written.

    Args:
        path: the file. Packed weights (Q4_K and so on) are expanded.
        folder: where it goes. It must not exist, or be empty.
        dtype: of the weights. Those that are expanded are exact in float32 alone.
        overwrite: whether a folder that has a model is replaced.
        show: called before each step, with its number, the number of steps, and what it is.

    Returns:
        What the file says.

    Raises:
        OSError: names ``path``, which cannot be read, or ``folder``, which cannot be written.
        ValueError: names ``dtype``, ``folder``, or ``path``: the file has something that transformers' loader would
            ignore, which would make another model of it.
    """
    path, folder = Path(path).expanduser(), Path(folder).expanduser()
    if dtype not in DTYPES:
        refuse("dtype", repr(dtype), ", ".join(DTYPES))
    _require_room(folder, overwrite)
    step = iter(range(len(STEPS)))

    def begin() -> None:
        i = next(step)
        show(i, len(STEPS), STEPS[i])

    begin()
    file = read_gguf(path)
    at: dict[str, Any] = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    begin()
    config = AutoConfig.from_pretrained(**at, trust_remote_code=False)
    complete(config, file)
    begin()
    tokenizer = _tokenizer(at, file)
    begin()
    model = _model(at, config, dtype, file)
    begin()
    _write(model, tokenizer, len(file.metadata["tokenizer.ggml.tokens"]), folder)
    return file


def _require_room(folder: Path, overwrite: bool) -> None:
    if folder.exists() and not folder.is_dir():
        refuse("folder", f"{str(folder)!r}, a file", "a folder")
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    if not overwrite:
        refuse("folder", f"{str(folder)!r}, which is not empty", "a new or empty one, or --overwrite")
    if not (folder / CONFIG).is_file():
        refuse(
            "folder", f"{str(folder)!r}, which holds something else than a model", "a new or empty one, or a model's"
        )


def _tokenizer(at: dict[str, Any], file: GgufFile) -> PreTrainedTokenizerBase:
    tokenizer = AutoTokenizer.from_pretrained(**at, trust_remote_code=False)
    if file.metadata.get("tokenizer.ggml.pre") in SINGLE_DIGITS:
        digits = pre_tokenizers.Digits(individual_digits=True)
        bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, bytes_])
    return tokenizer


def _model(at: dict[str, Any], config: Any, dtype: str, file: GgufFile) -> PreTrainedModel:
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        **at, config=config, dtype=getattr(torch, dtype), use_safetensors=True, trust_remote_code=False,
        output_loading_info=True,
    )  # fmt: skip
    model, report = loaded
    if absent := sorted(report["missing_keys"]):
        refuse_gguf_file(file.path, f"it lacks {len(absent)} tensors, the first is {absent[0]!r}")
    if left := sorted(file.tensors - _taken(model)):
        refuse_gguf_file(file.path, f"transformers' loader ignores {len(left)} tensors, the first is {left[0]!r}")
    # The loader leaves its quantiser, with which nothing can be saved, though the weights are plain.
    del model.config.quantization_config, model.hf_quantizer
    model.generation_config.eos_token_id = config.eos_token_id
    return model


def _taken(model: PreTrainedModel) -> set[str]:
    """The file's names of the tensors that the loader puts into the model."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    own = model.config.model_type.removesuffix("_text")
    kind = next(kind for kind, name in MODEL_ARCH_NAMES.items() if name == own)
    names = get_tensor_name_map(kind, model.config.num_hidden_layers)
    found = set()
    for name in model.state_dict():
        stem, _, suffix = name.rpartition(".")
        found.add(f"{names.get_name(stem)}.{suffix}")
    return found


def _write(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, tokens: int, folder: Path) -> None:
    part, old = (folder.with_name(f".{folder.name}.{kind}") for kind in ("part", "old"))  # beside it, to be renamed
    try:
        for left in (part, old):  # by a run that was killed
            shutil.rmtree(left, ignore_errors=True)
        part.mkdir(parents=True)
        model.save_pretrained(part)
        tokenizer.save_pretrained(part)
        _drop_others(part / "tokenizer.json", tokens)
        if folder.is_dir():
            folder.replace(old)
        part.replace(folder)
    except OSError as error:
        raise OSError(f"folder: cannot write {str(folder)!r}: {error}") from error
    finally:
        for left in (part, old):
            shutil.rmtree(left, ignore_errors=True)


def _drop_others(path: Path, tokens: int) -> None:
    """The loader adds special tokens of its own class, with ids that the model does not have."""
    whole = json.loads(path.read_bytes())
    whole["added_tokens"] = [token for token in whole["added_tokens"] if token["id"] < tokens]
    path.write_text(json.dumps(whole, ensure_ascii=False), encoding="utf-8")
