"""Speculative decoding: the draft proposes K tokens, the target scores them in one forward, one kernel decides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile

import torch
from transformers import PreTrainedModel

from specdec_kernels import SamplingParams, Status, speculative_step
from specdec_kernels.types import TARGET_FAULTS
from specdec_kernels.validation import temperature_of

from .cache import StaticKVCache, visible_slots
from .compatibility import cached_model
from .drafters import Drafter, Drafts, DraftSession, Generation, Step
from .drafters.model import ModelDrafter
from .forward import CachedModel
from .prompts import TokenIds, check_room, join, read_count, read_eos, read_pad, read_prompts, read_seeds
from .result import Emission, GenerationResult, Producer
from .stats import Stats, Stopwatch

_TARGET_FAULTS = int(TARGET_FAULTS)  # plain: arithmetic on flags is slow


class SpeculativeDecoder:
    """Decodes from ``target`` exactly as it would alone, several tokens a forward.

    Args:
        target: a decoder-only transformers causal LM in evaluation mode.
        draft: a smaller one with the same vocabulary, a :class:`~specdec.drafters.Drafter`, or None with
            ``num_drafts=0``.
        num_drafts: K, drafted tokens a step, >= 0. With 0 the same loop decodes plainly.
        backend: of the kernels, as in ``specdec_kernels``: "auto", "reference", "cpu" or "triton".

    Raises:
        ValueError: names the argument, what was given and what is allowed; a model that the loop cannot drive
            is refused by the name of its type (``specdec.compatibility``).
    """

    def __init__(
        self,
        target: PreTrainedModel,
        draft: PreTrainedModel | Drafter | None,
        num_drafts: int = 4,
        backend: str = "auto",
    ):
        self.num_drafts = read_count("num_drafts", num_drafts)
        self.backend = backend
        self.target = cached_model(target, "target")
        self._max_lengths = {"target": self.target.max_length}
        if draft is None:
            if num_drafts > 0:
                raise ValueError(f"draft: got None with num_drafts={num_drafts}, allowed: None with num_drafts=0")
            self.drafter = None
        elif isinstance(draft, Drafter):
            self.drafter = draft
        else:
            model = cached_model(draft, "draft")
            if model.vocab_size != self.target.vocab_size:
                raise ValueError(
                    f"draft: its vocabulary has {model.vocab_size} tokens, "
                    f"allowed: {self.target.vocab_size}, the target's"
                )
            if model.device != self.target.device:
                raise ValueError(f"draft: is on {model.device}, allowed: {self.target.device}, the target's device")
            self._max_lengths["draft"] = model.max_length
            self.drafter = ModelDrafter(model)

    def generate(
        self,
        input_ids: TokenIds,
        attention_mask: torch.Tensor | None = None,
        max_new_tokens: int = 128,
        params: SamplingParams | None = None,
        seed: int | Sequence[int] | torch.Tensor = 0,
        eos_token_id: int | Sequence[int] | None = None,
        pad_token_id: int | None = None,
        on_emit: Callable[[Emission], None] | None = None,
    ) -> GenerationResult:
        """Continues every prompt until an end-of-sequence token or ``max_new_tokens``.

        Args:
            input_ids: [B, P] int64 or int32, or a list of B prompts of any lengths (1-D tensors or lists of
                ids). B may be 0; every prompt has at least one token.
            attention_mask: [B, P] of 0 and 1 beside a padded tensor (on the left or the right).
            max_new_tokens: >= 0; exact, unless a sequence ends before.
            params: the temperature, a number or [B]; None is greedy. Greedy and sampled sequences mix.
            seed: a signed 64-bit integer *for every sequence*: a text does not depend on its row in the
                batch, so equal prompts get equal texts. For different samples of one prompt pass B seeds, a
                list or a [B] tensor.
            eos_token_id: an id, several, or [] for none; None asks the target's configuration.
            pad_token_id: fills ``result.sequences`` behind a sequence's end; None asks the target's
                configuration.
            on_emit: called for every live sequence after each step with what it emitted.

        Returns:
            GenerationResult. A sequence whose target logits have no distribution ends there, with its status.

        Raises:
            ValueError: names the argument, what was given and what is allowed. A prompt that with
                ``max_new_tokens`` does not fit the positions of target or draft is refused before anything
                runs.
        """
        device = self.target.device
        prompts = read_prompts(input_ids, attention_mask, self.target.vocab_size)
        read_count("max_new_tokens", max_new_tokens)
        for name, max_length in self._max_lengths.items():
            check_room(prompts, max_new_tokens, name, max_length)
        eos = read_eos(eos_token_id, self.target.model)
        pad = read_pad(pad_token_id, eos, self.target.model)
        temperature = temperature_of(params or SamplingParams(temperature=0.0), len(prompts), device)
        generation = Generation(
            prompts=prompts,
            capacity=max(map(len, prompts), default=0) + max_new_tokens + 1,
            params=SamplingParams(temperature=temperature),
            seed=read_seeds(seed, len(prompts), device),
            greedy=not temperature.any(),
            backend=self.backend,
            stopwatch=Stopwatch(),
        )
        batch = _Batch(generation, max_new_tokens, self.num_drafts, eos, on_emit)
        with torch.inference_mode():
            batch.run(self.target, self.drafter)
        return batch.result(join(input_ids, prompts, batch.tokens, pad, device))


class _Batch:
    """One call of ``generate``: the host's record of every sequence, and the loop.

    The host decides when a sequence ends, so each step has one copy to the device (last tokens, lengths) and
    one back (the emitted tokens).
    """

    def __init__(
        self,
        generation: Generation,
        max_new_tokens: int,
        num_drafts: int,
        eos: frozenset[int],
        on_emit: Callable[[Emission], None] | None,
    ):
        self.generation, self.max_new_tokens, self.num_drafts = generation, max_new_tokens, num_drafts
        self.eos, self.on_emit = eos, on_emit
        size = len(generation.prompts)
        self.tokens: list[list[int]] = [[] for _ in range(size)]
        self.produced_by: list[list[Producer]] = [[] for _ in range(size)]
        self.status = [Status.OK] * size
        self.stats = [Stats.empty(num_drafts) for _ in range(size)]
        self.live = list(range(size)) if max_new_tokens > 0 else []
        self.target_forwards = self.draft_forwards = 0
        self._last_two = [(p[-2:-1] or p[-1:]) + p[-1:] for p in generation.prompts]

    def run(self, target: CachedModel, drafter: Drafter | None) -> None:
        g = self.generation
        if not self.live:
            return
        cache = target.new_cache(len(g.prompts), g.capacity)
        target.prefill(cache, [p[:-1] for p in g.prompts])
        g.stopwatch.lap("prefill")
        session = drafter.start(g) if drafter is not None and self.num_drafts > 0 else None
        while self.live:
            self._step(target, cache, session)

    def _step(self, target: CachedModel, cache: StaticKVCache, session: DraftSession | None) -> None:
        g, lap = self.generation, self.generation.stopwatch.lap
        step, allowed, allowed_on_device = self._plan(target.device)
        drafts = session.draft(step) if step.num_drafts else _no_drafts(step)

        # The target sees the last known token and the drafts: row i decides the token after i drafts.
        cache.lengths = step.lengths
        layout = target.layout(step.positions[:, 1:], step.slots[:, 1:], step.visible)
        # A draft outside the vocabulary ends the drafts, but what is fed must be a token.
        fed = torch.cat((step.last_two[:, 1:], drafts.tokens.clamp(0, target.vocab_size - 1)), 1)
        lap("loop")
        logits = target(fed, cache, layout)
        lap("target_forwards")
        out = speculative_step(
            logits,
            drafts.tokens,
            drafts.logits,
            params=g.params,
            seed=g.seed,
            position=step.position,
            num_drafts=allowed_on_device,
            draft_stats=drafts.stats,
            backend=g.backend,
        )
        lap("kernels")
        self.target_forwards += 1
        self.draft_forwards += drafts.forwards
        report = [out.tokens, drafts.tokens, out.num_accepted[:, None], out.status[:, None]]
        if drafts.status is not None:
            report.append(drafts.status)
        rows = torch.cat(report, 1).tolist()
        self._take(rows, step.num_drafts, allowed, target.vocab_size, drafts.forwards)
        lap("loop")

    def _plan(self, device: torch.device) -> tuple[Step, list[int], torch.Tensor]:
        """The step's inputs, from the host's record in one copy; and how many drafts each sequence may use."""
        trash = self.generation.capacity - 1
        # One token is always drawn from the target, so no draft can go past max_new_tokens.
        allowed, live = [0] * len(self.tokens), [False] * len(self.tokens)
        for b in self.live:
            live[b] = True
            allowed[b] = min(self.num_drafts, self.max_new_tokens - len(self.tokens[b]) - 1)
        num_drafts, longest, columns = max(allowed), 0, []
        # Plain lists and one tensor: measured 94 us a step, a dozen torch operations 124, numpy 200 (B = 1, K = 4).
        for b, (prompt, tokens) in enumerate(zip(self.generation.prompts, self.tokens, strict=True)):
            known = len(prompt) + len(tokens)
            places = range(known - 2, known + allowed[b]) if live[b] else ()
            positions = [max(p, 0) for p in places] + [0] * (num_drafts + 2 - len(places))
            slots = [p if p >= 0 else trash for p in places] + [trash] * (num_drafts + 2 - len(places))
            columns.append((*self._last_two[b], known, known - 1, allowed[b], *positions, *slots))
            longest = max(longest, known + allowed[b])
        state = torch.tensor(list(zip(*columns, strict=True)), device=device)
        sizes = (2, 1, 1, 1, num_drafts + 2, num_drafts + 2)
        last_two, position, lengths, allowed_on_device, positions, slots = state.split(sizes)
        visible = visible_slots(longest, self.generation.capacity)
        step = Step(num_drafts, lengths[0], position[0], last_two.T, positions.T, slots.T, visible)
        return step, allowed, allowed_on_device[0]

    def _take(self, rows: list[list[int]], k: int, allowed: list[int], vocab_size: int, draft_forwards: int) -> None:
        """Enters what the step decided: ``rows`` are [tokens (k+1), drafts (k), accepted, status, draft status (k)]."""
        live = []
        for b in self.live:
            row = rows[b]
            accepted, status = row[2 * k + 1], row[2 * k + 2]
            drafts = row[k + 1 : k + 1 + allowed[b]]
            drafted = sum(1 for _ in takewhile(lambda token: 0 <= token < vocab_size, drafts))
            for draft_status in row[2 * k + 3 : 2 * k + 3 + allowed[b]]:
                status |= draft_status
            tokens = row[:accepted]
            producers = [Producer.ACCEPTED] * accepted
            failed = status & _TARGET_FAULTS != 0
            tested = accepted if failed else min(accepted + 1, drafted)
            if not failed:
                tokens.append(row[accepted])
                producers.append(Producer.RECOVERED if accepted < drafted else Producer.BONUS)
            end = next((i + 1 for i, token in enumerate(tokens) if token in self.eos), None)
            if end is not None:
                tokens, producers = tokens[:end], producers[:end]
                accepted, tested = min(accepted, end), min(tested, end)
                status &= ~_TARGET_FAULTS  # of a row behind the end
            self.tokens[b] += tokens
            self.produced_by[b] += producers
            if status:
                self.status[b] |= Status(status)
            self.stats[b].record(drafted, tested, accepted, len(tokens), draft_forwards)
            if self.on_emit is not None and tokens:
                self.on_emit(Emission(b, tokens, producers))
            if not failed and end is None and len(self.tokens[b]) < self.max_new_tokens:
                self._last_two[b] = ([*self._last_two[b], *tokens])[-2:]
                live.append(b)
        self.live = live

    def result(self, sequences: torch.Tensor) -> GenerationResult:
        stats = Stats.total(self.stats, self.num_drafts)
        stats.target_forwards, stats.draft_forwards = self.target_forwards, self.draft_forwards
        stats.seconds = self.generation.stopwatch.with_total()
        return GenerationResult(sequences, self.tokens, self.produced_by, self.status, stats, self.stats)


def _no_drafts(step: Step) -> Drafts:
    return Drafts(step.last_two[:, :0], None, None, None, 0)
