"""Adapters of peft: in safetensors, and never instead of the model that they belong to."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

from transformers.utils import find_adapter_config_file

from ...checks import one_line, refuse
from ...fields import Number, wrong
from .location import ADAPTER, CONFIG, Location

# Of an adapter's numbers that decide how much peft makes of them before the weights are looked at.
_RANKS = dict.fromkeys(("r", "lora_rank", "rank", "alpha_rank"), Number(1, 2**14))


def add_adapter(model: Any, adapter: Location) -> None:
    try:
        report = model.load_adapter(str(adapter.folder), use_safetensors=True)
    except Exception as error:  # peft and transformers raise whatever a broken entry leads to
        raise OSError(f"adapter: cannot load {adapter}: {one_line(error, 600)}") from error
    if absent := sorted(report.missing_keys):
        raise OSError(f"adapter: the weights in {adapter} lack {len(absent)} tensors, the first is {absent[0]!r}")


def refuse_adapter(at: Location) -> None:
    """Raises ValueError if there is an adapter and no model: transformers would load whatever model the adapter names.
    Raises OSError if there are both, but the adapter cannot be loaded safely."""
    at.require()
    if (found := _config_of(at)) is None:
        return
    if (at.folder / CONFIG).is_file():
        return require_adapter(at)
    try:
        base = json.loads(found.read_bytes()).get("base_model_name_or_path")
    except (ValueError, AttributeError, RecursionError):
        base = None
    told = "" if base is None else f" (its adapter_config.json says {str(base)!r})"
    refuse(at.name, f"an adapter, {at}", f"the model that it belongs to{told}, with this as the adapter")


def _config_of(at: Location) -> Path | None:
    """The adapter's; None: there is none that transformers would find."""
    if not at.is_hub_name:
        return at.folder / ADAPTER if (at.folder / ADAPTER).is_file() else None
    if importlib.util.find_spec("peft") is None:
        return None
    try:
        found = find_adapter_config_file(str(at.path))
    except (OSError, ValueError) as error:
        raise OSError(f"{at.name}: cannot load a model from {at}: {error}") from error
    return None if found is None else Path(found)


def require_adapter(at: Location) -> None:
    """Raises OSError unless it is a folder with an adapter in safetensors. Without this file, transformers would
    unpickle adapter_model.bin."""
    if not at.folder.is_dir():
        raise OSError(f"{at.name}: there is no folder {at}")
    at.require(ADAPTER, "adapter_model.safetensors")
    if importlib.util.find_spec("peft") is None:
        raise OSError(f"{at.name}: cannot load {at}: it is an adapter, which takes peft")
    file = at.folder / ADAPTER
    try:
        said = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise OSError(f"{at.name}: cannot read {str(file)!r}: {one_line(error)}") from error
    if not isinstance(said, dict):
        raise OSError(f"{at.name}: cannot read {str(file)!r}: it has no object")
    patterns = said.get("rank_pattern")
    of_modules = patterns if isinstance(patterns, dict) else {}
    ranks = {f"rank_pattern {module!r}": rank for module, rank in of_modules.items()}
    allowed = {**_RANKS, **dict.fromkeys(ranks, _RANKS["r"])}
    numbers = {entry: value for entry, value in {**said, **ranks}.items() if isinstance(value, int | float)}
    for entry, value, may_be in wrong(numbers, allowed):
        raise OSError(f"{at.name}: cannot load {str(at.folder)!r}: {entry} is {value}, and has to be {may_be}")
