"""The ways to continue prompts that ``compare`` and ``bench`` measure: specdec's, and transformers' plain and assisted
one."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Protocol

import torch
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from specdec_kernels import Rule, SamplingParams

from ..decoder import SpeculativeDecoder
from ..drafters.protocol import Drafter
from ..loop.draft_length import AdaptiveDrafts
from ..loop.sequence import Output
from ..prompts import read_eos, read_pad
from ..stats import Stats

Prompt = Sequence[int]
OURS = "specdec"  # with which the names of our methods begin
LEARNING_RUNS = 8  # at most; a text of 64 tokens or two has steps enough
LOOKUP_DEFAULT = 10  # prompt_lookup_num_tokens where the caller gives none, as in the original (Saxena 2023)


@dataclass(frozen=True)
class CompareSettings:
    max_new_tokens: int = 64
    temperature: float = 0.0
    seed: int = 0
    repeats: int = 5
    num_drafts: int | AdaptiveDrafts | None = None  # None: the fastest of several, as for transformers
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    rule: str | None = None  # for specdec, as its decoder takes it; transformers has only one
    tree: int | None = None  # nodes: trees of so many are measured beside specdec's chains

    def __post_init__(self) -> None:
        if self.rule is not None:
            Rule(self.rule)  # refuses others, lossy ones among them: greedy texts are compared

    def params(self) -> SamplingParams:
        return SamplingParams(self.temperature, self.top_k, self.top_p, self.min_p, self.repetition_penalty)


class Arrival(NamedTuple):
    """New tokens of one prompt, as a reader of the stream gets them: those of one step together."""

    seconds: float  # since the call
    tokens: int


@dataclass(frozen=True)
class Run:
    """A batch of prompts continued by one method."""

    texts: list[list[int]]  # the new tokens of each prompt
    seconds: float  # from the call until the tokens are on the host; includes the forward over the prompts
    steps: int  # target forwards that decided tokens, of each prompt
    drafted: int | None  # None where the method does not say
    accepted: int
    tested: int | None  # None where the method does not say
    arrivals: list[list[Arrival]] = field(default_factory=list)  # of each prompt
    stats: list[Stats] = field(default_factory=list)  # of each prompt; none where the method does not say
    seconds_by_part: dict[str, float] = field(default_factory=dict)  # as ``Stats`` has them; none likewise
    draft_forwards: int | None = None
    trouble: str | None = None  # why the drafter was dropped; None: it was not

    @property
    def emitted(self) -> int:
        return sum(map(len, self.texts))

    @property
    def own_seconds(self) -> float | None:
        """Outside the models' forwards; None where the method does not say."""
        parts = self.seconds_by_part
        return parts["kernels"] + parts["loop"] if parts else None


class Contender(Protocol):
    name: str
    setting: dict[str, int | str]  # what the method was told about the number of drafts

    def run(self, prompts: Sequence[Prompt], seed: int) -> Run:
        """Continues the prompts in one batch; prompt i of it has the seed ``seed`` + i, where seeds are a prompt's."""

    def shortened(self, most: int) -> Contender:
        """The same with at most so many new tokens."""


