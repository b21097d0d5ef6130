"""Adapters of peft: in safetensors, and never instead of the model that they belong to."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

from transformers.utils import find_adapter_config_file

from ...checks import one_line, refuse
from ...fields import Number, wrong
from .model_folder import CONFIG, hub_or_cache, require_folder

# Of an adapter's numbers that decide how much peft makes of them before the weights are looked at.
_RANKS = dict.fromkeys(("r", "lora_rank", "rank", "alpha_rank"), Number(1, 2**14))


def add_adapter(model: Any, adapter: str | os.PathLike) -> None:
    folder = Path(adapter).expanduser()
    try:
        report = model.load_adapter(str(folder), use_safetensors=True)
    except Exception as error:  # peft and transformers raise whatever a broken entry leads to
        raise OSError(f"adapter: cannot load {str(adapter)!r}: {one_line(error, 600)}") from error
    if absent := sorted(report.missing_keys):
        raise OSError(
            f"adapter: the weights in {str(adapter)!r} lack {len(absent)} tensors, the first is {absent[0]!r}"
        )


def refuse_adapter(name: str, path: str | os.PathLike) -> None:
    """Raises ValueError if ``path`` has an adapter and no model: transformers would load whatever model the adapter
    names. Raises OSError if it has both, but the adapter cannot be loaded safely."""
    folder = Path(path).expanduser()
    require_folder(name, path)
    if folder.is_dir():
        found = folder / "adapter_config.json"
        if not found.is_file():
            return
        if (folder / CONFIG).is_file():
            return require_adapter(name, path)
    else:
        if importlib.util.find_spec("peft") is None:
            return
        with hub_or_cache(name, path):
            try:  # transformers looks for it as well, where peft is installed
                there = find_adapter_config_file(str(path))
            except (OSError, ValueError) as error:
                raise OSError(f"{name}: cannot load a model from {str(path)!r}: {error}") from error
        if there is None:
            return
        found = Path(there)
    try:
        base = json.loads(found.read_bytes()).get("base_model_name_or_path")
    except (ValueError, AttributeError, RecursionError):
        base = None
    told = "" if base is None else f" (its adapter_config.json says {str(base)!r})"
    refuse(name, f"an adapter, {str(path)!r}", f"the model that it belongs to{told}, with this as the adapter")


def require_adapter(name: str, path: str | os.PathLike) -> None:
    """Raises OSError unless ``path`` is a folder with an adapter in safetensors. Without this file, transformers would
    unpickle adapter_model.bin."""
    if not Path(path).expanduser().is_dir():
        raise OSError(f"{name}: there is no folder {str(path)!r}")
    require_folder(name, path, "adapter_config.json", "adapter_model.safetensors")
    if importlib.util.find_spec("peft") is None:
        raise OSError(f"{name}: cannot load {str(path)!r}: it is an adapter, which takes peft")
    _check_entries(name, Path(path).expanduser() / "adapter_config.json")


def _check_entries(name: str, file: Path) -> None:
    try:
        said = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise OSError(f"{name}: cannot read {str(file)!r}: {one_line(error)}") from error
    if not isinstance(said, dict):
        raise OSError(f"{name}: cannot read {str(file)!r}: it has no object")
    patterns = said.get("rank_pattern")
    ranks = (
        {f"rank_pattern {module!r}": rank for module, rank in patterns.items()} if isinstance(patterns, dict) else {}
    )
    allowed = {**_RANKS, **dict.fromkeys(ranks, _RANKS["r"])}
    numbers = {entry: value for entry, value in {**said, **ranks}.items() if isinstance(value, int | float)}
    for entry, value, may_be in wrong(numbers, allowed):
        raise OSError(f"{name}: cannot load {str(file.parent)!r}: {entry} is {value}, and has to be {may_be}")
