"""Reads the header of a GGUF file in one pass, and maps its tensors: none of their bytes is read before it is used."""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

VERSIONS = (2, 3)
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MOST_DIMENSIONS = 4  # GGML_MAX_DIMS


@dataclass(frozen=True)
class StoredTensor:
    """
    Attributes:
        type: its id in GGML, gguf's ``GGMLQuantizationType``.
        shape: in PyTorch's order: the inputs of a row come last.
        data: uint8, the bytes of a row [..., bytes], in the mapped file.
    """

    type: int
    shape: tuple[int, ...]
    data: torch.Tensor

    @property
    def type_name(self) -> str:
        from gguf import GGMLQuantizationType

        return GGMLQuantizationType(self.type).name


def read_header(path: Path) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    """Returns the metadata by key, and the tensors by name.

    Raises:
        OSError: there is no such file, or it cannot be opened.
        ValueError: it is none of GGUF, of another version, or shorter than it says.
    """
    with path.open("rb") as file:
        if not file.seek(0, 2):
            raise ValueError("it is empty")
        # Private, so that tensors may be written to; only what is written takes memory of its own.
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    try:
        return _read(_Cursor(mapped), mapped)
    except (struct.error, OverflowError, MemoryError, UnicodeDecodeError) as error:
        raise ValueError(f"its header is damaged: {error}") from error


class _Cursor:
    def __init__(self, mapped: mmap.mmap):
        self._mapped, self.at = mapped, 0

    def numbers(self, form: str) -> tuple[Any, ...]:
        form = f"<{form}"
        found = struct.unpack_from(form, self._mapped, self.at)
        self.at += struct.calcsize(form)
        return found

    def string(self) -> str:
        (size,) = self.numbers("Q")
        self.at += size
        return self._mapped[self.at - size : self.at].decode()

    def value(self, kind: int) -> Any:
        if kind in _NUMBERS:
            return self.numbers(_NUMBERS[kind])[0]
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise ValueError(f"its header has a value of the unknown type {kind}")
        kind, count = self.numbers("IQ")
        if kind == _ARRAY:
            raise ValueError("its header has a list of lists, which no file has that llama.cpp reads")
        if kind in _NUMBERS:
            return [*self.numbers(f"{count}{_NUMBERS[kind]}")]
        return [self.value(kind) for _ in range(count)]


def _read(cursor: _Cursor, mapped: mmap.mmap) -> tuple[dict[str, Any], dict[str, StoredTensor]]:
    if mapped[:4] != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    _, version, tensors, keys = cursor.numbers("4sIQQ")
    if version not in VERSIONS:
        raise ValueError(f"it is of version {version}; read are {' and '.join(map(str, VERSIONS))}")
    metadata = {}
    for _ in range(keys):
        key = cursor.string()
        metadata[key] = cursor.value(*cursor.numbers("I"))
    named = [(cursor.string(), *_place(cursor)) for _ in range(tensors)]
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 8 or alignment % 8 or any(at % 8 for *_, at in named):
        raise ValueError(f"its tensors do not begin at multiples of 8 (general.alignment is {alignment!r})")
    if beyond := next((name for name, *_, at in named if at > len(mapped)), None):
        raise ValueError(f"its tensor {beyond!r} begins after its end: it is not whole")
    begin = -(-cursor.at // alignment) * alignment
    whole = torch.frombuffer(mapped, dtype=torch.uint8)
    return metadata, {name: _tensor(name, kind, shape, whole[begin + at :]) for name, shape, kind, at in named}


def _place(cursor: _Cursor) -> tuple[tuple[int, ...], int, int]:
    """Shape, type, and where it begins after the header."""
    (dims,) = cursor.numbers("I")
    if dims > _MOST_DIMENSIONS:
        raise ValueError(f"its header has a tensor of {dims} dimensions, and {_MOST_DIMENSIONS} are the most")
    sizes = cursor.numbers(f"{dims}Q")
    return (*reversed(sizes),), *cursor.numbers("IQ")


def _tensor(name: str, kind: int, shape: tuple[int, ...], rest: torch.Tensor) -> StoredTensor:
    block, size = _block(kind)
    if not block:
        raise ValueError(f"tensor {name!r} is of the unknown type {kind}")
    if 0 in shape:
        raise ValueError(f"tensor {name!r} of the shape {list(shape)} has a dimension of 0")
    if not shape or shape[-1] % block:
        raise ValueError(f"tensor {name!r} of the shape {list(shape)} is not of whole blocks of {block}")
    stored = (*shape[:-1], shape[-1] // block * size)
    if math.prod(stored) > len(rest):
        raise ValueError(f"it ends within tensor {name!r}: it is not whole")
    return StoredTensor(kind, shape, rest[: math.prod(stored)].view(stored))


def _block(kind: int) -> tuple[int, int]:
    """Numbers and bytes of a block; zeros of an unknown type."""
    from gguf import GGML_QUANT_SIZES

    sizes: Mapping[Any, tuple[int, int]] = GGML_QUANT_SIZES
    return sizes.get(kind, (0, 0))
