"""A file of step times that decoders have learned, so that another process need not learn them.

Times are those of models, a drafter and a machine. A file that comes with models has times of "any CPU": absolute ones
of the CPU on which they were measured, of which the ratios T(K) / T(0) are a first guess elsewhere.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

import torch

from ..checks import refuse
from ..drafters.protocol import Drafter
from ..models.cached_model import CachedModel

FORMAT = "specdec step times 1"
Seconds = Mapping[int, Mapping[int, float]]  # by batch size, by K


def described(target: CachedModel, drafter: Drafter | None, backend: str, nodes: int) -> dict[str, object]:
    """Returns all on which step times depend: models, drafter, device, threads, backend and versions, and the nodes of
    trees, if any."""
    model = getattr(drafter, "model", None)
    return {
        "target": _model(target),
        "drafter": _drafter(drafter),
        "draft": _model(model) if isinstance(model, CachedModel) else None,
        "device": torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else _processor(),
        "threads": torch.get_num_threads(),
        "backend": backend,
        "torch": torch.__version__,
        **({"nodes": nodes} if nodes else {}),
    }


def described_anywhere(target: CachedModel, drafter: Drafter | None, nodes: int) -> dict[str, object] | None:
    """Returns what times of any CPU are kept under: sizes of the models, and the drafter. None: they have none, since
    they are on a GPU, or compiled."""
    model = getattr(drafter, "model", None)
    models = [target, *([model] if isinstance(model, CachedModel) else [])]
    if any(m.device.type != "cpu" or m.is_compiled for m in models):
        return None
    return {"device": "any CPU", "drafter": _drafter(drafter), "models": [_size(m) for m in models], "nodes": nodes}


def _drafter(drafter: Drafter | None) -> list[object]:
    settings = getattr(drafter, "__dict__", {})  # None and slots have none
    return [type(drafter).__name__, {k: v for k, v in settings.items() if isinstance(v, (int, float))}]


def _size(model: CachedModel) -> list[object]:
    """Unlike the whole configuration, it is the same in all versions of transformers."""
    parameters = sum(p.numel() for p in model.model.parameters())
    return [type(model.model).__name__, model.vocab_size, parameters, str(model.dtype), str(model.cache_dtype)]


def _model(model: CachedModel) -> dict[str, object]:
    config = {k: v for k, v in model.config.to_dict().items() if k not in ("_name_or_path", "transformers_version")}
    return {
        "type": type(model.model).__name__,
        "config": hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest(),
        "dtype": str(model.dtype),
        "cache_dtype": str(model.cache_dtype),
        "compiled": model.is_compiled,
    }


def _processor() -> str:
    return f"{torch.backends.cpu.get_cpu_capability()}, {os.cpu_count()} processors"


def _key(description: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()[:32]


def load(path: str | Path, *descriptions: Mapping[str, object] | None) -> Seconds:
    """Returns the times in the file that are of the first of these descriptions of which it has any; none if there are
    none, or no file.

    Raises:
        ValueError: the file cannot be read, or is not one that ``save`` wrote.
    """
    entries, keys = _read(Path(path)), [_key(d) for d in descriptions if d is not None]
    entry: dict = next((entries[key] for key in keys if key in entries), {"seconds": {}})
    try:
        found = {int(b): {int(k): float(s) for k, s in times.items()} for b, times in entry["seconds"].items()}
    except (AttributeError, KeyError, TypeError, ValueError):
        _refuse(path, "an entry without numbers")
    if not all(math.isfinite(s) and s > 0 and k >= 0 for times in found.values() for k, s in times.items()):
        _refuse(path, "times that are not finite and > 0")
    return found


def save(path: str | Path, description: Mapping[str, object], seconds: Seconds) -> None:
    """Adds the times to the file, in the place of those of the same description and batch size.

    Raises:
        ValueError: as ``load``.
        OSError: the file cannot be written.
    """
    path = Path(path)
    entries, key = _read(path), _key(description)
    known = entries.get(key, {}).get("seconds", {})
    entries[key] = {"of": description, "seconds": {**known, **{str(b): times for b, times in seconds.items()}}}
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_text(json.dumps({"format": FORMAT, "entries": entries}, indent=1, sort_keys=True) + "\n")
    part.replace(path)  # so that another process reads the file before or after, and never a part of it


def _read(path: Path) -> dict:
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        _refuse(path, str(error))
    if not isinstance(content, dict) or content.get("format") != FORMAT or not isinstance(content.get("entries"), dict):
        _refuse(path, "another format")
    return content["entries"]


def _refuse(path: str | Path, why: str) -> NoReturn:
    refuse("path", f"{str(path)!r} ({why})", "a file that save_costs wrote, or none yet")