class SpecdecMethod:
    """Chains of ``num_drafts``, or trees of ``tree`` nodes with paths of up to ``num_drafts``."""

    def __init__(
        self,
        target: PreTrainedModel,
        draft: PreTrainedModel | Drafter | None,
        num_drafts: int | AdaptiveDrafts,
        settings: CompareSettings,
        tree: int | None = None,
    ):
        self.name = OURS if tree is None else f"{OURS}-tree"
        self.setting: dict[str, int | str] = {
            "num_drafts": "auto" if isinstance(num_drafts, AdaptiveDrafts) else num_drafts
        }
        if tree is not None:
            self.setting["tree"] = tree
        self.decoder = SpeculativeDecoder(target, draft, num_drafts, tree=tree)
        self._settings, self._eos = settings, sorted(read_eos(None, target))

    def run(self, prompts: Sequence[Prompt], seed: int) -> Run:
        s, seeds = self._settings, range(seed, seed + len(prompts))
        arrivals: list[list[Arrival]] = [[] for _ in prompts]
        start = time.perf_counter()

        def arrived(output: Output) -> None:
            arrivals[output.number].append(Arrival(time.perf_counter() - start, len(output.tokens)))

        result = self.decoder.generate(
            prompts, None, s.max_new_tokens, s.params(), [*seeds], self._eos, on_emit=arrived, rule=s.rule
        )
        seconds, stats = time.perf_counter() - start, result.stats
        return Run(
            result.tokens,
            seconds,
            *(stats.steps, stats.drafted, stats.accepted, stats.tested),
            arrivals,
            result.sequence_stats,
            stats.seconds,
            stats.draft_forwards,
            result.drafter_error,
        )

    def settle(self, batches: Sequence[Sequence[Prompt]], seed: int) -> None:
        """Where K adapts, decodes until the times of steps are known, as they are in a process that has decoded for a
        while."""
        for i in range(LEARNING_RUNS if isinstance(self.decoder.num_drafts, AdaptiveDrafts) else 0):
            batch = batches[i % len(batches)]
            if self.decoder.costs_of(len(batch)) is not None:
                return
            self.run(batch, seed + i)

    def shortened(self, most: int) -> SpecdecMethod:
        other = copy.copy(self)
        other._settings = replace(self._settings, max_new_tokens=min(most, self._settings.max_new_tokens))
        return other


def assists(target: PreTrainedModel, tell: Callable[[str], object]) -> bool:
    """Whether transformers has assisted generation for ``target``; tells it where it has not."""
    if target._is_stateful:
        tell(f"transformers has no assisted generation for model type {target.config.model_type!r}: it is left out")
    return not target._is_stateful


class TransformersMethod:
    """transformers' ``generate``, with ``draft`` as its assistant, with its own prompt lookup, or alone.

    Of the models' generation configurations only the end-of-sequence and padding tokens are used. Assisted generation
    reports no counts, so they are derived from forwards: each forward of the target decides one token itself, and each
    forward of the draft makes one draft. How many tokens prompt lookup drafted is not known. An accepted
    end-of-sequence token counts as one of the target here.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        draft: PreTrainedModel | Literal["lookup"] | None,
        settings: CompareSettings,
        num_assistant_tokens: int | None = None,
    ):
        self._target, self._draft = target, None if draft == "lookup" else draft
        self._arguments: dict[str, Any] = {} if self._draft is None else {"assistant_model": draft}
        if draft == "lookup":
            self._arguments = {"prompt_lookup_num_tokens": num_assistant_tokens or LOOKUP_DEFAULT}
        self.name = "plain" if draft is None else "assisted"
        self.setting: dict[str, int | str] = (
            {} if draft is None else {"num_assistant_tokens": num_assistant_tokens or "default"}
        )
        eos = read_eos(None, target)
        self._eos, self._pad = eos, read_pad(None, eos, target)
        filters = {
            "temperature": settings.temperature,
            "top_k": settings.top_k or 0,
            "top_p": 1.0 if settings.top_p is None else settings.top_p,
            "min_p": settings.min_p or None,
        }
        self._config = GenerationConfig(
            max_new_tokens=settings.max_new_tokens,
            do_sample=settings.temperature > 0,
            eos_token_id=sorted(eos) or None,
            pad_token_id=self._pad,
            repetition_penalty=float(settings.repetition_penalty or 1.0),
            **(filters if settings.temperature > 0 else {}),
        )
        self._assistant_config = assistant_config(num_assistant_tokens)

    def run(self, prompts: Sequence[Prompt], seed: int, processors: Sequence[LogitsProcessor] = ()) -> Run:
        """``processors`` run before those that the settings ask for. Assisted generation takes one prompt at a time."""
        added = {"logits_processor": LogitsProcessorList(processors), **self._arguments}
        with self._configured(), counted_forwards(self._target, self._draft) as forwards:
            torch.manual_seed(seed)
            stream = _TokenTimes(len(prompts))
            width = max(map(len, prompts))
            rows = [[*[self._pad] * (width - len(prompt)), *prompt] for prompt in prompts]
            input_ids = torch.tensor(rows, device=self._target.device)
            mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=input_ids.device)
            model: Any = self._target
            output = model.generate(input_ids, attention_mask=mask, streamer=stream, **added)
            texts = [self._to_its_end(row) for row in output[:, width:].tolist()]
            seconds = time.perf_counter() - stream.start
        emitted = sum(map(len, texts))
        steps, drafted = forwards
        if not self._arguments:  # each row decides a token in each forward, until it has ended
            steps = emitted
        known = "prompt_lookup_num_tokens" not in self._arguments
        arrivals = [_up_to(len(text), stream.arrivals) for text in texts]
        return Run(texts, seconds, steps, drafted if known else None, emitted - steps, None, arrivals)

    def _to_its_end(self, row: list[int]) -> list[int]:
        """Without the padding of a row that ended before others."""
        end = next((i for i, token in enumerate(row) if token in self._eos), len(row))
        return row[: end + 1]

    def shortened(self, most: int) -> TransformersMethod:
        other = copy.copy(self)
        other._config = copy.deepcopy(self._config)
        other._config.max_new_tokens = min(most, self._config.max_new_tokens)
        return other

    @contextmanager
    def _configured(self) -> Iterator[None]:
        """Replaces the models' own configurations, from which ``generate`` takes whatever its arguments leave open."""
        configs = ((self._target, self._config), (self._draft, self._assistant_config))
        saved = [(model, model.generation_config, new) for model, new in configs if model is not None]
        try:
            for model, _, new in saved:
                model.generation_config = new
            yield
        finally:
            for model, old, _ in saved:
                model.generation_config = old


