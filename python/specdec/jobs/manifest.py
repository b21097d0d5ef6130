"""Everything that the texts of a job depend on. It is kept beside the output, so that a job can only be resumed with
the same models and settings."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from ..files import open_itself, write_whole
from .input import InputMark
from .lines import GRAMMARS, LineSettings

T = TypeVar("T")
SAMPLES, SAMPLE_BYTES = 64, 4096  # how many samples of every weight file a fingerprint covers, and of how many bytes
SETTINGS_END = ".settings.json"  # of the name of the settings file, after the output's
SHARD = "shard"  # the setting that says which part of a job an output is
GGUF_BEGIN = 2**20  # bytes, the model's settings among them: the header does not say where it ends


def make_settings(
    decoding: dict[str, object],
    defaults: LineSettings,
    models: dict[str, str | None],
    rounding: dict[str, object],
    mark: InputMark,
) -> dict:
    """The contents of the settings file.

    Args:
        decoding: settings of the command that change texts, by name.
        defaults: the settings of lines that have none of their own.
        models: name -> folder or hub name; they are recognised by their fingerprints.
        rounding: what can change the last bits of logits but nothing else; a change is reported and allowed.
        mark: of the input file.
    """
    lines = dataclasses.asdict(defaults)
    for name in GRAMMARS:  # jobs that began before there were grammars go on
        if lines[name] is None:
            del lines[name]
    if defaults.logit_bias is not None:
        lines["logit_bias"] = {str(token): value for token, value in sorted(defaults.logit_bias.items())}
    whole = {
        "settings": {**decoding, **lines, **fingerprints(models)},
        "rounding": rounding,
        "models": models,
        "input": mark._asdict(),
    }
    return json.loads(json.dumps(whole))  # tuples become lists, as they will when the file is read


def settings_path(output: Path) -> Path:
    return output.with_name(output.name + SETTINGS_END)


def read_settings(output: Path, error_type: type[Exception]) -> dict:
    """Reads what :func:`write_settings` wrote. Raises ``error_type`` if there is no such file."""
    path = settings_path(output)
    allowed = "a new file, or results of this command with their settings beside them"
    try:
        with open(open_itself(path, os.O_RDONLY), "rb") as file:
            whole = json.load(file)
        mark = whole["input"]
        fine = all(isinstance(whole[part], dict) for part in ("settings", "rounding", "models"))
        fine = fine and type(mark["prompts"]) is int and isinstance(mark["digest"], str)
    except FileNotFoundError:
        raise error_type(f"got {str(output)!r}, which has no {path.name!r} beside it, allowed: {allowed}") from None
    except OSError as error:
        raise error_type(f"got {str(path)!r} ({error.strerror}), allowed: {allowed}") from error
    except (ValueError, TypeError, KeyError, RecursionError):
        fine = False
    if not fine:
        raise error_type(f"got {str(path)!r}, which holds no settings of a job, allowed: {allowed}")
    return whole


def write_settings(output: Path, settings: dict) -> None:
    """Writes the whole file or nothing; it is on the disk when this returns. Raises OSError."""
    write_whole(settings_path(output), json.dumps(settings, indent=1) + "\n")


def fingerprints(paths: Mapping[str, str | None]) -> dict[str, str | None]:
    """The fingerprint of each folder or hub name, under its name. Raises OSError naming one that cannot be read."""
    return {name: None if path is None else _named(name, fingerprint, path) for name, path in paths.items()}


def fingerprint(path: str) -> str:
    """Identifies a model or tokenizer without reading all of its weights.

    For a folder it is a digest of its configuration and tokenizer files, and of the size, the header and 64 samples of
    4 KiB, evenly spread, of every safetensors file: training or quantising a model changes most of its bytes. For a
    GGUF file it is the same of the file. For a hub name it is the revision.
    """
    folder = Path(path).expanduser()
    if not folder.is_dir() and not folder.is_file():
        return _revision(path)
    digest = hashlib.blake2b(digest_size=16)
    for file in _files(folder):
        digest.update(f"{file.relative_to(folder)} {file.stat().st_size}\n".encode())
        for piece in _samples(file) if file.suffix.lower() in (".safetensors", ".gguf") else [file.read_bytes()]:
            digest.update(piece)
    return digest.hexdigest()


def read_vocab_size(name: str, path: str) -> int:
    """V of a model that need not be loaded. Raises OSError naming ``name``."""
    from ..models.load.loading import read_config

    config = read_config(name, path).get_text_config(decoder=True)
    if (size := getattr(config, "vocab_size", None)) is None:
        raise OSError(f"{name}: cannot read {path!r}: its configuration has no vocab_size")
    return size


def _named(name: str, read: Callable[[str], T], path: str) -> T:
    try:
        return read(path)
    except (OSError, ValueError, AttributeError) as error:
        raise OSError(f"{name}: cannot read {path!r}: {error}") from error


def _files(folder: Path) -> Iterator[Path]:
    """Those of a folder, or the one that is given instead."""
    if folder.is_file():
        yield folder
        return
    for file in sorted(folder.iterdir()):
        if file.suffix in (".json", ".jinja", ".txt", ".model", ".safetensors") and file.is_file():
            yield file


def _samples(file: Path) -> Iterator[bytes]:
    with file.open("rb") as opened:
        header = opened.read(8)
        size = int.from_bytes(header, "little") if file.suffix == ".safetensors" else GGUF_BEGIN
        yield opened.read(min(size, 2**27))
        begin = opened.tell()
        rest = file.stat().st_size - begin
        for i in range(SAMPLES):
            opened.seek(begin + (rest - SAMPLE_BYTES) * i // (SAMPLES - 1) if rest > SAMPLE_BYTES else begin)
            yield opened.read(SAMPLE_BYTES)


def _revision(name: str) -> str:
    from transformers import AutoConfig

    from ..models.load.location import Location

    with Location("path", name).reading():
        config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    return f"{name} {getattr(config, '_commit_hash', None)}"
