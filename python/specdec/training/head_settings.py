"""How a head is trained, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..checks import read_count, refuse
from ..models.forward.cached_model import CachedModel
from .losses import DIVERGENCES
from .settings import GIVEN, OWN, Distilled, DistillSettings

KINDS = ("medusa", "eagle3", "dflash", "mtp")
PUBLISHED, SPECULATORS = "published", "speculators"
FORMATS = (PUBLISHED, SPECULATORS)
DFLASH_LAYERS = 2
SHORTEST = 16  # tokens of a text, of which the self-check has the head draft in the second half


@dataclass(frozen=True)
class HeadSettings:
    """
    Attributes:
        kind: of KINDS.
        run: what a head's training has in common with that of a draft. ``cache_logits`` and ``lora`` are for drafts,
            ``vocabulary`` for drafts and EAGLE-3.
        depth: drafts that it learns to make in a step: Medusa's heads, the length of the training-time test of EAGLE-3
            and MTP, DFlash's block but for its first token.
        layers: of DFlash; None: 2.
        layer_ids: which hidden states EAGLE-3 and DFlash read, as transformers counts them (0 is the embedding, i the
            output of layer i - 1); None: the usual ones of their formats.
        cache_features: the target's states in the data are computed once, and kept on the disk.
        format: of the files: "published", as heads of this kind are, or "speculators", for EAGLE-3 and DFlash.
    """

    kind: str
    run: DistillSettings = field(default_factory=DistillSettings)
    depth: int = 4
    layers: int | None = None
    layer_ids: tuple[int, ...] | None = None
    cache_features: bool = False
    format: str = PUBLISHED

    @property
    def dflash_layers(self) -> int:
        return DFLASH_LAYERS if self.layers is None else self.layers

    def check(self, target: CachedModel) -> None:
        """Raises ValueError naming what is out of range."""
        run = self.run
        if self.kind not in KINDS:
            refuse("kind", repr(self.kind), ", ".join(KINDS))
        run.check(target.vocab_size)
        for name in ("cache_logits", "lora"):
            if value := getattr(run, name):
                refuse(name, f"{value} for a head", "0")
        if run.gradient_checkpointing:
            refuse("gradient_checkpointing", "True for a head", "False")
        for name in {*run.loss} - {*DIVERGENCES}:
            refuse("loss", f"{name!r} for a head", ", ".join(DIVERGENCES))
        for name in {*run.text} - {GIVEN, OWN}:
            refuse("text", f"{name!r} for a head", f"{GIVEN} or {OWN}")
        read_count("depth", self.depth, 1)
        read_count("layers", self.dflash_layers, 1)
        self._check_kind()
        if run.length < SHORTEST or run.length <= 2 * self.depth:
            refuse("length", run.length, f"at least {max(SHORTEST, 2 * self.depth + 1)}, with depth {self.depth}")
        if target.max_length is not None and run.length > target.max_length:
            refuse("length", run.length, f"up to {target.max_length}, the target's positions")
        if self.cache_features and GIVEN not in run.text:
            refuse("cache_features", "True without text from the data", "False")

    def _check_kind(self) -> None:
        """Refuses settings of other kinds."""
        if self.run.vocabulary and self.kind != "eagle3":
            refuse("vocabulary", f"{self.run.vocabulary} for {self.kind}", "0, or kind eagle3")
        for name, kinds in {"layers": ("dflash",), "layer_ids": ("eagle3", "dflash")}.items():
            if getattr(self, name) is not None and self.kind not in kinds:
                refuse(name, f"{getattr(self, name)} for {self.kind}", f"None, or kind {' or '.join(kinds)}")
        if self.format not in FORMATS:
            refuse("format", repr(self.format), " or ".join(FORMATS))
        if self.format == SPECULATORS and self.kind not in ("eagle3", "dflash"):
            refuse("format", f"{self.format!r} for {self.kind}", f"{PUBLISHED!r}")


@dataclass(frozen=True)
class TrainedHead(Distilled):
    """The results of a training. ``after`` is of decoders with the head as it was loaded back from its files,
    ``before`` as it began, on the same prompts.

    Attributes:
        hits: how often a greedy draft was accepted at each depth, of those that were tested there.
        states: which hidden states it reads.
        trouble: what the self-check warns of; None: nothing.
    """

    hits: list[float]
    states: tuple[int, ...]
    trouble: str | None
