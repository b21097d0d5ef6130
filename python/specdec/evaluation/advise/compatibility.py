"""Whether a draft model's tokens are those of the target: equal, padded to another size, translated as text, or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from transformers import PreTrainedTokenizerBase

from ...models.load.shared_ids import shared_ids

Kind = Literal["equal", "padded", "translated", "foreign"]
PADDING = ("equal", "padded")  # the draft model's own tokens can be verified


@dataclass(frozen=True)
class Compatibility:
    """
    Attributes:
        kind: "equal": the same tokens and the same sizes. "padded": the same tokens, and models that pad them to
            different sizes, so that only those of the tokenizer are drafted. "translated": other tokens, which
            ``UniversalDrafter`` translates as text. "foreign": nothing of the draft's can be translated.
        shared: the part of the target's tokens that the draft's tokenizer has too, as strings.
        same_ids: the part that has the same id in both.
        tokens_each: how many tokens of the draft the prompts take, for each of the target's.
    """

    kind: Kind
    shared: float
    same_ids: float
    tokens_each: float

    @property
    def drafter(self) -> str | None:
        """The drafter that can use such a draft, by its name on the command line; None: none can."""
        return {"translated": "universal", "foreign": None}.get(self.kind, "model")


def compare_tokenizers(
    tokenizer: PreTrainedTokenizerBase,
    draft_tokenizer: PreTrainedTokenizerBase | None,
    sizes: tuple[int, int],
    texts: Sequence[str],
) -> Compatibility:
    """Compares what the two models are fed.

    Args:
        tokenizer: the target's.
        draft_tokenizer: None: the draft has none of its own, so it was made for the target's.
        sizes: V of the target and of the draft.
        texts: the prompts, by which tokens are counted.
    """
    same_size = sizes[0] == sizes[1]
    fits = same_size or shared_ids(sizes, tokenizer) is not None
    if draft_tokenizer is None:
        return Compatibility("equal" if same_size else "padded" if fits else "foreign", 1.0, 1.0, 1.0)
    ours, theirs = tokenizer.get_vocab(), draft_tokenizer.get_vocab()
    shared = sum(token in theirs for token in ours) / max(len(ours), 1)
    same_ids = sum(theirs.get(token) == i for token, i in ours.items()) / max(len(ours), 1)
    counts = [sum(len(t(text, verbose=False).input_ids) for text in texts) for t in (tokenizer, draft_tokenizer)]
    each = counts[1] / max(counts[0], 1)
    if ours == theirs:
        return Compatibility("equal" if same_size else "padded" if fits else "translated", shared, same_ids, each)
    return Compatibility("translated" if counts[1] else "foreign", shared, same_ids, each)
