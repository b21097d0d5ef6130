"""Metrics for Prometheus: vLLM's names where it has them, so its dashboards and benchmarks work; ours elsewhere."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from ...loop.sequence import Output, SequenceState
from ...result import Producer
from .lanes import Lane, Lanes

# vLLM's metrics have exactly these; its ``engine`` is the number of a lane here, in the order in which they started.
_LABELS = ("model_name", "engine")
_OURS = (*_LABELS, "drafter", "rule")

_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 10)
_FIRST_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
_REQUEST_SECONDS = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
_TOKENS = tuple(mantissa * 10**power for power in range(5) for mantissa in (1, 2, 5))

_GAUGES = (  # of a lane's Usage
    ("vllm:num_requests_running", "Requests that have a row.", lambda u: u.live + u.prefilling),
    ("vllm:num_requests_waiting", "Requests that wait for a row.", lambda u: u.waiting),
    ("vllm:kv_cache_usage_perc", "Reserved part of the cache.", lambda u: u.cache_tokens_used / u.cache_tokens),
    ("specdec:rows", "Rows of the batch.", lambda u: u.rows),
    ("specdec:rows_decoding", "Rows that decode.", lambda u: u.live),
    ("specdec:rows_prefilling", "Rows whose prompt is being read.", lambda u: u.prefilling),
    ("specdec:cache_tokens", "Tokens that requests may reserve at one time.", lambda u: u.cache_tokens),
    ("specdec:cache_tokens_reserved", "Tokens that requests have reserved.", lambda u: u.cache_tokens_used),
    ("specdec:busy_ratio", "Mean part of the rows that decoded, over all steps.", lambda u: u.busy),
    ("specdec:num_drafts", "K of the last step: the most tokens that a row drafted.", lambda u: u.num_drafts),
)  # fmt: skip
_COUNTERS = (  # of LaneMetrics
    ("vllm:spec_decode_num_drafts", "Steps in which a sequence had drafts.", lambda lane: lane.steps_with_drafts),
    ("vllm:spec_decode_num_draft_tokens", "Drafted tokens.", lambda lane: lane.drafted),
    ("vllm:spec_decode_num_accepted_tokens", "Accepted drafts.", lambda lane: sum(lane.accepted_by_position)),
    ("vllm:prompt_tokens", "Tokens of prompts that were read.", lambda lane: lane.prompt_tokens),
    ("vllm:generation_tokens", "Generated tokens.", lambda lane: lane.generated),
    ("vllm:prefix_cache_queries", "Tokens of prompts of which rows may hold a beginning.", lambda lane: lane.looked_up),
    ("vllm:prefix_cache_hits", "Those of them that were taken over, and not read.", lambda lane: lane.reused),
)
_BY_POSITION = ("vllm:spec_decode_num_accepted_tokens_per_pos", "Accepted drafts by their place, from 0.")
_ANSWERS = ("specdec:answers", "Answers by route and status of HTTP; route none: other paths, and refused connections.")
_OVER_RATE = ("specdec:requests_over_rate", "Requests beyond --requests-per-minute.")
NO_ROUTE = "none"
_ENDED = ("vllm:request_success", "Texts that ended, by reason.")
_BETWEEN, _BETWEEN_BEFORE = "vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"  # an older name


class Metrics(Collector):
    """All metrics of a server, in a registry of their own.

    Args:
        model: its name, for labels.
        lanes: whose load is read when somebody asks for it.

    Attributes:
        over_rate: requests that were refused because their key had sent too many.
    """

    def __init__(self, model: str, lanes: Lanes):
        self._model, self._lanes = model, lanes
        self._registry = registry = CollectorRegistry()
        self._of_lanes: dict[tuple[str, str], LaneMetrics] = {}
        self._answers: Counter[tuple[str, int]] = Counter()
        self.over_rate = 0

        def histogram(name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(name, what, _LABELS, registry=registry, buckets=buckets)

        self.first = histogram("vllm:time_to_first_token_seconds", "Until the first token.", _FIRST_SECONDS)
        between = "Between two deliveries to a text; the tokens of a step come together."
        self.between = histogram(_BETWEEN, between, _TOKEN_SECONDS)
        mean = "Of a text: seconds a token, after the first."
        self.each_token = histogram("vllm:request_time_per_output_token_seconds", mean, _TOKEN_SECONDS)
        self.whole = histogram("vllm:e2e_request_latency_seconds", "From submission to the end.", _REQUEST_SECONDS)
        self.prompt_length = histogram("vllm:request_prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self.length = histogram("vllm:request_generation_tokens", "Generated tokens of a text.", _TOKENS)
        ProcessCollector(registry=registry)
        registry.register(self)

    def begin(self, lane: Lane, prompt_tokens: int) -> RequestMetrics:
        """Begins to measure a request that was just submitted to ``lane``."""
        return RequestMetrics(self._of(lane), prompt_tokens)

    def answered(self, route: str, status: int) -> None:
        """Counts an answer.

        Args:
            route: its template, of which there are few, not its path; or NO_ROUTE.
            status: of HTTP.
        """
        self._answers[route, status] += 1

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """Returns all metrics in the format that an ``Accept`` header asks for, and its content type."""
        for lane in self._lanes.running:
            self._of(lane)  # so that its counters are there, at 0, before its first request
        encode, content_type = choose_encoder(accept)
        return encode(_WithoutTimes(self._registry)), content_type

    def collect(self) -> Iterator[Metric]:
        """The counts and the load of every lane, for the registry."""
        yield from self._counters()
        loads = [(self._of(lane).labels, lane.engine) for lane in self._lanes.running]
        usages = [(labels, engine.usage) for labels, engine in loads]
        for name, what, value in _GAUGES:
            gauge = GaugeMetricFamily(name, what, labels=_LABELS if name.startswith("vllm:") else _OURS)
            for labels, usage in usages:
                gauge.add_metric(labels[: len(gauge._labelnames)], value(usage))
            yield gauge
        steps = CounterMetricFamily("specdec:steps", "Decoding steps of the batch.", labels=_OURS)
        dropped = GaugeMetricFamily("specdec:drafter_dropped", "1: the drafter failed, and is not used.", labels=_OURS)
        for labels, usage in usages:
            steps.add_metric(labels, usage.steps)
        for labels, engine in loads:
            dropped.add_metric(labels, engine.drafter_error is not None)
        yield from (steps, dropped)

    def _counters(self) -> Iterator[Metric]:
        lanes = self._of_lanes.values()
        for name, what, value in _COUNTERS:
            labels = _LABELS if name.startswith("vllm:") else _OURS
            family = CounterMetricFamily(name, what, labels=labels)
            for lane in lanes:
                family.add_metric(lane.labels[: len(labels)], value(lane))
            yield family
        by_position = CounterMetricFamily(*_BY_POSITION, labels=(*_LABELS, "position"))
        ended = CounterMetricFamily(*_ENDED, labels=(*_LABELS, "finished_reason"))
        for lane in lanes:
            of = lane.labels[: len(_LABELS)]
            for position, count in enumerate(lane.accepted_by_position):
                by_position.add_metric((*of, str(position)), count)
            for reason, count in lane.texts_ended.items():
                ended.add_metric((*of, reason), count)
        yield from (by_position, ended)
        answers = CounterMetricFamily(*_ANSWERS, labels=("model_name", "route", "status"))
        for (route, status), count in sorted(self._answers.items()):
            answers.add_metric((self._model, route, str(status)), count)
        over_rate = CounterMetricFamily(*_OVER_RATE, labels=("model_name",))
        over_rate.add_metric((self._model,), self.over_rate)
        yield from (answers, over_rate)
        (between,) = self.between.collect()
        before = Metric(_BETWEEN_BEFORE, between.documentation, between.type)
        before.samples = [s._replace(name=s.name.replace(_BETWEEN, _BETWEEN_BEFORE)) for s in between.samples]
        yield before

    def describe(self) -> list[Metric]:
        return []  # nothing is read before somebody asks

    def _of(self, lane: Lane) -> LaneMetrics:
        key = (lane.drafter, lane.rule)
        if key not in self._of_lanes:
            labels = (self._model, str(len(self._of_lanes)), *key)
            self._of_lanes[key] = LaneMetrics(self, labels, lane.most_drafts)
        return self._of_lanes[key]


class LaneMetrics:
    """The metrics of one lane's requests, with its labels. Counts are plain numbers, since only the server's event loop
    counts, and that with every step of every text."""

    def __init__(self, all: Metrics, labels: tuple[str, str, str, str], most_drafts: int):
        self.labels, of = labels, labels[: len(_LABELS)]
        self.steps_with_drafts = self.drafted = self.prompt_tokens = self.generated = 0
        self.looked_up = self.reused = 0
        self.accepted_by_position = [0] * most_drafts
        self.texts_ended = dict.fromkeys(("stop", "length", "abort", "error"), 0)
        self.first, self.between = all.first.labels(*of), all.between.labels(*of)
        self.each_token, self.whole = all.each_token.labels(*of), all.whole.labels(*of)
        self.prompt_length, self.length = all.prompt_length.labels(*of), all.length.labels(*of)


class RequestMetrics:
    """What is measured of one text, from its submission on."""

    def __init__(self, lane: LaneMetrics, prompt_tokens: int):
        self._lane, self._prompt_tokens = lane, prompt_tokens
        self._begun = self._first = self._last = time.perf_counter()
        self._tokens = self._steps = self._drafted = 0  # steps: those with drafts
        self._over = False

    def delivered(self, steps: Sequence[Output]) -> None:
        """One step or more added tokens, and they came together."""
        now, lane = time.perf_counter(), self._lane
        if self._tokens == 0:
            self._first = now
            lane.first.observe(now - self._begun)
            lane.prompt_tokens += self._prompt_tokens
            if (reused := steps[0].sequence.reused) is not None:
                lane.looked_up += self._prompt_tokens
                lane.reused += reused
        else:
            lane.between.observe(now - self._last)
        self._last = now
        for step in steps:
            lane.generated += len(step.tokens)
            self._tokens += len(step.tokens)
            if step.drafted:
                self._count_drafts(1, step.drafted)
                for position in range(step.produced_by.count(Producer.ACCEPTED)):
                    lane.accepted_by_position[position] += 1

    def ended(self, text: SequenceState, reason: str) -> None:
        """It has ended; ``reason``: stop, length, error or cancelled."""
        stats = text.stats  # with the drafts of a step that failed, and so emitted nothing
        self._count_drafts(stats.steps - stats.steps_by_drafts[0] - self._steps, stats.drafted - self._drafted)
        if self._tokens == 0 and text.prompt_log_probs is not None:  # only its prompt was asked for
            self._lane.prompt_tokens += len(text.prompt_log_probs)
        self._end("abort" if reason == "cancelled" else reason)  # vLLM's word

    def abandoned(self) -> None:
        """Nobody reads it any more. May be called again."""
        if not self._over:
            self._end("abort")

    def _count_drafts(self, steps: int, drafted: int) -> None:
        self._lane.steps_with_drafts += steps
        self._lane.drafted += drafted
        self._steps, self._drafted = self._steps + steps, self._drafted + drafted

    def _end(self, reason: str) -> None:
        lane, self._over = self._lane, True
        lane.texts_ended[reason] += 1
        lane.whole.observe(time.perf_counter() - self._begun)
        lane.prompt_length.observe(self._prompt_tokens)
        lane.length.observe(self._tokens)
        if self._tokens > 1:
            lane.each_token.observe((self._last - self._first) / (self._tokens - 1))


class _WithoutTimes(Collector):
    """A registry without the times at which series began: vLLM's benchmark adds up all lines with a counter's name, and
    would take such a time for a count."""

    def __init__(self, registry: CollectorRegistry):
        self._registry = registry

    def collect(self) -> Iterator[Metric]:
        for family in self._registry.collect():
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family
