"""The models that a command works with."""

from __future__ import annotations

import atexit
import functools
import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from .drafters import EMBEDDED_HEADS, NEED_DRAFT, is_head, make_drafter

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..drafters.protocol import Drafter
    from ..drafters.suffix import SuffixMemories, SuffixMemory

EMBEDDED = Path(__file__).parents[1] / "embedded"  # importlib.resources would make --help slower


@dataclass(frozen=True)
class Models:
    target: PreTrainedModel
    draft: PreTrainedModel | None
    tokenizer: PreTrainedTokenizerBase  # the target's
    draft_tokenizer: PreTrainedTokenizerBase | None  # only where a drafter translates between two tokenizers

    @property
    def same_size(self) -> bool:
        """Whether target and draft have vocabularies of one size."""
        sizes = {m.config.get_text_config(decoder=True).vocab_size for m in (self.target, self.draft) if m is not None}
        return len(sizes) == 1

    @property
    def tail(self) -> list[int]:
        """The ids of the target for which the tokenizer has no token: they only pad the vocabulary."""
        known = max(self.tokenizer.get_vocab().values()) + 1
        return list(range(known, self.target.config.get_text_config(decoder=True).vocab_size))

    def drafter(
        self,
        name: str,
        exit_layers: int | None = None,
        memory: SuffixMemory | SuffixMemories | None = None,
        confidence: float = 0.0,
    ) -> Drafter | None:
        """The drafter of this name, as :func:`~specdec.cli.drafters.make_drafter` makes it for these models."""
        return make_drafter(
            name,
            self.target,
            self.draft,
            exit_layers=exit_layers,
            tokenizer=self.tokenizer,
            draft_tokenizer=self.draft_tokenizer or self.tokenizer,
            memory=memory,
            confidence=confidence,
        )


def load(
    target: str | None,
    draft: str | None,
    drafters: Sequence[str],
    device: str | None,
    dtype: str | None,
    adapter: str | None = None,
    bits: Literal[4, 8] | None = None,
) -> Models:
    """Loads ``target``, with its ``adapter`` and with its weights in so many ``bits``, and ``draft``; without a
    ``target``, the embedded pair."""
    models = _load(target, draft, drafters, device, dtype, adapter, bits)
    if not gc.isenabled():  # since ``main``. What there is now stays to the end, so it is not looked through again:
        gc.freeze()  # that took a quarter of a second, several times while a text was decoded.
        gc.enable()
        atexit.register(gc.unfreeze)  # otherwise Triton complains of objects that are left at the end
    return models


def _load(
    target: str | None, draft: str | None, drafters: Sequence[str], device: str | None, dtype: str | None,
    adapter: str | None, bits: Literal[4, 8] | None,
) -> Models:  # fmt: skip
    import torch
    from transformers.utils import logging

    from ..models.loading import load_embedded_pair, load_model, load_pair, load_tokenizer

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    if target is None:
        return Models(*load_embedded_pair(dtype or torch.float32, device, bits=bits), None)
    dtype = dtype or "auto"
    if draft is None:
        tokenizer = load_tokenizer("target", target)
        model = load_model(target, dtype, device, adapter=adapter, bits=bits, name="target")
        return Models(model, None, tokenizer, None)
    if [name for name in drafters if name in NEED_DRAFT] != ["universal"]:
        return Models(*load_pair(target, draft, dtype, device, adapter=adapter, bits=bits), None)
    tokenizer, draft_tokenizer = load_tokenizer("target", target), load_tokenizer("draft", draft)
    target_model = load_model(target, dtype, device, adapter=adapter, bits=bits, name="target")
    return Models(target_model, load_model(draft, dtype, device, name="draft"), tokenizer, draft_tokenizer)


def paths(target: str | None, draft: str | None, drafter: str, adapter: str | None = None) -> dict[str, str | None]:
    """Folders or hub names of everything that a text depends on. Without a ``target``: those of the embedded pair."""
    more = {"head": drafter} if is_head(drafter) else {}
    if drafter in EMBEDDED_HEADS:
        more = {"head": str(EMBEDDED / "heads" / drafter)}
    if target is None:
        draft = str(EMBEDDED / "draft") if drafter in NEED_DRAFT else None
        return {"target": str(EMBEDDED / "target"), "draft": draft, "tokenizer": str(EMBEDDED / "tokenizer"), **more}
    return {"target": target, "draft": draft, **more} | ({} if adapter is None else {"adapter": adapter})


def tokenizer_of(target: str | None) -> Callable[[], PreTrainedTokenizerBase]:
    """Loads the target's tokenizer, without the target, when it is called for the first time."""

    @functools.cache
    def load() -> PreTrainedTokenizerBase:
        from ..models.loading import load_tokenizer

        return load_tokenizer("target", str(EMBEDDED / "tokenizer") if target is None else target)

    return load


def read_vocab_size(target: str | None) -> int:
    """V of the target, without loading it."""
    from ..jobs.manifest import read_vocab_size

    return read_vocab_size("target", str(EMBEDDED / "target") if target is None else target)
