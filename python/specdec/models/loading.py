"""Loads models and tokenizers: safetensors only, no remote code, and an error instead of half-loaded weights."""

from __future__ import annotations

import importlib.util
import os
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

Pair = tuple[PreTrainedModel, PreTrainedModel, PreTrainedTokenizerBase]


def load_model(
    path: str | os.PathLike,
    dtype: torch.dtype | str = "auto",
    device: torch.device | str = "cpu",
    *,
    name: str = "path",
) -> PreTrainedModel:
    """Loads a causal language model, in evaluation mode.

    Args:
        path: a folder with config.json and *.safetensors, or the name of a model on the Hugging Face hub. The weights
            may be quantised, if the library that config.json requires is installed. A folder may also hold a peft
            adapter, with an adapter_config.json that names the model that it belongs to.
        dtype: the dtype of the weights, or of the computation if they are quantised: a torch dtype, its name, or
            "auto" for the one in which they were saved.
        device: the device on which the weights are placed.
        name: the caller's name for ``path``, for errors.

    Raises:
        OSError: a folder or file is missing or corrupt, weights are missing in it, or a library that they need is not
            installed; names the argument and the path.
        ValueError: ``dtype`` is not an allowed dtype, ``device`` is not on this machine, or the folder does not hold
            a causal language model.
    """
    allowed = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    names = [str(d).removeprefix("torch.") for d in allowed]
    if dtype not in (*allowed, *names, "auto"):
        raise ValueError(f"dtype: got {dtype!r}, allowed: auto, {', '.join(names)}")
    _require_device(device)
    adapter = (Path(path).expanduser() / "adapter_config.json").is_file()
    _require_folder(name, path, "adapter_config.json" if adapter else "config.json", "*.safetensors")
    if adapter and importlib.util.find_spec("peft") is None:
        raise OSError(f"{name}: cannot load a model from {str(path)!r}: it is an adapter, which takes peft")
    how: dict[str, Any] = {"dtype": dtype, "use_safetensors": True, "trust_remote_code": False}
    try:
        # Most quantised weights are made for one device, so they are loaded there instead of moved.
        if torch.device(device).type != "cpu" and not adapter and _quantisation(path) is not None:
            how["device_map"] = {"": device}
        loaded: Any = AutoModelForCausalLM.from_pretrained(path, **how, output_loading_info=True)
        model, report = loaded
        if getattr(model.config, "quantization_config", None) is not None and not hasattr(model, "hf_quantizer"):
            raise ValueError(f"its quantisation {_quantisation(path)} is none that transformers knows")
        model.to(device)
    except (OSError, SafetensorError, ImportError) as error:
        raise OSError(f"{name}: cannot load a model from {str(path)!r}: {error}") from error
    except (ValueError, RuntimeError, KeyError) as error:
        raise ValueError(f"{name}: {str(path)!r} does not hold a causal language model: {error}") from error
    # transformers fills absent weights with random numbers and only warns; the text would be nonsense.
    absent = sorted(report["missing_keys"])
    if absent:
        raise OSError(f"{name}: the weights in {str(path)!r} lack {len(absent)} tensors, the first is {absent[0]!r}")
    return model.eval()


def _quantisation(path: str | os.PathLike) -> object:
    return getattr(AutoConfig.from_pretrained(path, trust_remote_code=False), "quantization_config", None)


def load_pair(
    target: str | os.PathLike,
    draft: str | os.PathLike,
    dtype: torch.dtype | str = "auto",
    device: torch.device | str = "cpu",
) -> Pair:
    """Loads target, draft and the target's tokenizer; ``target`` and ``draft`` as ``path`` in :func:`load_model`.

    Raises:
        OSError, ValueError: as :func:`load_model`; ValueError also if the tokenizers differ.
    """
    tokenizer = load_tokenizer("target", target)
    try:
        draft_tokenizer = load_tokenizer("draft", draft)
    except OSError:
        draft_tokenizer = None  # a draft needs no tokenizer of its own
    if draft_tokenizer is not None:
        require_same_vocabulary(tokenizer, draft_tokenizer)
    target_model = load_model(target, dtype, device, name="target")
    return target_model, load_model(draft, dtype, device, name="draft"), tokenizer


def load_embedded_pair(dtype: torch.dtype | str = torch.float32, device: torch.device | str = "cpu") -> Pair:
    """Loads the small target and draft that come with the package, and their tokenizer."""
    folder = Path(str(resources.files("specdec") / "embedded"))
    target, draft = (load_model(folder / name, dtype, device, name=name) for name in ("target", "draft"))
    return target, draft, load_tokenizer("tokenizer", folder / "tokenizer")


def require_same_vocabulary(target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase) -> None:
    """Raises ValueError naming the first id that is a different token in the two tokenizers: equal ids must mean the
    same to both models."""
    ours, theirs = ({i: token for token, i in t.get_vocab().items()} for t in (target, draft))
    if ours == theirs:
        return
    i = min(i for i in ours.keys() | theirs.keys() if ours.get(i) != theirs.get(i))
    raise ValueError(
        f"draft: its tokenizer has {len(theirs)} tokens, the target's {len(ours)}; "
        f"the first that differs is id {i}: {theirs.get(i)!r} against the target's {ours.get(i)!r}; "
        "UniversalDrafter (--drafter universal) takes a draft with another tokenizer"
    )


def load_tokenizer(name: str, path: str | os.PathLike) -> PreTrainedTokenizerBase:
    """Loads the tokenizer of a folder or hub name. Raises OSError naming ``name``, the caller's name for ``path``."""
    _require_folder(name, path)
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    except Exception as error:  # tokenizers raises plain Exceptions for broken files
        raise OSError(f"{name}: cannot load a tokenizer from {str(path)!r}: {error}") from error


def _require_device(device: torch.device | str) -> None:
    try:
        if torch.empty(0, device=device).is_meta:
            raise RuntimeError("meta tensors have no values")
    except (RuntimeError, AssertionError) as error:  # AssertionError: torch was built without the device
        there_are = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
        raise ValueError(f"device: got {str(device)!r}, allowed: {', '.join(there_are)}") from error


def _require_folder(name: str, path: str | os.PathLike, *patterns: str) -> None:
    """Raises OSError saying what is missing. transformers would take a missing folder for the name of a model on the
    hub."""
    folder = Path(path).expanduser()
    hub_name = isinstance(path, str) and path.count("/") <= 1 and not path.startswith((".", "~", "/"))
    if not folder.exists() and hub_name:
        return
    if not folder.is_dir():
        raise OSError(f"{name}: there is no folder {str(path)!r}")
    for pattern in patterns:
        if not any(folder.glob(pattern)):
            raise OSError(f"{name}: the folder {str(path)!r} has no {pattern}")
