"""One line of a file of prompts: what it may hold, how it is checked, and what it means."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from specdec_kernels import SamplingParams

from ..chat_template import chat_text, chat_tokens
from ..checks import read_as, refuse, shown
from ..loop.request import Request
from ..sampling.grammar import check_source
from ..sampling.grammar_source import GrammarSource
from ..sampling.schema_checks import Written
from ..stopping import read_stop_strings

SAMPLING = ("temperature", *SamplingParams.FILTERS, *SamplingParams.PENALTIES)
GRAMMARS = ("json_schema", "regex")
LOG_PROBS = ("log_probs", "top_log_probs", "prompt_log_probs")
STANDARD_INPUT = Path("-")


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
    json_schema: str | None = None
    regex: str | None = None

    @property
    def grammar(self) -> GrammarSource | None:
        """What the text has to be. Raises ValueError naming the key that is wrong."""
        return GrammarSource.of_settings(self.json_schema, self.regex)

    @property
    def asked(self) -> tuple[bool, int | None, int | None]:
        """Which log-probabilities."""
        return self.log_probs, self.top_log_probs, self.prompt_log_probs

    @property
    def params(self) -> SamplingParams:
        """Greedy text has no filters: those of the defaults are for lines that sample."""
        off = SamplingParams.FILTERS if self.temperature == 0 else ()
        given: dict[str, Any] = {name: None if name in off else getattr(self, name) for name in SAMPLING}
        return SamplingParams(**given)

    @property
    def request(self) -> Request:
        """What is asked of the text, but for the prompt, ``stop`` and ``grammar``, which need the tokenizer."""
        names = ("max_new_tokens", "seed", "logit_bias", "banned_tokens", "min_new_tokens")
        given: dict[str, Any] = {name: getattr(self, name) for name in (*names, *LOG_PROBS)}
        return Request((), params=self.params, **given)

    def check(self, vocab_size: int | None) -> None:
        """Checks the request, and what its grammar is made of.

        Args:
            vocab_size: V of the target; None: ids are not checked.

        Raises:
            ValueError: names the key, what was given and what is allowed.
        """
        source = self.grammar
        self.request.check(vocab_size, has_grammar=source is not None)
        if source is not None:
            check_source(source, source.kind)


KEYS = ("id", "prompt", "messages", *(field.name for field in dataclasses.fields(LineSettings)))


@dataclass(frozen=True)
class Prompt:
    id: str | int
    index: int  # of the prompt in its file, from 0
    prompt: str  # the text to continue; of messages, what the chat template makes of them
    chat: bool = False  # whether it was given as messages

    def tokens(self, tokenizer: PreTrainedTokenizerBase) -> list[int]:
        return chat_tokens(tokenizer, self.prompt) if self.chat else tokenizer(self.prompt).input_ids


@dataclass(frozen=True, kw_only=True)
class JobLine(Prompt):
    settings: LineSettings  # of this line: the seed is that of its text


def check_defaults(defaults: LineSettings, vocab_size: int | None = None) -> None:
    """Raises ValueError naming a default that would be wrong on every line. ``min_new_tokens`` may be more
    than ``max_new_tokens``, of which a line may have its own."""
    most = max(defaults.max_new_tokens, defaults.min_new_tokens)
    dataclasses.replace(defaults, max_new_tokens=most).check(vocab_size)


class LineReader:
    """Reads the lines of one file.

    Args:
        path: of the file. Lines of one that is called .jsonl, and of "-", are JSON, those of others are prompts as they
            stand.
        defaults: for what a line leaves open.
        vocab_size: V of the target: ids of ``logit_bias`` and ``banned_tokens`` are below it.
        texts: n >= 1 texts are made of each prompt, with seeds side by side: by default prompt i has seed + i n.
        tokenizer: returns that of the target. It is called for lines with messages, which are refused without it.
    """

    def __init__(
        self,
        path: Path,
        defaults: LineSettings,
        vocab_size: int,
        texts: int = 1,
        tokenizer: Callable[[], PreTrainedTokenizerBase] | None = None,
    ):
        self.path, self.is_json = path, path.suffix == ".jsonl" or path == STANDARD_INPUT
        self._defaults, self._vocab_size, self._texts, self._tokenizer = defaults, vocab_size, texts, tokenizer

    def read(self, text: str, index: int) -> JobLine:
        """
        Args:
            text: a line without its end.
            index: of the prompt in its file, from 0: its id where it has none.

        Raises:
            ValueError: names the key, what was given and what is allowed.
        """
        return self.read_given(read_json(text) if self.is_json else {"prompt": text}, index)

    def read_given(self, given: dict, index: int) -> JobLine:
        """As :meth:`read`, of what the line's JSON holds."""
        for key in given:
            if key not in KEYS:
                refuse("keys", shown(key), ", ".join(KEYS))
        prompt = self.read_prompt(given, index)
        settings = _read_settings(given, index, self._defaults, self._texts)
        settings.check(self._vocab_size)
        return JobLine(**vars(prompt), settings=settings)

    def read_prompt(self, given: dict, index: int) -> Prompt:
        """The part of :meth:`read_given` that is about the prompt."""
        return Prompt(read_id("id", given, index), index, self._read_text(given), "messages" in given)

    def _read_text(self, given: dict) -> str:
        if "messages" in given:
            if "prompt" in given:
                refuse("prompt / messages", "both", "one of the two")
            if self._tokenizer is None:
                refuse("messages", "messages where no tokenizer is known", "a prompt, as text")
            return chat_text(self._tokenizer(), given["messages"])
        if "prompt" not in given:
            refuse("prompt", "none", "a text")
        return read_text("prompt", given["prompt"])


