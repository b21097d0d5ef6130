"""Groups of processes over which a model is divided, by gloo on a CPU. The test itself is rank 0."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from . import ROOT

FOLLOWS = "from specdec.models.load.load_sharded import join_ranks; join_ranks(int('{size}'), 'cpu')"


def environment(rank: int, size: int, port: int) -> dict[str, str]:
    """What torchrun sets."""
    of_group = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return {name: str(value) for name, value in {"RANK": rank, "LOCAL_RANK": rank, **of_group}.items()}


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def start(script: str, rank: int, size: int, port: int) -> subprocess.Popen:
    paths = os.pathsep.join([str(ROOT / "python"), str(ROOT)])
    own = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **environment(rank, size, port)}
    command = [sys.executable, "-c", script]
    return subprocess.Popen(
        command, env={**os.environ, **own}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@contextmanager
def group(size: int) -> Iterator[list[subprocess.Popen]]:
    """Makes this process rank 0 of a group, and yields the others."""
    from specdec.models.load.load_sharded import join_ranks
    from specdec.models.ranks import ranks

    port = free_port()
    followers = [start(FOLLOWS.format(size=size), rank, size, port) for rank in range(1, size)]
    try:
        with pytest.MonkeyPatch.context() as patched:
            for name, value in environment(0, size, port).items():
                patched.setenv(name, value)
            leader = join_ranks(size, "cpu")
            try:
                yield followers
            finally:
                leader.end()
                ranks._met.clear()
                if torch.distributed.is_initialized():  # where ranks parted
                    torch.distributed.destroy_process_group()
    finally:
        for follower in followers:
            if follower.poll() is None:
                try:
                    follower.wait(20)
                except subprocess.TimeoutExpired:
                    follower.kill()
            follower.communicate()
