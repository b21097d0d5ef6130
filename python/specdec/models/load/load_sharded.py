"""Loads a model whose weights are divided over several processes, a GPU each: transformers' tensor parallelism."""

from __future__ import annotations

import os

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from ...checks import refuse
from ..ranks.channel import Leader, RanksParted
from ..ranks.follower import follow
from ..ranks.leaders import lead
from ..ranks.ranks import check_ranks, meet_ranks
from ..ranks.sharded import name_of
from ..supported import KNOWN_MODEL_TYPES, RECURRENT_LAYER_TYPES
from .location import Location
from .saved_model import SavedModel, read_saved


def join_ranks(tp: int, device: torch.device | str) -> Leader:
    """Returns on rank 0 alone, with the channel to the other ranks. These follow it, and end with it.

    Raises:
        ValueError: as :func:`~specdec.models.ranks.ranks.check_ranks`.
    """
    end = meet_ranks(tp, device)
    if not isinstance(end, Leader):
        follow(end, _load)
    return end


def load_sharded(saved: SavedModel, dtype: torch.dtype | None, device: torch.device, tp: int) -> PreTrainedModel:
    """Returns rank 0's part of a model, in the form of ``load_model(tp=...)``.

    Args:
        dtype: None: the one in which the weights were saved; float32 for bfloat16 on a CPU.

    Raises:
        OSError, ValueError: as ``load_model``; checked before anything is loaded, but for broken files.
    """
    own = check_ranks(tp, device)
    check_config(saved.config, tp)
    if dtype is None and own.type == "cpu" and saved.config.get_text_config(decoder=True).dtype == torch.bfloat16:
        dtype = torch.float32
    leader = join_ranks(tp, device)
    given = {"name": saved.at.name, "path": os.fspath(saved.at.path), "dtype": name_of(dtype), "tp": tp}
    number = leader.new_number()
    try:
        with leader.all_do("load", number=number, **given):
            model = _part(saved, dtype, tp)
    except RanksParted as parted:
        if isinstance(parted.__cause__, OSError | ValueError):  # about the files, which are the same for all ranks
            raise parted.__cause__ from parted
        raise
    assert model.device == own, f"{model.device}, not {own}"
    lead(model, leader, leader.share(model, number))
    return model


def check_config(config: PreTrainedConfig, tp: int) -> None:
    """Raises ValueError naming ``tp``, unless a model of this configuration can be divided in so many parts."""
    text = config.get_text_config(decoder=True)
    described = f"{tp} for model type {text.model_type!r}"
    if text.model_type not in KNOWN_MODEL_TYPES:
        refuse("tp", described, "None for model types that are not listed in docs/models.md")
    if not getattr(text, "base_model_tp_plan", None):
        refuse("tp", f"{described}, for which transformers has no plan", "None")
    if not RECURRENT_LAYER_TYPES.isdisjoint(getattr(text, "layer_types", None) or ()):
        refuse("tp", described, "None for recurrent layers")
    if getattr(config, "quantization_config", None) is not None:
        refuse("tp", f"{tp} for weights that are quantised", "None for them")
    heads = text.num_attention_heads
    counts = {"attention": heads, "key and value": getattr(text, "num_key_value_heads", None) or heads}
    for kind, count in counts.items():
        if count % tp:
            most = [n for n in range(2, min(counts.values()) + 1) if all(c % n == 0 for c in counts.values())]
            allowed = f"None or {', '.join(map(str, most))}" if most else "None"
            refuse("tp", f"{described} with {count} {kind} heads, which it does not divide", allowed)


def _load(name: str, path: str, dtype: str | None, tp: int) -> PreTrainedModel:
    """A follower's part, as rank 0 was given it."""
    return _part(read_saved(Location(name, path)), None if dtype is None else getattr(torch, dtype), tp)


def _part(saved: SavedModel, dtype: torch.dtype | None, tp: int) -> PreTrainedModel:
    """Loads this rank's part, on this rank's device: on the current GPU, if the ranks met there."""
    from transformers.distributed.configuration_utils import DistributedConfig

    return saved.place(dtype, distributed_config=DistributedConfig(tp_size=tp)).eval()