def read_id(key: str, given: dict, index: int) -> str | int:
    name = given.get(key, index)
    if isinstance(name, bool) or not isinstance(name, (str, int)):
        refuse(key, shown(name), "a string or an integer")
    return name


def read_text(key: str, value: object) -> str:
    if not isinstance(value, str):
        refuse(key, shown(value), "a text")
    try:
        value.encode()
    except UnicodeEncodeError:  # from a JSON escape; no tokenizer takes them
        refuse(key, shown(value), "text without lone surrogates")
    return value


def _read_settings(given: dict, index: int, defaults: LineSettings, texts: int) -> LineSettings:
    """What JSON writes in another way than the library is read here; ``LineSettings.check`` is for the rest."""
    keys = {key: value for key, value in given.items() if key not in ("id", "prompt", "messages")}
    if "stop" in keys:
        keys["stop"] = () if keys["stop"] in (None, []) else read_as("stop", read_stop_strings, keys["stop"])
    if keys.get("logit_bias") is not None:
        keys["logit_bias"] = _read_bias_ids(keys["logit_bias"])
    if keys.get("json_schema") is not None:
        keys["json_schema"] = GrammarSource.json_schema(keys["json_schema"], "json_schema").text
    settings = dataclasses.replace(defaults, **{"seed": defaults.seed + index * texts, **keys})
    for name in SamplingParams.FILTERS if settings.temperature == 0 else ():
        if keys.get(name) not in (None, SamplingParams.neutral(name)):
            refuse(name, f"{keys[name]} with temperature 0", "a temperature > 0: greedy text has no filters")
    return settings


def _read_bias_ids(given: object) -> dict[int, object]:
    """JSON has no keys but strings."""
    if not isinstance(given, dict):
        refuse("logit_bias", shown(given), 'an object of ids and numbers, {"17": -2.5}')
    bias = {}
    for key, value in given.items():
        if not (key.isascii() and key.isdigit() and len(key) < 20 and str(int(key)) == key):
            refuse("logit_bias", f"id {shown(key)}", "ids as strings of digits")
        bias[int(key)] = value
    return bias


def read_json(text: str) -> dict:
    """A line's object; a string alone is a prompt. Raises ValueError."""
    try:
        given = _JSON.decode(text)
    except _Twice as error:
        refuse("keys", f"{shown(error.args[0])} twice", "every key once")
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
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _Twice(key)
            seen.add(key)
    return whole


_JSON = json.JSONDecoder(object_pairs_hook=_each_key_once, parse_float=Written)  # digits count in schemas