class _TokenTimes(BaseStreamer):
    """Notes when ``generate`` hands over tokens, which it does for all rows at once."""

    def __init__(self, rows: int):
        self._rows, self._prompt_came, self.arrivals = rows, False, list[Arrival]()
        self.start = time.perf_counter()

    def put(self, value: torch.Tensor) -> None:
        if self._prompt_came:
            self.arrivals.append(Arrival(time.perf_counter() - self.start, value.numel() // self._rows))
        self._prompt_came = True

    def end(self) -> None: ...


def _up_to(tokens: int, arrivals: Sequence[Arrival]) -> list[Arrival]:
    """Those of the first ``tokens`` tokens: a row that has ended goes on as padding while others have not."""
    found, left = [], tokens
    for arrival in arrivals:
        if left > 0:
            found.append(Arrival(arrival.seconds, min(arrival.tokens, left)))
        left -= arrival.tokens
    return found


def assistant_config(num_assistant_tokens: int | None) -> GenerationConfig:
    """For the draft of assisted generation: a constant number of drafts a step, or with None transformers' default: up
    to 20, fewer where the draft is not confident."""
    if num_assistant_tokens is None:
        return GenerationConfig()
    return GenerationConfig(
        num_assistant_tokens=num_assistant_tokens,
        num_assistant_tokens_schedule="constant",
        assistant_confidence_threshold=0.0,
    )


@contextmanager
def counted_forwards(*models: PreTrainedModel | None) -> Iterator[list[int]]:
    """Counts how often each model is called inside the block. It adds microseconds to calls that take milliseconds."""
    counts = [0] * len(models)

    def count(i: int) -> Callable[..., None]:
        def hook(*_: object) -> None:
            counts[i] += 1

        return hook

    handles = [m.register_forward_hook(count(i)) for i, m in enumerate(models) if m is not None]
    try:
        yield counts
    finally:
        for handle in handles:
            handle.remove()
