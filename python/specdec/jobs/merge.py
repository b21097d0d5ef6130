"""Joins the results of a job's shards: one file, its lines in the order of the prompts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ..checks import differences
from ..files import write_whole
from ..line_file import LineFile, OutputError, WriteError
from .manifest import SETTINGS_END, SHARD, read_settings, settings_path, write_settings
from .output import Totals, read_row
from .shard import WHOLE, Shard


class Part(NamedTuple):
    """An output file of a job."""

    path: Path
    shard: Shard
    manifest: dict  # as it was written, without the shard


class Place(NamedTuple):
    """Where the line of each prompt is; -1: nowhere."""

    part: np.ndarray  # [prompts] int32
    begin: np.ndarray  # [prompts] int64, bytes
    size: np.ndarray  # [prompts] int64, bytes


def find_parts(folder: Path) -> list[Part]:
    """The output files in a folder, which have their settings beside them, in the order of their shards.

    Raises:
        OutputError: there are none, one has no whole settings, they are of different jobs, or one is missing.
    """
    found = sorted(path for path in folder.glob(f"*{SETTINGS_END}") if not path.name.startswith("."))
    if not found:
        raise OutputError(f"got {str(folder)!r}, allowed: a folder with the outputs of a job's shards")
    parts = sorted((_part(path.with_name(path.name.removesuffix(SETTINGS_END))) for path in found), key=_order)
    for first, other in itertools.pairwise(parts):
        wrong = differences(first.manifest["settings"], other.manifest["settings"])
        if first.manifest["input"] != other.manifest["input"]:
            wrong.append("another input, or one that grew in between")
        if first.shard.count != other.shard.count:
            wrong.append(f"shards {first.shard} and {other.shard}")
        elif first.shard == other.shard:
            wrong.append(f"both shard {first.shard}")
        if wrong:
            names = f"{first.path.name!r} and {other.path.name!r}"
            raise OutputError(f"got {names}, which do not belong together ({'; '.join(wrong)}), allowed: one job's")
    prompts, count, there = parts[0].manifest["input"]["prompts"], parts[0].shard.count, {part.shard for part in parts}
    for shard in (Shard(i, count) for i in range(count)):
        if shard not in there and shard.size(prompts):  # one without prompts writes no file
            raise OutputError(f"got {str(folder)!r} without shard {shard}, allowed: all shards' outputs")
    return parts


def merge(parts: Sequence[Part], output: Path) -> Totals:
    """Writes one file of the shards' outputs, and its settings beside it: it is then the output of the job without
    shards, which the same command may continue.

    Returns:
        Sums over all results.

    Raises:
        OutputError: an output is not whole, or not of this job, or there is a file already. Nothing is written then.
        WriteError: the disk is full.
    """
    for path in (output, settings_path(output)):
        if path.exists() or path.is_symlink():
            raise OutputError(f"got {str(path)!r}, which exists, allowed: a new file")
    if not output.parent.is_dir():
        raise OutputError(f"got {str(output)!r}, in no folder, allowed: a file in a folder that can be written to")
    totals = Totals()
    with ExitStack() as stack:
        files = [stack.enter_context(closing(LineFile(part.path))) for part in parts]
        place = _places(parts, files, totals)
        try:
            write_whole(output, (files[part].at(begin, size) for part, begin, size in zip(*place, strict=True)))
            write_settings(output, parts[0].manifest)
        except OSError as error:
            output.unlink(missing_ok=True)
            raise WriteError(f"cannot write to {str(output)!r}: {error.strerror}") from error
    return totals


def rounding(parts: Sequence[Part]) -> list[str]:
    """What may have rounded differently between the parts."""
    first = parts[0].manifest["rounding"]
    return list(dict.fromkeys(each for part in parts for each in differences(first, part.manifest["rounding"])))


def _part(path: Path) -> Part:
    manifest = read_settings(path, OutputError)
    given = manifest["settings"].pop(SHARD, None)
    try:
        return Part(path, WHOLE if given is None else Shard.parse(given), manifest)
    except (TypeError, ValueError) as error:
        raise OutputError(f"{str(settings_path(path))!r}: {SHARD}: {error}") from error


def _order(part: Part) -> tuple[int, int, str]:
    return part.shard.count, part.shard.index, part.path.name


def _places(parts: Sequence[Part], files: Sequence[LineFile], totals: Totals) -> Place:
    """Reads and checks all lines."""
    prompts = parts[0].manifest["input"]["prompts"]
    place = Place(np.full(prompts, -1, np.int32), np.zeros(prompts, np.int64), np.zeros(prompts, np.int64))
    ids: set[str | int] = set()
    for i, (part, file) in enumerate(zip(parts, files, strict=True)):
        for number, line in file.read():
            try:
                row = read_row(line)
                _check(row, part, place, ids)
            except ValueError as error:
                raise OutputError(f"line {number} of {str(part.path)!r}: {error}") from error
            prompt = row["prompt"]
            ids.add(row["id"])
            place.part[prompt], place.begin[prompt], place.size[prompt] = i, file.end - len(line), len(line)
            totals.add(row)
        mine = place.part[part.shard.index :: part.shard.count]
        if (there := int((mine >= 0).sum())) < len(mine):
            what = f"{str(part.path)!r}, shard {part.shard} with {there} of its {len(mine)} results"
            raise OutputError(f"got {what}, allowed: whole ones; the same command makes the others")
    return place


def _check(row: dict, part: Part, place: Place, ids: set[str | int]) -> None:
    prompt = row["prompt"]
    if not 0 <= prompt < len(place.part) or not part.shard.has(prompt):
        raise ValueError(f"got prompt {prompt}, allowed: those of shard {part.shard} of {len(place.part)} prompts")
    if place.part[prompt] >= 0 or row["id"] in ids:
        raise ValueError(f"got prompt {prompt}, id {row['id']!r} again, allowed: each once")
