"""Loads models and tokenizers: safetensors only, no remote code, and an error instead of half-loaded weights."""

from __future__ import annotations

import importlib.util
import json
import os
import warnings
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import (
    AutoConfig,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from specdec_kernels import Packing

from ..checks import one_line, refuse
from .adapters import add_adapter, refuse_adapter, require_adapter
from .gguf_file import read_gguf
from .linear import has_native
from .model_folder import CONFIG, TOKENIZER, VOCABULARY, WEIGHTS, hub_or_cache, is_gguf, require_folder
from .packed_weights import num_parameters
from .pretrained import check_entries, from_pretrained, loading, quantisation
from .reduced_head import SIZE, load_reduced
from .stored_weights import compute_in_float32, pack_weights

PACKINGS = {8: Packing.Q8_0}  # by bits, of weights that are rounded on a CPU
MOST = 0.9  # of a model's parameters; where fewer are packed, a warning says so
Pair = tuple[PreTrainedModel, PreTrainedModel, PreTrainedTokenizerBase]


def load_model(
    path: str | os.PathLike,
    dtype: torch.dtype | str = "auto",
    device: torch.device | str = "cpu",
    *,
    adapter: str | os.PathLike | None = None,
    bits: Literal[4, 8] | None = None,
    tp: int | None = None,
    name: str = "path",
) -> PreTrainedModel:
    """Loads a causal language model, in evaluation mode.

    Args:
        path: a folder with config.json and *.safetensors, the name of a model on the Hugging Face hub, or a GGUF file.
            The weights of a folder may be quantised, if the library that config.json requires is installed. Those of a
            GGUF file stay packed as they are, on a CPU, and the model computes in float32 (``gguf_model``).
        dtype: the dtype of the weights, or of the computation if they are quantised: a torch dtype, its name, or
            "auto" for the one in which they were saved. On a CPU, "auto" computes in float32 over weights that stay
            stored as bfloat16 (``stored_weights``); bfloat16 computes in bfloat16, and a decoder warns where that is
            slow.
        device: the device on which the weights are placed.
        adapter: a folder with adapter_config.json and adapter_model.safetensors: a peft adapter of this model. What its
            configuration names as its model is not looked at.
        bits: weights of linear layers are rounded to so many bits while they are loaded; None leaves them as they were
            saved. On a GPU by bitsandbytes, to 8 or 4. On a CPU by ours, to 8, whether bitsandbytes is there or not:
            those of linear layers and embeddings become GGUF's blocks Q8_0, and compute in float32, which ``dtype`` has
            to be, or "auto" (``packed_weights``).
        tp: N, the processes of a ``torchrun --nproc-per-node N`` that this one is one of: the weights are divided over
            them, a GPU each ("cuda"), or parts of the CPU. Only rank 0 gets the model: on the others this call does not
            return, but follows rank 0, and ends the process with it (SystemExit). None: the whole model is here. "auto"
            then computes in float32 on a CPU over weights that are float32 in memory. See docs/cluster.md.
        name: the caller's name for ``path``, for errors.

    Raises:
        OSError: a folder or file is missing or corrupt, weights are missing in it, or a library that they need is not
            installed; names the argument and the path.
        ValueError: ``dtype`` is not an allowed dtype, ``device`` is not on this machine, or the folder does not hold
            a causal language model. A folder with nothing but an adapter is refused: which model it belongs to is the
            caller's word. ``tp`` does not divide the heads, is not the number of processes, or the model has no plan.

    Example:
        >>> from importlib import resources
        >>> from specdec import load_model
        >>> load_model(resources.files("specdec") / "embedded" / "target", dtype="bfloat16").dtype
        torch.bfloat16
    """
    allowed = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    names = [str(d).removeprefix("torch.") for d in allowed]
    if dtype not in (*allowed, *names, "auto"):
        raise ValueError(f"dtype: got {dtype!r}, allowed: auto, {', '.join(names)}")
    _require_device(device)
    if tp is not None:
        for other, given in (("adapter", adapter), ("bits", bits), ("path", path if is_gguf(path) else None)):
            if given is not None:
                refuse(other, f"{str(given)!r} with tp={tp}", "a folder or hub name alone with tp")
    if is_gguf(path):
        from .gguf_model import load_gguf

        return load_gguf(path, dtype, device, adapter=adapter, bits=bits, name=name)
    refuse_adapter(name, path)
    require_folder(name, path, CONFIG, WEIGHTS)
    if adapter is not None:
        require_adapter("adapter", adapter)
    with hub_or_cache(name, path):
        check_entries(name, path)
        if tp is not None:
            if _reduced(path) is not None:
                refuse("tp", f"{tp} for a model with a reduced head", "None for it")
            from .load_sharded import load_sharded

            return load_sharded(path, _dtype(dtype), device, tp, name)
        if bits is not None and torch.device(device).type == "cpu":
            _check_packing(path, dtype, bits)
            model = _packed(_load(path, "auto", device, None, name), bits)
        else:
            model = _load(path, dtype, device, bits, name)
            model = model if bits is not None else _computing(model, dtype)
    if adapter is not None:
        add_adapter(model, adapter)
    return model.eval()


def _load(
    path: str | os.PathLike,
    dtype: torch.dtype | str,
    device: torch.device | str,
    bits: Literal[4, 8] | None,
    name: str,
) -> PreTrainedModel:
    placed: dict[str, Any] = {} if bits is None else {"quantization_config": _bitsandbytes(bits, path)}
    with loading(name, path):
        # Most quantised weights are made for one device, so they are loaded there instead of moved.
        if bits is not None or (torch.device(device).type != "cpu" and quantisation(path) is not None):
            placed["device_map"] = {"": device}
        if bits is None and (config := _reduced(path)) is not None:
            reduced: Any = load_reduced(Path(path).expanduser(), config, _dtype(dtype))
            return reduced.to(device)
    model: Any = from_pretrained(path, dtype, name, **placed)
    if bits is None:
        with loading(name, path):
            model.to(device)
    return model


def _check_packing(path: str | os.PathLike, dtype: torch.dtype | str, bits: int) -> None:
    if bits not in PACKINGS:
        refuse("bits", f"{bits!r} on a CPU", "8 or None")
    if _dtype(dtype) not in (None, torch.float32):
        refuse("dtype", f"{dtype} with bits on a CPU", "auto or float32, in which packed weights are computed")
    if quantisation(path) is not None:
        refuse("bits", f"{bits} for weights that are quantised already", "None for them")
    if not has_native():
        refuse("bits", f"{bits} on a CPU without native code", "None")


def _packed(model: PreTrainedModel, bits: Literal[4, 8]) -> PreTrainedModel:
    packed = pack_weights(model, PACKINGS[bits])
    if not packed:
        refuse("bits", f"{bits} for weights that are in no rows of whole blocks", "None for them")
    if (share := packed / num_parameters(model)) < MOST:
        told = f"bits: {share:.0%} of the model's parameters are packed; the layers of the others cannot be"
        warnings.warn(told, RuntimeWarning, stacklevel=3)
    return model


def _computing(model: PreTrainedModel, dtype: torch.dtype | str) -> PreTrainedModel:
    """Returns ``model``, which computes in float32 if it is of bfloat16 on a CPU and nobody chose that."""
    quantised = getattr(model.config, "quantization_config", None) is not None
    if model.device.type != "cpu" or model.dtype != torch.bfloat16 or quantised:
        return model
    return compute_in_float32(model) if dtype == "auto" else model


def read_config(name: str, path: str | os.PathLike) -> PreTrainedConfig:
    """The configuration of a folder, hub name or GGUF file. Raises OSError or ValueError naming ``name``, the caller's
    name for ``path``."""
    if is_gguf(path):
        from .gguf_config import configuration

        return configuration(read_gguf(path, name))
    refuse_adapter(name, path)
    with hub_or_cache(name, path):
        check_entries(name, path)
        try:
            return AutoConfig.from_pretrained(path, trust_remote_code=False)
        except Exception as error:  # whatever a broken entry leads to
            raise OSError(f"{name}: cannot read {str(path)!r}: {one_line(error, 600)}") from error


def _reduced(path: str | os.PathLike) -> PreTrainedConfig | None:
    """The configuration of a folder whose model has a reduced head (``reduced_head``); None of any other. EAGLE-3's
    heads have the same entry, but are no models that transformers knows."""
    if not (Path(path).expanduser() / "config.json").is_file():
        return None
    try:
        given = json.loads((Path(path).expanduser() / "config.json").read_bytes())
    except (ValueError, RecursionError):
        return None  # transformers says what is wrong with it
    if not isinstance(given, dict) or SIZE not in given or "model_type" not in given:
        return None
    config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    names: Any = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return config if given.get("architectures") == [names.get(config.model_type)] else None


def _dtype(given: torch.dtype | str) -> torch.dtype | None:
    """None for "auto"."""
    return given if isinstance(given, torch.dtype) else None if given == "auto" else getattr(torch, given)


def _bitsandbytes(bits: Literal[4, 8], path: str | os.PathLike) -> BitsAndBytesConfig:
    if bits not in (4, 8):
        refuse("bits", bits, "4, 8 or None")
    if quantisation(path) is not None:
        refuse("bits", f"{bits} for weights that are quantised already", "None for them")
    if importlib.util.find_spec("bitsandbytes") is None:
        refuse("bits", f"{bits} without bitsandbytes", "None, or: pip install bitsandbytes")
    return BitsAndBytesConfig(load_in_8bit=bits == 8, load_in_4bit=bits == 4)


def load_pair(
    target: str | os.PathLike,
    draft: str | os.PathLike,
    dtype: torch.dtype | str = "auto",
    device: torch.device | str = "cpu",
    *,
    adapter: str | os.PathLike | None = None,
    bits: Literal[4, 8] | None = None,
    tp: int | None = None,
) -> Pair:
    """Loads target, draft and the target's tokenizer.

    Args:
        target, draft: as ``path`` of :func:`load_model`.
        dtype, device: as there, of both models.
        adapter: as there, of the target.
        bits: as there, of the target, and on a CPU of both models.
        tp: as there, of the target. Rank 0 alone has the draft, whole.

    Raises:
        OSError: as :func:`load_model`.
        ValueError: as :func:`load_model`, and if the tokenizers differ.

    Example:
        >>> import tempfile
        >>> from specdec import load_embedded_pair, load_pair
        >>> target, draft, tokenizer = load_embedded_pair()
        >>> with tempfile.TemporaryDirectory() as folder:  # as a download or a training leaves them
        ...     for name, model in (("target", target), ("draft", draft)):
        ...         _ = model.save_pretrained(f"{folder}/{name}"), tokenizer.save_pretrained(f"{folder}/{name}")
        ...     target, draft, tokenizer = load_pair(f"{folder}/target", f"{folder}/draft", dtype="float32")
        >>> target.dtype, target.training
        (torch.float32, False)
    """
    if not is_gguf(target):
        require_folder("target", target, CONFIG, WEIGHTS, TOKENIZER)
    tokenizer = load_tokenizer("target", target)
    try:
        draft_tokenizer = load_tokenizer("draft", draft)
    except OSError:
        draft_tokenizer = None  # a draft needs no tokenizer of its own
    if draft_tokenizer is not None:
        require_same_vocabulary(tokenizer, draft_tokenizer)
    target_model = load_model(target, dtype, device, adapter=adapter, bits=bits, tp=tp, name="target")
    of_draft = bits_of_draft(bits, device, draft)
    return target_model, load_model(draft, dtype, device, bits=of_draft, name="draft"), tokenizer


def bits_of_draft(
    bits: Literal[4, 8] | None, device: torch.device | str, draft: str | os.PathLike
) -> Literal[4, 8] | None:
    """Returns the bits of a draft beside a target of such bits. Those of a GPU save memory, and a draft has little;
    a GGUF file has its own."""
    return bits if torch.device(device).type == "cpu" and not is_gguf(draft) else None


def load_embedded_pair(
    dtype: torch.dtype | str = torch.float32,
    device: torch.device | str = "cpu",
    *,
    bits: Literal[4, 8] | None = None,
    tp: int | None = None,
) -> Pair:
    """Loads the small target and draft that come with the package, and their tokenizer. They write Python.

    Args:
        dtype, device: as in :func:`load_model`, of both models.
        bits: as there, of the target, and on a CPU of both models.
        tp: as there, of the target: 2.

    Example:
        >>> from specdec import load_embedded_pair
        >>> target, draft, tokenizer = load_embedded_pair()
        >>> round(target.num_parameters() / 1e6, 1), round(draft.num_parameters() / 1e6, 1), len(tokenizer)
        (9.9, 1.0, 4096)
    """
    folder = Path(str(resources.files("specdec") / "embedded"))
    target = load_model(folder / "target", dtype, device, bits=bits, tp=tp, name="target")
    of_draft = bits_of_draft(bits, device, folder / "draft")
    draft = load_model(folder / "draft", dtype, device, bits=of_draft, name="draft")
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
    """Loads the tokenizer of a folder, hub name or GGUF file. Raises OSError naming ``name``, the caller's name for
    ``path``; ValueError, if a GGUF file has one that transformers has not."""
    if is_gguf(path):
        from .gguf_tokenizer import gguf_tokenizer

        return gguf_tokenizer(read_gguf(path, name))
    require_folder(name, path, TOKENIZER)
    with hub_or_cache(name, path):
        try:
            return AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        except Exception as error:  # tokenizers raises plain Exceptions for broken files
            require_folder(name, path, VOCABULARY)
            raise OSError(f"{name}: cannot load a tokenizer from {str(path)!r}: {error}") from error


def _require_device(device: torch.device | str) -> None:
    try:
        if torch.empty(0, device=device).is_meta:
            raise RuntimeError("meta tensors have no values")
    except (RuntimeError, AssertionError) as error:  # AssertionError: torch was built without the device
        there_are = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
        raise ValueError(f"device: got {str(device)!r}, allowed: {', '.join(there_are)}") from error
