"""One line of a file of prompts: what it may hold, how it is checked, and what it means."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from specdec_kernels import SamplingParams

from ..checks import read_as, read_count, refuse
from ..loop.token_log_probs import AskedLogProbs, read_asked
from ..sampling.params import read_bias
from ..stopping import read_stop_strings

SAMPLING = ("temperature", *SamplingParams.FILTERS, *SamplingParams.PENALTIES)
_SEEDS = range(-(2**63), 2**63)


@dataclass(frozen=True)
class LineSettings:
    """What a line can set for itself, by the names of the library. The defaults come from the command line."""

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int = 0  # as a default it is the first prompt's, and prompt i has seed + i
    stop: tuple[str, ...] = ()
    min_new_tokens: int = 0
    logit_bias: Mapping[int, float] | None = None
    banned_tokens: tuple[int, ...] = ()
    log_probs: bool = False
    top_log_probs: int | None = None
    prompt_log_probs: int | None = None

    def asked(self) -> AskedLogProbs:
        """Its log-probabilities. Raises ValueError naming the key that is wrong."""
        return read_asked(self.log_probs, self.top_log_probs, self.prompt_log_probs)


KEYS = ("id", "prompt", *(field.name for field in dataclasses.fields(LineSettings)))


@dataclass(frozen=True)
class JobLine:
    id: str | int
    prompt: str
    settings: LineSettings  # the seed is its own
    params: SamplingParams


def check_defaults(defaults: LineSettings, vocab_size: int) -> None:
    """Raises ValueError naming a default that would be wrong on every line."""
    _check_seed(defaults.seed)
    read_bias([defaults.logit_bias], [defaults.banned_tokens], 1, vocab_size)


class LineReader:
    """Reads the lines of one file.

    Args:
        path: of the file. Lines of one that is called .jsonl are JSON, those of others are prompts as they stand.
        defaults: for what a line leaves open.
        vocab_size: V of the target: ids of ``logit_bias`` and ``banned_tokens`` are below it.
        keys: that a line may have.
        texts: n >= 1 texts are made of each prompt, with seeds side by side: by default prompt i has seed + i n.
    """

    def __init__(self, path: Path, defaults: LineSettings, vocab_size: int, keys: Sequence[str] = KEYS, texts: int = 1):
        self.is_json = path.suffix == ".jsonl"
        self._defaults, self._vocab_size, self._keys, self._texts = defaults, vocab_size, keys, texts

    def read(self, text: str, index: int) -> JobLine:
        """
        Args:
            text: a line without its end.
            index: of the prompt in its file, from 0: its id where it has none.

        Raises:
            ValueError: names the key, what was given and what is allowed.
        """
        given = _read_json(text) if self.is_json else {"prompt": text}
        for key in given:
            if key not in self._keys:
                refuse("keys", ascii(key), ", ".join(self._keys))
        return _read_line(given, index, self._defaults, self._vocab_size, self._texts)


def _read_line(given: dict, index: int, defaults: LineSettings, vocab_size: int, texts: int) -> JobLine:
    name, prompt = given.get("id", index), given.get("prompt")
    if isinstance(name, bool) or not isinstance(name, (str, int)):
        refuse("id", shown(name), "a string or an integer")
    if not isinstance(prompt, str):
        refuse("prompt", shown(prompt) if "prompt" in given else "none", "a text")
    try:
        prompt.encode()
    except UnicodeEncodeError:  # from a JSON escape; no tokenizer takes them
        refuse("prompt", shown(prompt), "text without lone surrogates")
    own = {key: value for key, value in given.items() if key not in ("id", "prompt")}
    if "stop" in own:
        own["stop"] = () if own["stop"] in (None, []) else read_as("stop", read_stop_strings, own["stop"])
    if own.get("logit_bias") is not None:
        own["logit_bias"] = _read_bias_ids(own["logit_bias"])
    if "banned_tokens" in own:
        if not isinstance(own["banned_tokens"], list):
            refuse("banned_tokens", shown(own["banned_tokens"]), "a list of ids")
        own["banned_tokens"] = tuple(own["banned_tokens"])
    own.setdefault("seed", defaults.seed + index * texts)
    s = dataclasses.replace(defaults, **own)
    _check_seed(s.seed)
    read_count("max_new_tokens", s.max_new_tokens)
    if read_count("min_new_tokens", s.min_new_tokens) > s.max_new_tokens:
        refuse("min_new_tokens", s.min_new_tokens, f"0 to max_new_tokens = {s.max_new_tokens}")
    s.asked()
    if "logit_bias" in own or "banned_tokens" in own:
        read_bias([s.logit_bias], [s.banned_tokens], 1, vocab_size)
    return JobLine(name, prompt, s, _read_params(s, own))


def _check_seed(seed: object) -> None:
    if isinstance(seed, bool) or not isinstance(seed, int) or seed not in _SEEDS:
        refuse("seed", shown(seed), "a signed 64-bit integer")


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
        refuse("logit_bias", shown(given), 'an object of ids and numbers, {"17": -2.5}')
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


def shown(value: object) -> str:
    shown = ascii(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."
