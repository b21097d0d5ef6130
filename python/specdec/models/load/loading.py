"""Loads models and tokenizers: safetensors only, no remote code, and an error instead of half-loaded weights."""

from __future__ import annotations

import json
import os
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ...checks import one_line, refuse
from ..exchanged.stored_weights import compute_in_float32
from .adapters import add_adapter, refuse_adapter, require_adapter
from .few_bits import Bits, by_bitsandbytes, check_bits, dtype_to_round, round_weights, rounds
from .gguf.file import read_gguf
from .model_folder import CONFIG, TOKENIZER, VOCABULARY, WEIGHTS, hub_or_cache, is_gguf, require_folder
from .pretrained import check_entries, from_pretrained, loading, quantisation
from .reduced_head import SIZE, load_reduced

Pair = tuple[PreTrainedModel, PreTrainedModel, PreTrainedTokenizerBase]


def load_model(
    path: str | os.PathLike,
    dtype: torch.dtype | str = "auto",
    device: torch.device | str = "cpu",
    *,
    adapter: str | os.PathLike | None = None,
    bits: Bits | None = None,
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
        bits: weights of linear layers are rounded to so many bits while they are loaded, which makes another model of
            it; None leaves them as they were saved. On a CPU to 8: those of linear layers and embeddings become GGUF's
            blocks Q8_0, and compute in float32, which ``dtype`` has to be, or "auto" (``packed_weights``). On a GPU to
            8, by ours where its CUDA kernels were built: those of linear layers become integers with a scale a row, and
            compute in bfloat16 or float16 (``int8_linear``). Otherwise, and to 4, by bitsandbytes.
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
        from .gguf.model import load_gguf

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
        if bits is not None:
            check_bits(path, _dtype(dtype), device, bits)
        if bits is not None and rounds(device, bits):
            whole = _load(path, dtype_to_round(dtype, device), "cpu", None, name)
            model = round_weights(whole, bits, device)
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
    bits: Bits | None,
    name: str,
) -> PreTrainedModel:
    placed: dict[str, Any] = {} if bits is None else {"quantization_config": by_bitsandbytes(bits)}
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
        from .gguf.config import configuration

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


def load_pair(
    target: str | os.PathLike,
    draft: str | os.PathLike,
    dtype: torch.dtype | str = "auto",
    device: torch.device | str = "cpu",
    *,
    adapter: str | os.PathLike | None = None,
    bits: Bits | None = None,
    draft_bits: Literal[8] | None = None,
    tp: int | None = None,
) -> Pair:
    """Loads target, draft and the target's tokenizer.

    Args:
        target, draft: as ``path`` of :func:`load_model`.
        dtype, device: as there, of both models.
        adapter: as there, of the target.
        bits: as there, of the target, whose text then is that of the rounded model; on a CPU also of a draft without
            ``draft_bits``.
        draft_bits: as ``bits`` there, of the draft alone. The text keeps the target's distribution.
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
    return target_model, load_draft(draft, dtype, device, bits, draft_bits), tokenizer


def load_draft(
    path: str | os.PathLike,
    dtype: torch.dtype | str,
    device: torch.device | str,
    bits: Bits | None,
    draft_bits: int | None,
) -> PreTrainedModel:
    """Loads a draft model, with the arguments of :func:`load_pair`. Where nobody says how many bits it has, it has
    those of the target on a CPU, unless it is a GGUF file, which has its own; on a GPU these are to save memory, of
    which a draft takes little."""
    if draft_bits is None:
        as_target = torch.device(device).type == "cpu" and not is_gguf(path)
        return load_model(path, dtype, device, bits=bits if as_target else None, name="draft")
    if draft_bits != 8:
        refuse("draft_bits", repr(draft_bits), "8 or None")
    try:
        return load_model(path, dtype, device, bits=8, name="draft")
    except ValueError as error:
        if str(error).startswith("bits: "):
            raise ValueError(f"draft_{error}") from error
        raise


def load_embedded_pair(
    dtype: torch.dtype | str = torch.float32,
    device: torch.device | str = "cpu",
    *,
    bits: Bits | None = None,
    draft_bits: Literal[8] | None = None,
    tp: int | None = None,
) -> Pair:
    """Loads the small target and draft that come with the package, and their tokenizer. They write Python.

    Args:
        dtype, device: as in :func:`load_model`, of both models.
        bits: as there, of the target, whose text then is that of the rounded model; on a CPU also of a draft without
            ``draft_bits``.
        draft_bits: as ``bits`` there, of the draft alone. The text keeps the target's distribution.
        tp: as there, of the target: 2.

    Example:
        >>> from specdec import load_embedded_pair
        >>> target, draft, tokenizer = load_embedded_pair()
        >>> round(target.num_parameters() / 1e6, 1), round(draft.num_parameters() / 1e6, 1), len(tokenizer)
        (9.9, 1.0, 4096)
    """
    folder = Path(str(resources.files("specdec") / "embedded"))
    target = load_model(folder / "target", dtype, device, bits=bits, tp=tp, name="target")
    draft = load_draft(folder / "draft", dtype, device, bits, draft_bits)
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
        from .gguf.tokenizer import gguf_tokenizer

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
