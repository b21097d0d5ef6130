"""The input of a job: a prompt a line, read as a stream: once to be checked, and once to be run."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from specdec_kernels import SamplingParams

from ..checks import read_as, read_count, refuse
from ..sampling.params import read_bias
from ..stopping import read_stop_strings

SAMPLING = ("temperature", *SamplingParams.FILTERS, *SamplingParams.PENALTIES)
_SEEDS = range(-(2**63), 2**63)


class InputError(ValueError):
    """Names the file, the line (from 1), the key, what was given and what is allowed."""


@dataclass(frozen=True)
class LineSettings:
    """What a line may say for itself, by the names of the library. The defaults come from the command line."""

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int = 0  # as a default: of the first prompt; prompt i has seed + i
    stop: tuple[str, ...] = ()
    min_new_tokens: int = 0
    logit_bias: Mapping[int, float] | None = None
    banned_tokens: tuple[int, ...] = ()


KEYS = ("id", "prompt", *(field.name for field in dataclasses.fields(LineSettings)))


@dataclass(frozen=True)
class JobLine:
    id: str | int
    prompt: str
    settings: LineSettings  # the seed is its own
    params: SamplingParams


class InputMark(NamedTuple):
    """The beginning of an input file: so many prompts, and a digest of the lines up to the last of them."""

    prompts: int
    digest: str


class JobFile:
    """A file of prompts: JSON lines (.jsonl), or text with a prompt a line. Blank lines do not count.

    It is opened once, so that a file that takes its place meanwhile changes nothing.

    Args:
        path: of a regular file, UTF-8.
        defaults: for what a line does not say.
        vocab_size: of the target: ids of ``logit_bias`` and ``banned_tokens`` are below it.

    Raises:
        InputError: it cannot be read.
    """

    def __init__(self, path: Path, defaults: LineSettings, vocab_size: int):
        self.path, self._defaults, self._vocab_size = path, defaults, vocab_size
        self.mark = InputMark(0, "")  # of what was checked
        try:
            if not path.is_file():  # a pipe cannot be read twice
                raise InputError(f"got {str(path)!r}, allowed: a regular file")
            # As Path.read_text has it: lines end at \n, \r\n or \r, not at form feeds.
            self._file = path.open(encoding="utf-8-sig")
        except OSError as error:
            raise InputError(f"got {str(path)!r} ({error.strerror}), allowed: a file that can be read") from error

    def close(self) -> None:
        self._file.close()

    def check(self, earlier: InputMark | None = None) -> set[str | int]:
        """Reads all lines, without models.

        Args:
            earlier: of the file with which the job began: lines may have been added since, not changed.

        Returns:
            The ids of all prompts.

        Raises:
            InputError: a line is not right, an id comes twice, there is no prompt, or ``earlier`` is of another file.
        """
        ids: set[str | int] = set()
        digest = self._new_digest()
        count = 0
        for count, (number, text) in enumerate(self._prompts(), 1):
            line = self._read(number, count - 1, text)
            if line.id in ids:
                first = next(n for i, (n, t) in enumerate(self._prompts()) if self._read(n, i, t).id == line.id)
                raise self._error(number, f"id: got {_shown(line.id)}, which line {first} has, allowed: every id once")
            ids.add(line.id)
            digest.update(text.encode() + b"\n")
            if earlier is not None and count == earlier.prompts and digest.hexdigest() != earlier.digest:
                raise self._other(earlier)
        if count == 0:
            raise InputError(f"got {str(self.path)!r} without a prompt, allowed: at least one line that is not empty")
        if earlier is not None and count < earlier.prompts:
            raise self._other(earlier)
        self.mark = InputMark(count, digest.hexdigest())
        return ids

    def lines(self) -> Iterator[JobLine]:
        """The lines that were checked. Raises InputError if the file is no longer the one that was."""
        digest = self._new_digest()
        for count, (number, text) in enumerate(self._prompts()):
            if count == self.mark.prompts:
                break
            digest.update(text.encode() + b"\n")
            yield self._read(number, count, text)
        if digest.hexdigest() != self.mark.digest:
            raise InputError(f"got {str(self.path)!r}, which changed while the job ran, allowed: a file that stays")

    def _prompts(self) -> Iterator[tuple[int, str]]:
        """Line numbers from 1, and lines without their ends."""
        self._file.seek(0)
        try:
            for number, line in enumerate(self._file, 1):
                if line.strip():
                    yield number, line.removesuffix("\n")
        except UnicodeDecodeError as error:
            where = f"line {_first_not_utf8(self.path)} of {str(self.path)!r}"
            raise InputError(f"got {where}, which is not UTF-8 ({error.reason}), allowed: UTF-8") from error
        except OSError as error:
            raise InputError(f"got {str(self.path)!r} ({error.strerror}), allowed: a file that can be read") from error

    def _new_digest(self):
        return hashlib.blake2b(b"jsonl" if self.path.suffix == ".jsonl" else b"text", digest_size=16)

    def _read(self, number: int, index: int, text: str) -> JobLine:
        try:
            given = _read_json(text) if self.path.suffix == ".jsonl" else {"prompt": text}
            return read_line(given, index, self._defaults, self._vocab_size)
        except ValueError as error:
            raise self._error(number, str(error)) from error

    def _error(self, number: int, what: str) -> InputError:
        return InputError(f"line {number} of {str(self.path)!r}: {what}")

    def _other(self, earlier: InputMark) -> InputError:
        return InputError(
            f"got {str(self.path)!r}, whose first {earlier.prompts} prompts are not those that the job began with, "
            "allowed: the same lines, and more after them; or another --output"
        )


def check_defaults(defaults: LineSettings, vocab_size: int) -> None:
    """Raises ValueError naming what no line could have."""
    _check_seed(defaults.seed)
    read_bias([defaults.logit_bias], [defaults.banned_tokens], 1, vocab_size)


def read_line(given: dict, index: int, defaults: LineSettings, vocab_size: int) -> JobLine:
    """
    Args:
        given: the line's keys and values.
        index: of the prompt in its file, from 0: its id where it has none, and what is added to the default seed.

    Raises:
        ValueError: names the key, what was given and what is allowed.
    """
    for key in given:
        if key not in KEYS:
            refuse("keys", ascii(key), ", ".join(KEYS))
    name, prompt = given.get("id", index), given.get("prompt")
    if isinstance(name, bool) or not isinstance(name, (str, int)):
        refuse("id", _shown(name), "a string or an integer")
    if not isinstance(prompt, str):
        refuse("prompt", _shown(prompt) if "prompt" in given else "none", "a text")
    try:
        prompt.encode()
    except UnicodeEncodeError:  # from a JSON escape; no tokenizer takes them
        refuse("prompt", _shown(prompt), "text without lone surrogates")
    own = {key: value for key, value in given.items() if key not in ("id", "prompt")}
    if "stop" in own:
        own["stop"] = () if own["stop"] in (None, []) else read_as("stop", read_stop_strings, own["stop"])
    if own.get("logit_bias") is not None:
        own["logit_bias"] = _read_bias_ids(own["logit_bias"])
    if "banned_tokens" in own:
        if not isinstance(own["banned_tokens"], list):
            refuse("banned_tokens", _shown(own["banned_tokens"]), "a list of ids")
        own["banned_tokens"] = tuple(own["banned_tokens"])
    own.setdefault("seed", defaults.seed + index)
    s = dataclasses.replace(defaults, **own)
    _check_seed(s.seed)
    read_count("max_new_tokens", s.max_new_tokens)
    if read_count("min_new_tokens", s.min_new_tokens) > s.max_new_tokens:
        refuse("min_new_tokens", s.min_new_tokens, f"0 to max_new_tokens = {s.max_new_tokens}")
    if "logit_bias" in own or "banned_tokens" in own:
        read_bias([s.logit_bias], [s.banned_tokens], 1, vocab_size)
    return JobLine(name, prompt, s, _read_params(s, own))


def _check_seed(seed: object) -> None:
    if isinstance(seed, bool) or not isinstance(seed, int) or seed not in _SEEDS:
        refuse("seed", _shown(seed), "a signed 64-bit integer")


def _read_params(s: LineSettings, own: dict) -> SamplingParams:
    sampling = {name: getattr(s, name) for name in SAMPLING}
    if sampling["temperature"] == 0:
        for name in SamplingParams.FILTERS:
            if own.get(name) not in (None, SamplingParams.neutral(name)):
                refuse(name, f"{own[name]} with temperature 0", "a temperature > 0: greedy text has no filters")
            sampling[name] = own.get(name)  # those of the defaults are for lines that sample
    return SamplingParams(**sampling)


def _read_bias_ids(given: object) -> dict[int, object]:
    """JSON has no keys but strings."""
    if not isinstance(given, dict):
        refuse("logit_bias", _shown(given), 'an object of ids and numbers, {"17": -2.5}')
    bias = {}
    for key, value in given.items():
        if not (key.isascii() and key.isdigit() and len(key) < 20 and str(int(key)) == key):
            refuse("logit_bias", f"id {ascii(key)}", "ids as strings of digits")
        bias[int(key)] = value
    return bias


def _read_json(text: str) -> dict:
    """A line's object; a string alone is a prompt."""
    try:
        given = _JSON.decode(text)
    except _Twice as error:
        refuse("keys", f"{ascii(error.args[0])} twice", "every key once")
    except (ValueError, RecursionError):  # not only JSONDecodeError: also numbers and nesting beyond python's
        given = None
    if isinstance(given, str):
        given = {"prompt": given}
    if not isinstance(given, dict):
        raise ValueError(f'got {ascii(text[:60])}, allowed: a JSON string or {{"prompt": "..."}}')
    return given


class _Twice(Exception):
    pass


def _each_key_once(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """json.loads would take the last one and say nothing."""
    whole = dict(pairs)
    if len(whole) < len(pairs):
        keys = [key for key, _ in pairs]
        raise _Twice(next(key for i, key in enumerate(keys) if key in keys[:i]))
    return whole


_JSON = json.JSONDecoder(object_pairs_hook=_each_key_once)


def _shown(value: object) -> str:
    shown = ascii(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."


def _first_not_utf8(path: Path) -> int:
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                line.decode()
            except UnicodeDecodeError:
                return number
    return 0  # it changed meanwhile
