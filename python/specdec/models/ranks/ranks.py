"""The processes over which a model's weights are divided: torchrun starts them, and they meet here."""

from __future__ import annotations

import atexit
import importlib.util
import os
from typing import TYPE_CHECKING

import torch

from ...checks import read_count, refuse

if TYPE_CHECKING:
    from .channel import Follower, Leader

# How long a rank waits in a collective for others that are alive. One that ends is noticed at once.
_COLLECTIVE_MINUTES = 10
_met: list[Leader | Follower] = []  # at most one: a process belongs to one group


def check_ranks(tp: int, device: torch.device | str) -> torch.device:
    """Returns the device of this rank.

    Raises:
        ValueError: names ``tp`` or ``device``: this process is not one of ``tp`` on this machine that torchrun
            started, accelerate is missing, or the devices are none of theirs.
    """
    read_count("tp", tp, 2)
    command = f"torchrun --nproc-per-node {tp} SCRIPT, or torchrun --nproc-per-node {tp} -m specdec ..."
    world = os.environ.get("WORLD_SIZE")
    if world is None:
        refuse("tp", f"{tp} in one process", f"{tp} processes: {command}")
    if int(world) != tp:
        refuse("tp", f"{tp} in {world} processes", f"as many processes: {command}")
    if os.environ.get("LOCAL_WORLD_SIZE", world) != world:
        refuse("tp", f"{tp} over several machines", "processes on one machine")
    if importlib.util.find_spec("accelerate") is None:
        refuse("tp", f"{tp} without accelerate", 'None, or: pip install "specdec-kernels[tp]"')
    asked = torch.device(device)
    if asked.type not in ("cpu", "cuda") or asked.index is not None:
        refuse("device", f"{str(device)!r} with tp={tp}", "'cpu' or 'cuda': each rank takes the GPU of its own number")
    if asked.type == "cpu":
        return asked
    if torch.cuda.device_count() < tp:
        refuse(
            "tp", f"{tp} with {torch.cuda.device_count()} GPUs", "at most as many as there are GPUs, or device='cpu'"
        )
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]))


def meet_ranks(tp: int, device: torch.device | str) -> Leader | Follower:
    """Returns this rank's end of the channel between the ranks, all of which call it. Later calls return the same.

    Raises:
        ValueError: as :func:`check_ranks`.
    """
    own = check_ranks(tp, device)
    if _met:
        if _met[0].device.type != own.type:
            refuse("device", f"{str(device)!r}", f"{_met[0].device.type!r}, where the ranks of this process have met")
        return _met[0]
    from datetime import timedelta

    from torch import distributed

    from .channel import Leader, meet

    if own.type == "cuda":
        torch.cuda.set_device(own)
    if not distributed.is_initialized():
        backend = "gloo" if own.type == "cpu" else "cpu:gloo,cuda:nccl"
        distributed.init_process_group(backend, timeout=timedelta(minutes=_COLLECTIVE_MINUTES))
    end = meet(distributed.get_rank(), distributed.get_world_size(), own)
    if isinstance(end, Leader):
        atexit.register(end.end)
    _met.append(end)
    return end
