"""All that a training goes on from after it was killed, in one file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import nn

from ..checks import differences, refuse
from ..files import write_whole

FORMAT = "specdec training 1"


def save_checkpoint(
    path: Path,
    parameters: Mapping[str, nn.Parameter],
    optimiser: torch.optim.Optimizer,
    texts: Mapping[str, torch.Tensor],
    state: Mapping[str, Any],
    settings: Mapping[str, Any],
) -> None:
    """Replaces the file at once: weights, what the optimiser knows of each, texts to come, and ``state`` as JSON in its
    header. Raises OSError, and the file is then the one before."""
    tensors = {}
    for name, parameter in parameters.items():
        tensors[f"weight/{name}"] = parameter.detach().cpu().contiguous()
        for kind, value in optimiser.state.get(parameter, {}).items():
            tensors[f"{kind}/{name}"] = value.detach().cpu().contiguous()
    tensors |= {f"text/{name}": value.contiguous() for name, value in texts.items()}
    header = {"format": FORMAT, "state": json.dumps(dict(state)), "settings": json.dumps(dict(settings))}
    write_whole(path, save(tensors, header))


def load_checkpoint(
    path: Path, parameters: Mapping[str, nn.Parameter], optimiser: torch.optim.Optimizer, settings: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Puts weights and the optimiser's numbers where they were. Returns state and texts.

    Raises:
        ValueError: names ``output``: the file is none of these, or was begun with other settings, which it names.
    """
    try:
        with safe_open(path, "pt") as file:
            header = file.metadata() or {}
            if header.get("format") != FORMAT:
                refuse("output", f"{str(path)!r}, of another format", "an empty folder, or one of this training")
            changed = differences(json.loads(header["settings"]), json.loads(json.dumps(dict(settings))))
            if changed:
                refuse("output", f"a training with other settings ({'; '.join(changed)})", "these, or another folder")
            texts = {}
            with torch.no_grad():
                for key in file.keys():
                    kind, _, name = key.partition("/")
                    value = file.get_tensor(key)
                    if kind == "text":
                        texts[name] = value
                    elif kind == "weight":
                        parameters[name].copy_(value)
                    else:
                        of = parameters[name]
                        optimiser.state[of][kind] = value if value.dim() == 0 else value.to(of.device)
            return json.loads(header["state"]), texts
    except (SafetensorError, KeyError, OSError, json.JSONDecodeError, TypeError, AttributeError, RuntimeError) as error:
        refuse("output", f"{str(path)!r} ({error})", "a checkpoint of this training, or an empty folder")
