"""The doors: models and tokenizers, from folders, hub names and GGUF files, safetensors only and no remote code."""

from __future__ import annotations

import os
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Literal

import torch
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from ...checks import refuse
from ..exchanged.stored_weights import compute_in_float32
from .adapters import add_adapter, require_adapter
from .few_bits import Bits, by_bitsandbytes, is_cpu, round_weights
from .gguf.file import read_gguf
from .location import CONFIG, TOKENIZER, VOCABULARY, WEIGHTS, Location
from .plan import Plan, read_device, read_dtype
from .saved_model import SavedModel, read_saved

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
    of_adapter = None if adapter is None else Location("adapter", adapter)
    plan = Plan(read_dtype(dtype), read_device(device), of_adapter, bits, tp)
    at = Location(name, path)
    with at.reading():
        return build(read_saved(at, CONFIG, WEIGHTS), plan)


def read_config(name: str, path: str | os.PathLike) -> PreTrainedConfig:
    """The configuration of a folder, hub name or GGUF file. Raises OSError or ValueError naming ``name``, the caller's
    name for ``path``."""
    at = Location(name, path)
    with at.reading():
        return read_saved(at).config


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
    tokenizer = load_tokenizer("target", target, beside_weights=True)
    if (own := load_draft_tokenizer(draft)) is not None:
        require_same_vocabulary(tokenizer, own)
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
        as_target = is_cpu(device) and not Location("draft", path).is_gguf
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
        bits, draft_bits: as in :func:`load_pair`.
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


def load_tokenizer(name: str, path: str | os.PathLike, beside_weights: bool = False) -> PreTrainedTokenizerBase:
    """Loads the tokenizer of a folder, hub name or GGUF file.

    Args:
        name: the caller's name for ``path``, for errors.
        beside_weights: the model is loaded, too, so all that the folder lacks is named at once.

    Raises:
        OSError: files are missing or corrupt.
        ValueError: a GGUF file has a tokenizer that transformers has not.
    """
    at = Location(name, path)
    if at.is_gguf:
        from .gguf.tokenizer import gguf_tokenizer

        return gguf_tokenizer(read_gguf(path, name))
    at.require(*((CONFIG, WEIGHTS) if beside_weights else ()), TOKENIZER)
    with at.reading():
        try:
            return AutoTokenizer.from_pretrained(path, trust_remote_code=False)
        except Exception as error:  # tokenizers raises plain Exceptions for broken files
            at.require(VOCABULARY)
            raise OSError(f"{name}: cannot load a tokenizer from {at}: {error}") from error


def load_draft_tokenizer(path: str | os.PathLike) -> PreTrainedTokenizerBase | None:
    """None: it has none, which a draft does not need."""
    try:
        return load_tokenizer("draft", path)
    except OSError:
        return None


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


def build(saved: SavedModel, plan: Plan) -> PreTrainedModel:
    """Returns the model in evaluation mode. Raises OSError and ValueError as ``load_model``."""
    plan.check(saved)
    if saved.file is not None:
        from .gguf.model import gguf_model

        return gguf_model(saved.file, saved.config)
    if plan.tp is not None:
        from .load_sharded import load_sharded

        return load_sharded(saved, plan.dtype, plan.device, plan.tp)
    if plan.adapter is not None:
        require_adapter(plan.adapter)
    if plan.bits is None:
        model = saved.load(plan.dtype, plan.device)
        # Nobody chose bfloat16, in which many CPUs are slow.
        if plan.dtype is None and plan.on_cpu and model.dtype == torch.bfloat16 and saved.quantisation is None:
            model = compute_in_float32(model)
    elif plan.rounds:
        # On a CPU, weights that are not rounded stay stored as they were saved, and compute in float32.
        model = saved.load(None if plan.on_cpu else plan.dtype, torch.device("cpu"))
        if not plan.on_cpu:
            replace(plan, dtype=model.dtype).check(saved)  # which nobody knew before, if nobody chose it
        model = round_weights(model, plan.bits, plan.device)
    else:
        how, where = by_bitsandbytes(plan.bits), {"": plan.device}
        model = saved.place(plan.dtype, quantization_config=how, device_map=where)
    if plan.adapter is not None:
        add_adapter(model, plan.adapter)
    return model.eval()
