"""How long plain and speculative decoding should take on a machine, from the bytes that they move and the operations
that they do (Williams et al., "Roofline", CACM 2009). **A prediction**, not a measurement: docs/theory.md says what it
assumes.

    forward = max(bytes / bandwidth, operations / rate) + layers x what a layer costs however small it is
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..checks import read_count, refuse
from .gpus import GPUS, REACHED, Gpu
from .theory import check_rate, expected_tau, speedup_of_steps

RATE_REACHED = 0.6  # share of the data sheet's operations that matrix products of these sizes reach; assumed
LAYER_SECONDS = 5e-6  # of a layer's launches and latencies in a CUDA graph, about ten kernels; assumed
MOST_DRAFTS = 16  # the largest K that is tried
MOST_ROWS = 1 << 16


@dataclass(frozen=True)
class Machine:
    """What computes: bytes and operations a second that are reached, not those of a data sheet.

    Attributes:
        layer: seconds that a layer takes beside what its bytes or operations take.
        memory: bytes; None: unlimited.
        about: where these numbers come from.
        count: how many of them work on one model.
    """

    name: str
    bandwidth: float
    rate: float
    layer: float
    memory: float | None
    about: str
    count: int = 1

    def times(self, count: int) -> Machine:
        """So many of them as one, whose weights and caches are divided among them. What they say to each other costs
        nothing here, so this is the best that tensor parallelism can do."""
        read_count("gpus", count, 1)
        memory = None if self.memory is None else self.memory * count
        return replace(self, bandwidth=self.bandwidth * count, rate=self.rate * count, memory=memory, count=count)


def gpu_machine(name: str) -> Machine:
    """A GPU of ``specdec.evaluation.gpus``, by its name or the beginning of it, in any case.

    Raises:
        ValueError: there is none, or more than one.
    """
    found = [gpu for gpu in GPUS if gpu.name.lower().startswith(name.lower())]
    if len(found) != 1:
        refuse("gpu", repr(name), f"cpu, or one of {', '.join(gpu.name for gpu in GPUS)}")
    return _machine(found[0])


def _machine(gpu: Gpu) -> Machine:
    about = f"{gpu.source}: {gpu.terabytes:g} TB/s, of which {REACHED:.0%}, and {gpu.teraflops:g} TFLOP/s in bfloat16, "
    about += f"of which {RATE_REACHED:.0%} (assumed)"
    bandwidth, rate = gpu.terabytes * 1e12 * REACHED, gpu.teraflops * 1e12 * RATE_REACHED
    return Machine(gpu.name, bandwidth, rate, LAYER_SECONDS, gpu.gigabytes * 1e9, about)


@dataclass(frozen=True)
class ModelShape:
    """What a forward of a model reads and computes.

    Attributes:
        parameters: of all weights.
        read: of the weights that a forward multiplies with: all but the embedding, of which it looks up a few rows.
        attended: heads x size of a head, of the queries, all layers together.
        cached: keys and values of one token, in numbers, all layers together.
        weight_bytes, number_bytes: of a weight, and of anything else (keys, values, logits).
    """

    name: str
    parameters: int
    read: int
    layers: int
    attended: int
    cached: int
    vocabulary: int
    weight_bytes: float = 2.0
    number_bytes: float = 2.0

    @property
    def weights(self) -> float:
        """Bytes of all weights in memory."""
        return self.parameters * self.weight_bytes

    def cache(self, tokens: float) -> float:
        """Bytes of the keys and values of so many tokens."""
        return tokens * self.cached * self.number_bytes

    def moved(self, rows: int, width: int, context: int) -> float:
        """Bytes that a forward over ``width`` new tokens of each of ``rows`` sequences moves: weights, once; the cache
        of each sequence, once for all its new tokens; and the logits, which are written, and read to draw or to verify.
        """
        logits = 2 * rows * width * self.vocabulary * self.number_bytes
        return self.read * self.weight_bytes + self.cache(rows * (context + width)) + logits

    def operations(self, rows: int, width: int, context: int) -> float:
        """A multiplication and an addition for each weight and token, and those of attention."""
        return rows * width * (2.0 * self.read + 4.0 * self.attended * context)

    def seconds(self, machine: Machine, rows: int, width: int, context: int) -> float:
        bytes_, operations = self.moved(rows, width, context), self.operations(rows, width, context)
        return max(bytes_ / machine.bandwidth, operations / machine.rate) + self.layers * machine.layer


@dataclass(frozen=True)
class PredictedStep:
    """Decoding of ``rows`` sequences at a time with this context. Seconds are of a step; operations of a token."""

    rows: int
    context: int
    num_drafts: int
    tau: float
    plain_step: float
    draft_seconds: float  # of the K draft forwards of a step
    target_seconds: float  # of the target's forward over K + 1 tokens
    bound: str  # what limits that forward: bytes or operations
    speedup: float
    operations: float  # of speculative decoding, over those of plain decoding
    bytes: float  # the same for bytes moved

    @property
    def plain_per_second(self) -> float:
        """Tokens of all rows together."""
        return self.rows / self.plain_step

    @property
    def per_second(self) -> float:
        return self.plain_per_second * self.speedup


@dataclass(frozen=True)
class Pair:
    """Target and draft on one machine, and how often a tested draft is accepted."""

    target: ModelShape
    draft: ModelShape
    machine: Machine
    alpha: float

    def __post_init__(self) -> None:
        check_rate("alpha", self.alpha)

    @property
    def weights(self) -> float:
        """Bytes of both models."""
        return self.target.weights + self.draft.weights

    def on(self, count: int) -> Pair:
        """The same on so many of the machine."""
        return replace(self, machine=self.machine.times(count))

    def on_enough(self, context: int) -> Pair:
        """The same on 1, 2, 4 or as many of the machine as hold the weights and the cache of a sequence."""
        pair = self
        while not pair.most_rows(context):
            pair = self.on(2 * pair.machine.count)
        return pair

    def predict(self, rows: int, context: int, num_drafts: int) -> PredictedStep:
        """Predicts a step. The draft's first forward reads two tokens, as in specdec's loop; a drafter that does not
        would save nothing where bytes are the limit."""
        k, target, draft, machine = num_drafts, self.target, self.draft, self.machine
        plain = target.seconds(machine, rows, 1, context)
        widths = [2, *[1] * (k - 1)] if k else []
        drafting = sum(draft.seconds(machine, rows, width, context) for width in widths)
        verifying = target.seconds(machine, rows, k + 1, context)
        tau = expected_tau(self.alpha, k)

        def over_plain(name: str) -> float:
            of_draft = sum(getattr(draft, name)(rows, width, context) for width in widths)
            return (
                (of_draft + getattr(target, name)(rows, k + 1, context)) / tau / getattr(target, name)(rows, 1, context)
            )

        by_bytes = target.moved(rows, k + 1, context) / machine.bandwidth
        by_operations = target.operations(rows, k + 1, context) / machine.rate
        return PredictedStep(
            rows=rows,
            context=context,
            num_drafts=k,
            tau=tau,
            plain_step=plain,
            draft_seconds=drafting,
            target_seconds=verifying,
            bound="bytes" if by_bytes >= by_operations else "operations",
            speedup=speedup_of_steps(tau, drafting + verifying, plain),
            operations=over_plain("operations"),
            bytes=over_plain("moved"),
        )

    def best(self, rows: int, context: int, num_drafts: int | None = None) -> PredictedStep:
        """The K >= 1 with the largest speed-up, or ``num_drafts``."""
        tried: Sequence[int] = range(1, MOST_DRAFTS + 1) if num_drafts is None else (num_drafts,)
        return max((self.predict(rows, context, k) for k in tried), key=lambda p: p.speedup)

    def most_rows(self, context: int, speculative: bool = True) -> int:
        """How many sequences fit in memory beside the weights; without the draft's where ``speculative`` is False. At
        most MOST_ROWS."""
        if self.machine.memory is None:
            return MOST_ROWS
        models = (self.target, self.draft) if speculative else (self.target,)
        room = self.machine.memory - sum(m.weights for m in models)
        return max(0, min(MOST_ROWS, int(room // sum(m.cache(context + 1) for m in models))))

    def pays_up_to(self, context: int, num_drafts: int | None = None) -> int:
        """The most rows up to which speculation is faster than plain decoding, among those that fit; 0: it never is.
        A speed-up falls with the rows, but for small waves where the limits change places, so the first number of rows
        without one is looked for among powers of 2^(1/4), and then between two of them."""
        most, last = self.most_rows(context), 0
        for rows in sorted({min(most, math.ceil(2 ** (i / 4))) for i in range(65)} - {0}):
            if self.best(rows, context, num_drafts).speedup <= 1:
                low, high = last, rows
                while high - low > 1:
                    middle = (low + high) // 2
                    pays = self.best(middle, context, num_drafts).speedup > 1
                    low, high = (middle, high) if pays else (low, middle)
                return low
            last = rows
        return last
