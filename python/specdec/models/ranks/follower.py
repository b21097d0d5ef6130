"""The ranks other than 0 of a model in shards: they do what rank 0 tells them, and end with it."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from ..cache.kv_cache import StaticKVCache
from ..cache.kv_layer import Slot
from ..cache.tree import Tree
from ..exchanged.shards import with_whole_ends
from ..forward.cached_model import CachedModel
from ..forward.layout import Layout
from .channel import Follower
from .sharded import least_free

Load = Callable[..., PreTrainedModel]
_GRACE_SECONDS = 5.0  # for a rank to end by itself after rank 0; one that waits in a collective may not


def follow(end: Follower, load: Load) -> NoReturn:
    """Does what rank 0 tells until that ends, and ends the process: with exit code 0, if rank 0 said that it ended;
    with 1, if it is gone without a word, or if this rank fails, which is told to rank 0 and on stderr.

    Signals of the terminal and of torchrun's end are ignored: rank 0 gets them as well, and may have to finish first.

    Args:
        load: loads a model with what rank 0's call of it was given.
    """
    if threading.current_thread() is threading.main_thread():
        for ignored in (signal.SIGINT, signal.SIGTERM):
            signal.signal(ignored, signal.SIG_IGN)
    logging.set_verbosity_error()  # rank 0 says the same
    logging.disable_progress_bar()
    threading.Thread(target=_end_with_the_leader, args=(end,), daemon=True).start()
    repeated = _Repeated(load, end.device)
    try:
        with torch.inference_mode():
            while (received := _next(end)) is not None:
                repeated.do(*received)
    except Exception as error:
        end.tell(error)
        traceback.print_exc()
        sys.exit(1)
    sys.exit(0)


def _next(end: Follower) -> tuple[dict[str, Any], list[torch.Tensor]] | None:
    try:
        return end.receive()
    except (EOFError, OSError):
        print(f"rank {end.rank}: rank 0 is gone", file=sys.stderr)
        sys.exit(1)


def _end_with_the_leader(end: Follower) -> None:
    end.wait_for_the_end()
    time.sleep(_GRACE_SECONDS)
    os._exit(1)  # the main thread waits in a collective that rank 0 will never enter


class _Repeated:
    """What this rank has of rank 0's models and caches, by their numbers."""

    def __init__(self, load: Load, device: torch.device):
        self._load, self._device, self._objects = load, device, dict[int, Any]()

    def do(self, message: dict[str, Any], tensors: list[torch.Tensor]) -> None:
        for number in message.pop("dropped"):
            self._objects.pop(number, None)
        del message["shapes"]
        given: Any = self._objects
        match message.pop("do"):
            case "load":
                number = message.pop("number")
                with torch.inference_mode(False):
                    given[number] = self._load(**message)
            case "model":
                dtype = _dtype(message["cache_dtype"])
                given[message["number"]] = _FollowingModel(given[message["loaded"]], cache_dtype=dtype)
            case "cache":
                model = given[message["model"]]
                given[message["number"]] = model.cache(message["rows"], message["capacity"], _dtype(message["dtype"]))
            case "allocate":
                slots = [
                    p if p is None else tuple(Slot(h, n, getattr(torch, d)) for h, n, d in p) for p in message["slots"]
                ]
                given[message["cache"]].allocate(slots)
            case "forward":
                cache = given[message.pop("cache")]
                cache.model.repeat(cache, tensors, **message)
            case "begin":
                given[message.pop("cache")].begin(**message)
            case "copy rows":
                given[message.pop("cache")].copy_rows(**message)
            case "compact":
                cache = given[message["cache"]]
                cache.lengths, path = tensors
                cache.compact(path)
            case "memory":
                least_free(self._device)
            case "whole ends":
                with torch.inference_mode(False), torch.no_grad():
                    with_whole_ends(given[message["loaded"]])
            case other:
                raise AssertionError(f"rank 0 asks for {other!r}")


class _FollowingCache(StaticKVCache):
    model: _FollowingModel


class _FollowingModel(CachedModel):
    """This rank's part of the model that rank 0 drives."""

    def cache(self, rows: int, capacity: int, dtype: torch.dtype | None) -> _FollowingCache:
        as_stored = self.attention.is_native
        cache = _FollowingCache(self.config, rows, capacity, self.device, dtype=dtype, as_stored=as_stored)
        cache.model = self
        return cache

    def repeat(
        self,
        cache: StaticKVCache,
        tensors: list[torch.Tensor],
        module: str,
        masked: bool,
        visible: int,
        first_row: int,
        keep: bool,
    ) -> None:
        """Does a forward of rank 0. The result is there, too."""
        tokens, positions, slots, *parents = tensors
        # With the root, a tree's parents are counted from 0.
        tree = Tree.of(parents[0][:, 1:] - 1) if parents else None
        mask = self.attention.mask(positions, visible, tree) if masked else None
        own = self.forwards
        called: Any = {"steps": own.steps, "prompts": own.prompts, "base": own.prompts.base_model}[module]
        own.run(called, tokens, cache, Layout(positions, slots, visible, mask, tree), first_row, keep)


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)
