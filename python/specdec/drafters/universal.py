"""Drafts tokens with a model that has another tokenizer, by way of text."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import takewhile

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..checks import refuse
from ..models.cache.kv_cache import StaticKVCache, visible_slots
from ..models.forward.cached_model import CachedModel
from ..models.supported import cached_model
from ..prompts import read_eos
from .protocol import BatchState, Drafter, Drafts, DraftSession, Step
from .translation import TokenText, Translation, common_special_tokens

NARROW = 8  # most new tokens of a sequence that are fed with logits; more are stored first, without logits
LEAST_ROOM, MOST_ROOM = 2.0, 6.0  # slots for each new token of the target; a sequence that needs more stops drafting


class UniversalDrafter(Drafter):
    """Drafts with a draft model of any vocabulary (Timor et al., arXiv 2502.05202, section 3.1, string-level exact
    match; transformers' universal assisted decoding).

    The known text is encoded with the draft's tokenizer and continued greedily, and the continuation is encoded with
    the target's tokenizer. The drafts are one-hot, so the text has the target's distribution however they are
    translated. Where the tokenizers split a text differently, fewer drafts may be accepted. A sequence whose text
    outgrows the draft's positions or its cache continues without drafts.

    Args:
        draft: a decoder-only transformers causal LM in evaluation mode, on any device.
        draft_tokenizer: the draft's tokenizer.
        tokenizer: the target's tokenizer.

    Raises:
        ValueError: names the argument, what was given and what is allowed.
    """

    doubt = "Is draft_tokenizer the draft model's own, and has the model a dtype that it was made for?"
    model: CachedModel

    def __init__(
        self, draft: PreTrainedModel, draft_tokenizer: PreTrainedTokenizerBase, tokenizer: PreTrainedTokenizerBase
    ):
        self.model = cached_model(draft, "draft")
        for name, given in (("draft_tokenizer", draft_tokenizer), ("tokenizer", tokenizer)):
            if not isinstance(given, PreTrainedTokenizerBase):
                refuse(name, type(given).__name__, "a transformers tokenizer")
        largest = max(draft_tokenizer.get_vocab().values(), default=0)
        if largest >= self.model.vocab_size:
            refuse(
                "draft_tokenizer", f"ids up to {largest}", f"up to {self.model.vocab_size - 1}, the draft's vocabulary"
            )
        self.columns = largest + 1  # columns of the logits that are tokens; the rest is padding
        spoken = common_special_tokens(draft_tokenizer, tokenizer)
        self.drafts_text, self.text = TokenText(draft_tokenizer, spoken), TokenText(tokenizer, spoken)
        # The tokens after which the draft does not continue this text.
        self.ends = read_eos(None, draft) | self.drafts_text.special.keys()

    def start(self, batch: BatchState) -> UniversalDraftSession:
        return UniversalDraftSession(self, batch)

    def cache_bytes(self) -> int:
        """Returns an upper bound; the slots that the texts need are known only when they come."""
        return int(MOST_ROOM) * self.model.slot_bytes()

    def row_bytes(self, most_drafts: int) -> int:
        return self.model.row_bytes(NARROW + most_drafts)


class UniversalDraftSession(DraftSession):
    """One batch's translated texts, and the draft model's cache of them."""

    def __init__(self, drafter: UniversalDrafter, batch: BatchState):
        self.drafter, self.model, self.timer = drafter, drafter.model, batch.timer
        self.columns = drafter.columns
        self.translations = [self._translation() for _ in range(batch.size)]
        self.capacity, self.room = batch.capacity, 0
        self.window = NARROW + batch.most_drafts
        self.cache: StaticKVCache | None = None  # made when the first texts show how many draft tokens they need
        self.stored: list[list[int]] = [[] for _ in self.translations]  # the tokens that the cache holds, from slot 0
        self.settled = [0] * batch.size  # how many of these will not change

    def _translation(self) -> Translation:
        return Translation(self.drafter.text, self.drafter.drafts_text)

    def begin(self, prompts: Mapping[int, list[int]]) -> None:
        for row, prompt in prompts.items():
            translation = self.translations[row] = self._translation()
            translation.update(prompt)
        if self.cache is None:
            self.room = self._room(prompts)
            capacity = self.model.capacity(self.room)
            self.cache = self.model.new_cache(len(self.translations), capacity, self.window)
        for row in prompts:
            self.cache.begin(row)
            tokens, self.settled[row] = self.translations[row].tokens, self.translations[row].settled
            self.stored[row] = tokens[:-1] if len(tokens) <= self.room else []
            self.model.extend(self.cache, [self.stored[row]], [0], row)
        self.timer.lap("prefill")

    def _room(self, prompts: Mapping[int, list[int]]) -> int:
        """Returns the slots of a row. For each of the target's tokens, new text may need 1.5 times as many draft tokens
        as these prompts."""
        lengths = [len(self.translations[row].tokens) for row in prompts]
        ratio = 1.5 * sum(lengths) / max(sum(map(len, prompts.values())), 1)
        new = min(max(ratio, LEAST_ROOM), MOST_ROOM) * (self.capacity - max(map(len, prompts.values())))
        room = min(max(lengths) + int(new), int(MOST_ROOM) * self.capacity - 1)
        return room if self.model.max_length is None else min(room, self.model.max_length)

    def propose(self, step: Step) -> Drafts:
        rows, count = [], step.num_drafts
        for b, (translation, most) in enumerate(zip(self.translations, step.allowed, strict=False)):
            if most > 0:
                translation.update(step.texts[b])
                if 0 < len(translation.tokens) <= self.room - count + 1:
                    rows.append(b)
        if not rows:
            return Drafts.none(step)
        drafted = self._continue(rows, count)
        drafts: list[list[int]] = [[] for _ in step.allowed]
        for b in rows:
            more = takewhile(lambda token: token not in self.drafter.ends, drafted[b])
            back = self.translations[b].back(step.texts[b], list(more))
            proposed = takewhile(lambda token: token not in self.drafter.text.special, back)
            drafts[b] = list(proposed)[: step.allowed[b]]
        self.timer.lap("loop")
        return Drafts.of(drafts, step)._replace(forwards=count)

    def end(self, row: int, output: list[int]) -> None:
        self.translations[row], self.stored[row] = self._translation(), []

    def release(self) -> None:
        if self.cache is not None:
            self.model.keep(self.cache)

    def _continue(self, rows: list[int], count: int) -> list[list[int]]:
        """Returns, for each row, the draft model's ``count`` greedy tokens; only those of ``rows`` are meaningful."""
        assert self.cache is not None, "propose before begin"
        known = {b: self.translations[b].tokens for b in rows}
        starts = {
            b: min(common_length(self.stored[b], tokens, self.settled[b]), len(tokens) - 1)
            for b, tokens in known.items()
        }
        committed = self.cache.committed()
        again = any(starts[b] < committed[b] for b in rows)  # a state cannot go back so far
        if again or max(len(known[b]) - starts[b] for b in rows) > NARROW:
            for b in rows:
                self.stored[b] = known[b][:-1]
            self.model.extend(self.cache, self.stored, [starts.get(b, len(s)) for b, s in enumerate(self.stored)])
            starts = {b: len(t) - 1 for b, t in known.items()}
        # The columns are the tokens that are not stored yet, padded on the right, and then the drafts except the last,
        # which is never fed.
        width = max(len(known[b]) - starts[b] for b in rows)
        lines = []
        for b in range(len(self.translations)):
            if b in known:
                new, end = known[b][starts[b] :], len(known[b])
                padding = width - len(new)
                places = [*range(starts[b], end), *[-1] * padding, *range(end, end + count - 1)]
                lines.append([*new, *[0] * padding, *places, len(new) - 1])
            else:
                lines.append([0] * width + [-1] * (width + count - 1) + [0])
        state = torch.tensor(lines, device=self.model.device)
        tokens, slots, last = state.split([width, width + count - 1, 1], 1)
        visible = visible_slots(max(map(len, known.values())) + count, self.cache.capacity)
        self.cache.lengths = slots[:, 0].clamp(min=0)
        layout = self.model.layout(slots.clamp(min=0), slots.where(slots >= 0, self.cache.trash), visible)
        columns: list[torch.Tensor] = []
        self.timer.lap("loop")
        for part in layout.split([width] + [1] * (count - 1)):
            logits = self.model(tokens, self.cache, part)
            if not columns:  # the first forward: takes each row's last column that is not padding
                logits = logits.gather(1, last[:, :, None].expand(-1, 1, logits.shape[2]))
            tokens = logits[:, :, : self.columns].argmax(-1)
            columns.append(tokens)
        drafted = torch.cat(columns, 1).tolist()
        self.timer.lap("draft_forwards")
        for b in rows:
            self.stored[b] = known[b] + drafted[b][:-1]
            self.settled[b] = self.translations[b].settled
        return drafted


def common_length(a: list[int], b: list[int], known: int = 0) -> int:
    """Returns the length of the longest common prefix. The first ``known`` tokens, as far as both lists have them, are
    known to be equal."""
    shorter = min(len(a), len(b))
    return next((i for i in range(min(known, shorter), shorter) if a[i] != b[i]), shorter)
