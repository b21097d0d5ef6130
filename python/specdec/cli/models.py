"""The models that a command works with."""

from __future__ import annotations

import atexit
import functools
import gc
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .drafters import EMBEDDED_HEADS, NEED_DRAFT, is_head, make_drafter, parts_of
from .option_groups import option
from .options import MachineOptions
from .user_errors import refuse

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..decoder import SpeculativeDecoder
    from ..drafters.protocol import Drafter
    from ..loop.draft_length import AdaptiveDrafts

EMBEDDED = Path(__file__).parents[1] / "embedded"  # importlib.resources would make --help slower


@dataclass(frozen=True)
class ModelOptions:
    """Models"""

    target: str | None = option(None, "Folder, hub name or GGUF file of the target. Default: the embedded pair.")
    adapter: str | None = option(None, "Folder of a peft adapter of the target, in safetensors.", show_default=False)
    draft: str | None = option(None, "Folder, hub name or GGUF file of the draft.")
    draft_bits: int | None = option(
        None, "8: the draft's weights in 8 bits, which changes no distribution. Default: as saved.", metavar="8"
    )
    load_in_8bit: bool = option(
        False,
        "The target's weights in 8 bits, on a CPU the draft's, too: the text is that of this other model.",
        "--load-in-8bit",
    )
    load_in_4bit: bool = option(False, "The target's in 4 bits, on a GPU, by bitsandbytes.", "--load-in-4bit")
    machine: MachineOptions = field(default_factory=MachineOptions)

    def __post_init__(self) -> None:
        if self.load_in_8bit and self.load_in_4bit:
            refuse("--load-in-8bit / --load-in-4bit", "both", "at most one of the two")
        if self.draft_bits not in (None, 8):
            refuse("--draft-bits", self.draft_bits, "8, or none")

    @property
    def tp(self) -> int | None:
        """Over how many processes the target is divided; None: it is not."""
        return None

    @property
    def bits(self) -> Literal[4, 8] | None:
        return 8 if self.load_in_8bit else 4 if self.load_in_4bit else None

    @property
    def all_bits(self) -> dict[str, int | None]:
        """Of both models, for records; those that began before a draft had bits of its own go on."""
        return {"bits": self.bits, **({} if self.draft_bits is None else {"draft_bits": self.draft_bits})}

    @property
    def alone(self) -> bool:
        """Whether there is a target without a draft."""
        return self.target is not None and self.draft is None

    @property
    def vocab_size(self) -> int:
        """V of the target, without loading it."""
        from ..jobs.manifest import read_vocab_size

        return read_vocab_size("target", str(EMBEDDED / "target") if self.target is None else self.target)

    @functools.cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The target's, without the target."""
        from ..models.load.loading import load_tokenizer

        return load_tokenizer("target", str(EMBEDDED / "tokenizer") if self.target is None else self.target)

    def paths(self, drafter: str) -> dict[str, str | None]:
        """Folders or hub names of everything that a text depends on. Without a target: those of the embedded pair."""
        drafter = parts_of(drafter)[-1]
        more = {"head": drafter} if is_head(drafter) else {}
        if drafter in EMBEDDED_HEADS:
            more = {"head": str(EMBEDDED / "heads" / drafter)}
        if self.target is None:
            draft = str(EMBEDDED / "draft") if drafter in NEED_DRAFT else None
            target, tokenizer = str(EMBEDDED / "target"), str(EMBEDDED / "tokenizer")
            return {"target": target, "draft": draft, "tokenizer": tokenizer, **more}
        adapter = {} if self.adapter is None else {"adapter": self.adapter}
        return {"target": self.target, "draft": self.draft, **more, **adapter}


@dataclass(frozen=True)
class DividedModelOptions(ModelOptions):
    """Models"""

    tp: int | None = option(
        None, "Divide the target over N processes, a GPU each: torchrun --nproc-per-node N -m specdec ...", metavar="N"
    )

    def join(self) -> None:
        """Meets the processes of ``--tp``. Returns in the first of them; the others follow it, and end with it."""
        if self.tp is not None:
            from ..models.load.load_sharded import join_ranks

            gc.enable()  # in those that do not return; ``load`` does it here
            join_ranks(self.tp, self.machine.chosen_device())
            gc.disable()


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

    def drafter(self, name: str, exit_layers: int | None = None, **how: Any) -> Drafter | None:
        """The drafter of this name, as :func:`~specdec.cli.drafters.make_drafter` makes it for these models. ``how``
        are further arguments of it."""
        own = {"tokenizer": self.tokenizer, "draft_tokenizer": self.draft_tokenizer or self.tokenizer, **how}
        return make_drafter(name, self.target, self.draft, exit_layers=exit_layers, **own)

    def decoder(
        self, drafter: Drafter | None, num_drafts: int | AdaptiveDrafts, nodes: int | None
    ) -> SpeculativeDecoder:
        """The target's. It decodes plainly without a drafter, which is what ``--drafter none`` asks for. Chains also
        have the tokens that grammars force."""
        from ..decoder import SpeculativeDecoder
        from ..drafters.predicted import PredictedDrafter

        if nodes is None and drafter is not None and not isinstance(drafter, PredictedDrafter):
            drafter = PredictedDrafter(drafter)
        return SpeculativeDecoder(self.target, drafter, 0 if drafter is None else num_drafts, tree=nodes)


def load(at: ModelOptions, drafters: Sequence[str]) -> Models:
    """Loads the target, with its adapter, and the draft for these drafters; without a target, the embedded pair."""
    models = _load(at, drafters)
    if not gc.isenabled():  # since ``main``. What there is now stays to the end, so it is not looked through again:
        gc.freeze()  # that took a quarter of a second, several times while a text was decoded.
        gc.enable()
        atexit.register(gc.unfreeze)  # otherwise Triton complains of objects that are left at the end
    return models


def _load(at: ModelOptions, drafters: Sequence[str]) -> Models:
    import torch
    from transformers.utils import logging

    from ..models.load.loading import load_draft, load_embedded_pair, load_model, load_pair, load_tokenizer

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    machine, of_draft = at.machine, dict[str, Any]({"bits": at.bits, "draft_bits": at.draft_bits})
    device = machine.chosen_device()
    if at.target is None:
        return Models(*load_embedded_pair(machine.dtype or torch.float32, device, **of_draft, tp=at.tp), None)
    dtype = machine.dtype or "auto"
    parts = {part for name in drafters for part in parts_of(name)}
    if at.draft is not None and parts & {*NEED_DRAFT} != {"universal"}:
        pair = load_pair(at.target, at.draft, dtype, device, adapter=at.adapter, tp=at.tp, **of_draft)
        return Models(*pair, None)
    tokenizer = load_tokenizer("target", at.target, beside_weights=True)
    draft_tokenizer = None if at.draft is None else load_tokenizer("draft", at.draft)
    target = load_model(at.target, dtype, device, adapter=at.adapter, bits=at.bits, tp=at.tp, name="target")
    draft = None if at.draft is None else load_draft(at.draft, dtype, device, **of_draft)
    return Models(target, draft, tokenizer, draft_tokenizer)
