"""What rank 0 says to the other ranks of a model in shards: what to do next, so that all of them enter each forward.

A message is a few bytes over a socket of this machine: a follower waits for the next one for hours, and knows at once
when rank 0 is gone, as the system then closes the socket. Tensors follow by a broadcast from device to device, so
that rank 0 need not wait for numbers that its GPU has not computed yet.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import select
import socket
import struct
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import distributed

from ...result import error_text

_SIZE = struct.Struct("!I")  # of a message, in bytes
_REASON_SECONDS = 2.0  # in which a rank that failed says why: others notice by their collective, which may be sooner


class RanksParted(Exception):
    """One of the ranks of a model in shards failed or ended, so that no more forwards are possible. The message says
    which and why. It is no RuntimeError, so that nobody takes it for exhausted memory and tries again."""


class Leader:
    """Rank 0's end.

    Args:
        followers: a connected socket for each of the other ranks, by rank.
        device: where broadcast tensors are.
    """

    def __init__(self, followers: dict[int, socket.socket], device: torch.device):
        self.size, self.device = len(followers) + 1, device
        self._followers, self._lock = followers, threading.Lock()
        self._numbers, self._dropped = itertools.count(), deque[int]()
        self._ended: str | None = None  # why nothing can be done any more

    def new_number(self) -> int:
        return next(self._numbers)

    def share(self, owner: object, number: int | None = None) -> int:
        """Returns the number under which followers keep what corresponds to ``owner``, as long as that exists."""
        number = self.new_number() if number is None else number
        # Garbage is collected at any time, also while a message is sent: followers are told with the next one.
        weakref.finalize(owner, self._dropped.append, number).atexit = False
        return number

    @contextlib.contextmanager
    def all_do(self, do: str, *tensors: torch.Tensor, **what: Any) -> Iterator[None]:
        """Has all followers do what the body of the statement does, which may be collective.

        Args:
            do: its name.
            tensors: int64, any shapes, on ``device``.
            what: more that followers need, as JSON can say it.

        Raises:
            RanksParted: this time or earlier, a rank failed. Of whatever is raised here, that is the cause.
        """
        with self._lock:
            if self._ended is not None:
                raise RanksParted(self._ended)
            try:
                dropped = [self._dropped.popleft() for _ in range(len(self._dropped))]
                shapes = [list(tensor.shape) for tensor in tensors]
                message = _packed({"do": do, "dropped": dropped, "shapes": shapes, **what})
                for follower in self._followers.values():
                    follower.sendall(message)
                if tensors:
                    distributed.broadcast(torch.cat([tensor.flatten() for tensor in tensors]), 0)
                yield
            except BaseException as error:
                # The others may be in the middle of what this rank has left, or the reverse.
                self._part(error)
                if not isinstance(error, Exception):
                    raise
                raise RanksParted(self._ended) from error

    def _part(self, error: BaseException) -> None:
        self._ended = self._told() or f"rank 0 failed: {error_text(error)}"
        for follower in self._followers.values():
            follower.close()

    def _told(self) -> str | None:
        """Returns what followers say of their failures, of which one may follow from another; None: none has failed."""
        ranks, told = {follower: rank for rank, follower in self._followers.items()}, list[str]()
        ready, _, _ = select.select([*ranks], [], [], _REASON_SECONDS)
        for follower in ready:
            try:
                reason = f"failed: {_received(follower)}"
            except (OSError, EOFError):
                reason = "ended"
            told.append(f"rank {ranks[follower]} {reason}")
        return "; ".join(told) or None

    def end(self) -> None:
        """Lets the followers end."""
        # A thread may be in the middle of a forward, and if that hangs, followers end since the channel is closed.
        between = self._lock.acquire(timeout=_REASON_SECONDS)
        try:
            if self._ended is not None:
                return
            self._ended = "rank 0 has ended"
            for follower in self._followers.values():
                with contextlib.suppress(OSError):  # one that is gone has ended
                    if between:
                        follower.sendall(_packed(None))
                follower.close()
            if between:
                distributed.destroy_process_group()
        finally:
            if between:
                self._lock.release()


class Follower:
    """The end of another rank.

    Args:
        leader: a socket that is connected with rank 0.
    """

    def __init__(self, leader: socket.socket, rank: int, device: torch.device):
        self._leader, self.rank, self.device = leader, rank, device

    def receive(self) -> tuple[dict[str, Any], list[torch.Tensor]] | None:
        """Waits for what is to be done next, and returns it with its tensors; None: rank 0 has ended.

        Raises:
            EOFError, OSError: rank 0 is gone without having said so.
        """
        message = _received(self._leader)
        if message is None:
            distributed.destroy_process_group()
            return None
        shapes = [torch.Size(shape) for shape in message["shapes"]]
        packed = torch.empty(sum(shape.numel() for shape in shapes), dtype=torch.int64, device=self.device)
        if shapes:
            distributed.broadcast(packed, 0)
        parts = packed.split([shape.numel() for shape in shapes]) if shapes else ()
        return message, [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def tell(self, error: BaseException) -> None:
        """Tells rank 0 why this one fails, if it still listens."""
        with contextlib.suppress(OSError):
            self._leader.sendall(_packed(error_text(error)))

    def wait_for_the_end(self) -> None:
        """Returns when rank 0 has closed its end, whatever it sent before that nobody has read yet."""
        poll = select.poll()
        poll.register(self._leader, getattr(select, "POLLRDHUP", select.POLLHUP))
        poll.poll()


def meet(rank: int, size: int, device: torch.device) -> Leader | Follower:
    """Connects the ranks of the process group, all of which call it."""
    # All ranks are on one machine, and what connects without this secret is somebody else.
    if rank == 0:
        import secrets

        with socket.create_server(("127.0.0.1", 0)) as server:
            secret = secrets.token_hex(16)
            distributed.broadcast_object_list([server.getsockname()[1], secret], 0)
            return Leader(dict(sorted(_accepted(server, secret, size))), device)
    given: list[Any] = [None, None]
    distributed.broadcast_object_list(given, 0)
    leader = socket.create_connection(("127.0.0.1", given[0]))
    leader.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    leader.sendall(_packed([given[1], rank]))
    return Follower(leader, rank, device)


def _accepted(server: socket.socket, secret: str, size: int) -> Iterator[tuple[int, socket.socket]]:
    left = set(range(1, size))
    while left:
        follower, _ = server.accept()
        with contextlib.suppress(OSError, EOFError, ValueError):
            follower.settimeout(_REASON_SECONDS)  # nobody else can keep this one waiting
            said = _received(follower, 256)
            if isinstance(said, list) and said[0] == secret and said[1] in left:
                follower.settimeout(None)
                follower.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                left.remove(said[1])
                yield said[1], follower
                continue
        follower.close()


def _packed(message: Any) -> bytes:
    text = json.dumps(message).encode()
    return _SIZE.pack(len(text)) + text


def _received(end: socket.socket, most: int = 1 << 30) -> Any:
    (size,) = _SIZE.unpack(_read(end, _SIZE.size))
    if size > most:
        raise ValueError(f"a message of {size} bytes")
    return json.loads(_read(end, size))


def _read(end: socket.socket, size: int) -> bytes:
    parts: list[bytes] = []
    while size > 0:
        part = end.recv(min(size, 1 << 16))
        if not part:
            raise EOFError("the other end is closed")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
