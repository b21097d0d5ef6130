"""The texts that a draft learns from, step by step: given ones, the target's own, and the draft's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specdec_kernels import SamplingParams

from ..checks import refuse
from ..decoder import SpeculativeDecoder
from .settings import DRAFTS, GIVEN, OWN, DistillSettings


class Lessons:
    """Batches [size, length], which depend on the seed, the step and, for the draft's own texts, on the weights that it
    had when they were written.

    The target's own texts are written by speculative decoding with the draft in training, so they come sooner as it
    learns. They do not depend on it: rule ``coupled`` gives the text of a seed whatever the draft.

    Args:
        draft: None: there is none to write texts, or to help the target with.
        given: the texts of ``data``, also the beginnings of the others.
        settings: which sources there are, how many texts are written together, for as many of the next steps, and how.
    """

    def __init__(
        self, given: Packed, target: PreTrainedModel, draft: PreTrainedModel | None, settings: DistillSettings
    ):
        self._given, self._sources, self._seed = given, dict(settings.text), settings.seed
        self._size, self._prompt, self._temperature = settings.batch_size, settings.prompt, settings.temperature
        self._at_once = -(-settings.at_once // self._size) * self._size
        self._writers: dict[str, Callable[[], SpeculativeDecoder]] = {OWN: lambda: SpeculativeDecoder(target, draft, 4)}
        if draft is not None:
            self._writers[DRAFTS] = lambda: SpeculativeDecoder(draft, None, 0)
        # A step, and how many of those before it each source has had.
        self._known = (0, dict.fromkeys(self._sources, 0))
        self.written: dict[str, torch.Tensor] = {}  # not yet learned from; a part of a checkpoint

    def source(self, step: int) -> str:
        """Which source step ``step`` has."""
        return self._chosen(self._counts(step), step)

    def _chosen(self, counts: Mapping[str, int], step: int) -> str:
        """The source that is furthest behind its share."""
        return max(self._sources, key=lambda name: (self._sources[name] * (step + 1) - counts[name], name))

    def _counts(self, step: int) -> dict[str, int]:
        """How many of the steps before ``step`` each source has had."""
        at, counts = self._known if self._known[0] <= step else (0, dict.fromkeys(self._sources, 0))
        for before in range(at, step):
            counts[self._chosen(counts, before)] += 1
        self._known = (step, counts)
        return counts

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns tokens [size, length], and which blocks of the data they are; None: they were written."""
        name = self.source(step)
        if name == GIVEN:
            blocks = self._given.batch(self._counts(step)[GIVEN])
            return self._given.blocks[blocks], blocks
        texts = self.written.get(name)
        if texts is None or not len(texts):
            texts = self._write(name, step)
        self.written[name] = texts[self._size :]
        return texts[: self._size], None

    def _write(self, name: str, step: int) -> torch.Tensor:
        """Texts of whole blocks: their beginnings are given, and an end of sequence does not end them."""
        chance = torch.Generator().manual_seed(self._seed * 1_000_003 + step)
        chosen = torch.randint(len(self._given.blocks), (self._at_once,), generator=chance)
        blocks = self._given.blocks[chosen]
        prompts, new = blocks[:, : self._prompt].tolist(), blocks.shape[1] - self._prompt
        seeds = torch.randint(2**62, (self._at_once,), generator=chance).tolist()
        params = SamplingParams(temperature=self._temperature)
        result = self._writers[name]().generate(prompts, None, new, params, seeds, [], rule="coupled")
        return torch.tensor([p + tokens for p, tokens in zip(prompts, result.tokens, strict=True)])


class Packed:
    """Documents one after the other, cut into blocks. The last tokens, which fill no block, are left out.

    Args:
        documents: token ids, the end-of-sequence token of each included.
        length: tokens of a block.
        size: blocks of a batch.
        seed: of the order of the blocks, which is another one in each epoch.

    Raises:
        ValueError: names ``data``: there are not as many tokens as a batch has.
    """

    def __init__(self, documents: Sequence[Sequence[int]], length: int, size: int, seed: int):
        text = torch.tensor([token for document in documents for token in document], dtype=torch.int64)
        self.blocks = text[: len(text) // length * length].view(-1, length)  # [n, length]
        self._size, self._seed = size, seed
        self._order: tuple[int, torch.Tensor] | None = None
        if len(self.blocks) < size:
            refuse("data", f"{len(text)} tokens", f"at least {size * length}, those of one batch")

    @property
    def batches(self) -> int:
        """Of one epoch."""
        return len(self.blocks) // self._size

    def batch(self, step: int) -> torch.Tensor:
        """Returns the indices of the blocks of batch number ``step``, [size]."""
        epoch, at = divmod(step, self.batches)
        if self._order is None or self._order[0] != epoch:
            chance = torch.Generator().manual_seed(self._seed * 1_000_003 + epoch)
            self._order = (epoch, torch.randperm(len(self.blocks), generator=chance))
        return self._order[1][at * self._size : (at + 1) * self._size]


def encoded(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    """Token ids, each text with an end of sequence, where the tokenizer has one."""
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    found = tokenizer(list(texts), add_special_tokens=False, verbose=False).input_ids if texts else []
    return [[*ids, *end] for ids in found if ids]
