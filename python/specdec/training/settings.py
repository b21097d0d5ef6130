"""How a draft or a head is trained, and what came of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..checks import read_count, refuse
from ..models.forward.cached_model import CachedModel
from .held_out import Worth
from .losses import DIVERGENCES

GIVEN, OWN, DRAFTS = "data", "target", "draft"
SOURCES = (GIVEN, OWN, DRAFTS)  # of texts
PRECISIONS = ("no", "bf16")
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True, kw_only=True)
class DistillSettings:
    """
    Attributes:
        loss: weights by the names in ``losses.LOSSES``.
        steps: updates, >= 1.
        minutes: that a training on this machine may take: where ``steps`` would take longer by the time of the first
            ones, there are fewer. None: as long as it takes.
        rate: the peak learning rate; it rises over ``warm_up`` steps and falls as a cosine.
        precision: "bf16": matrices in bfloat16; "no": all in float32.
        gradient_checkpointing: activations are computed again in the backward pass, which takes less memory.
        every: steps between two judgements, and two checkpoints; with ``minutes`` at most an eighth of all.
        num_drafts: K, for tau.
        text: weights by the names in ``SOURCES``: what is learned from.
        batch_size, length: texts of a step, and tokens of a text.
        at_once: texts that are written together.
        prompt: tokens of the data that a written text, and a text to judge by, begins with.
        temperature: at which texts are written.
        cache_logits: 0, or how many of the target's tokens are kept for each position of the data.
        vocabulary: 0, or how many tokens the draft's head keeps: the most frequent ones of the data. Its distribution
            is then trained towards the target's over these, renormalised.
        lora: 0, or the rank of the adapters that are trained instead of the weights.
        freeze_embedding: the draft's embedding stays as it is. It is most of a small draft's weights, and its gradients
            and averages most of a step's time.
        output_dtype: of the weights that are saved.
        judged: prompts, each continued by ``new`` tokens greedily and by sampling.
    """

    loss: Mapping[str, float] = field(default_factory=lambda: {"forward_kl": 1.0})
    steps: int = 1000
    rate: float = 1e-3
    warm_up: int = 50
    precision: str = "no"
    gradient_checkpointing: bool = False
    every: int = 100
    num_drafts: int = 4
    seed: int = 0
    minutes: float | None = None
    text: Mapping[str, float] = field(default_factory=lambda: {GIVEN: 1.0})
    batch_size: int = 4
    length: int = 256
    at_once: int = 64
    prompt: int = 32
    temperature: float = 1.0
    cache_logits: int = 0
    vocabulary: int = 0
    lora: int = 0
    freeze_embedding: bool = False
    output_dtype: str = "bfloat16"
    judged: int = 32
    new: int = 64

    def autocast(self, device: torch.device) -> torch.autocast:
        """In which target and draft compute."""
        return torch.autocast(device.type, torch.bfloat16, enabled=self.precision == "bf16")

    def check(self, vocab_size: int) -> None:
        """Raises ValueError naming what is out of range."""
        for name in ("batch_size", "at_once", "judged", "new", "prompt", "steps", "every", "num_drafts"):
            read_count(name, getattr(self, name), 1)
        for name in ("cache_logits", "lora", "vocabulary", "warm_up"):
            read_count(name, getattr(self, name), 0)
        if self.length <= self.prompt:
            begun = f"a text that is written, or judged by, begins with {self.prompt} tokens of the data"
            refuse("length", self.length, f"at least {self.prompt + 1}: {begun}")
        if self.cache_logits >= vocab_size:
            refuse("cache_logits", self.cache_logits, f"below {vocab_size}, the target's vocabulary")
        if self.cache_logits and GIVEN not in self.text:
            refuse("cache_logits", f"{self.cache_logits} without text from the data", "0")
        if 0 < self.vocabulary <= self.cache_logits:
            refuse("cache_logits", self.cache_logits, f"below {self.vocabulary}, the draft's vocabulary")
        if not 0 < self.rate < float("inf"):
            refuse("rate", self.rate, "a number > 0")
        if self.precision not in PRECISIONS:
            refuse("precision", repr(self.precision), " or ".join(PRECISIONS))
        if self.output_dtype not in DTYPES:
            refuse("output_dtype", repr(self.output_dtype), ", ".join(DTYPES))
        if not 0 <= self.temperature < float("inf"):
            refuse("temperature", self.temperature, "a number >= 0")


@dataclass(frozen=True)
class Distilled:
    """The results of a training. ``after`` is the draft as it was saved, ``before`` as it began, on the same texts."""

    before: list[Worth]
    after: list[Worth]
    best_step: int
    steps: int
    seconds: float
    tokens: int

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


KINDS = ("medusa", "eagle3", "dflash", "dspark", "mtp")
BLOCKS = ("dflash", "dspark")
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
            and MTP, DFlash's block but for its first token, DSpark's block.
        layers: of DFlash and DSpark; None: 2.
        layer_ids: which hidden states EAGLE-3, DFlash and DSpark read, as transformers counts them (0 is the embedding,
            i the output of layer i - 1); None: the usual ones of their formats.
        cache_features: the target's states in the data are computed once, and kept on the disk.
        format: of the files: "published", as heads of this kind are, or "speculators", for EAGLE-3, DFlash and
            DSpark.
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
        for name, kinds in {"layers": BLOCKS, "layer_ids": ("eagle3", *BLOCKS)}.items():
            if getattr(self, name) is not None and self.kind not in kinds:
                refuse(name, f"{getattr(self, name)} for {self.kind}", f"None, or kind {' or '.join(kinds)}")
        if self.kind == "dspark" and self.depth < 2:
            refuse("depth", f"{self.depth} for dspark", "at least 2, the smallest block")
        if self.format not in FORMATS:
            refuse("format", repr(self.format), " or ".join(FORMATS))
        if self.format == SPECULATORS and self.kind not in ("eagle3", *BLOCKS):
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
