"""``specdec roofline``: how fast a pair should decode on a GPU that is not here."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from . import options
from .drafting import K
from .layout import print_table
from .option_groups import command, option
from .terminal import remark
from .user_errors import check_counts, refuse

if TYPE_CHECKING:
    from ..evaluation.roofline import Pair

WARNING = "PREDICTION, not measured: "
# Columns: operations and bytes of speculative decoding for a token, over those of plain decoding.
SPENT = ("times\nops", "times\nbytes")


@dataclass(frozen=True)
class RooflineOptions:
    """What is predicted"""

    alpha: float = option(..., "Probability that a draft that is tested is accepted: measure it.")
    gpu: str = option("H100", "A100, H100, H200, B200, RTX 5090, MI300X, or cpu: this one, measured.")
    gpus: int | None = option(
        None,
        "That work on one model; what they say to each other costs nothing. Default: 1, 2, 4 or as many as hold the "
        "weights and the cache of a sequence.",
    )
    num_drafts: int | None = option(None, "K. Default: the best.", *K)
    batch_sizes: str = option("1,8,32,128", "Sequences at a time, with commas.")
    contexts: str = option("1024,8192", "Tokens of each in the cache, with commas.")
    weight_bits: int | None = option(None, "Of a weight: 4, 8, 16 or 32. Default: 16; with --gpu cpu 32.")
    draft_bits: int | None = option(None, "The same of DRAFT's. Default: --weight-bits.")
    as_json: bool = options.as_json()

    def __post_init__(self) -> None:
        if self.bits not in (4, 8, 16, 32):
            refuse("--weight-bits", self.bits, "4, 8, 16 or 32")
        if self.draft_bits not in (None, 4, 8, 16, 32):
            refuse("--draft-bits", self.draft_bits, "4, 8, 16 or 32")
        if self.num_drafts is not None and self.num_drafts < 1:
            allowed = "an integer >= 1: plain decoding is predicted beside it anyway"
            refuse("--num-drafts", self.num_drafts, allowed)
        check_counts(1, gpus=self.gpus)
        if self.on_cpu and self.gpus not in (None, 1):
            refuse("--gpus", f"{self.gpus} with --gpu cpu", "1")

    @property
    def on_cpu(self) -> bool:
        return self.gpu.lower() == "cpu"

    @property
    def bits(self) -> int:
        return self.weight_bits or (32 if self.on_cpu else 16)

    def pair(self, target: str, draft: str, contexts: Sequence[int]) -> Pair:
        """Both models on as many GPUs as were asked for, or as hold them and a sequence of each context."""
        from ..evaluation.model_shapes import read_shape
        from ..evaluation.roofline import Pair, gpu_machine
        from ..evaluation.theory import check_rate

        check_rate("alpha", self.alpha)
        machine = None if self.on_cpu else gpu_machine(self.gpu)
        number_bits = 32 if self.on_cpu else 16
        of_draft = self.bits if self.draft_bits is None else self.draft_bits
        asked = (("TARGET", target, self.bits), ("DRAFT", draft, of_draft))
        shapes = [read_shape(name, of, bits, number_bits) for name, of, bits in asked]
        if machine is None:
            from ..evaluation.this_cpu import measure_cpu

            machine = measure_cpu(sum(shape.read * shape.weight_bytes for shape in shapes))
        pair = Pair(shapes[0], shapes[1], machine, self.alpha)
        enough = pair.on_enough(max(contexts))
        if self.gpus is None:
            return enough
        pair = pair.on(self.gpus)
        if pair.machine.memory is not None and not pair.most_rows(min(contexts)):
            count = enough.machine.count
            size = f"{pair.weights / 1e9:.3g} GB of weights on {pair.machine.memory / 1e9:g} GB"
            refuse("--gpus", f"{self.gpus}, with {size}", f"as many as hold them and a sequence: {count} do")
        return pair


@command
def roofline(
    asked: RooflineOptions,
    target: Annotated[
        str, typer.Argument(help="Folder, hub name or GGUF file, of which only the configuration is read, or 70B.")
    ],
    draft: Annotated[str, typer.Argument(help="The same of the draft.")],
) -> None:
    """Predicts the time of a token, plain and speculative, from the bytes that a step moves and the operations that it
    does, and up to which batch size speculation pays.

    Nothing is measured but the CPU with --gpu cpu. What the prediction assumes, and how far it was off where it could
    be checked, is in docs/theory.md.
    """
    num_drafts = asked.num_drafts
    rows = options.read_counts("--batch-sizes", asked.batch_sizes, 1)
    tokens = options.read_counts("--contexts", asked.contexts, 1)
    pair = asked.pair(target, draft, tokens)
    fitting = {context: pair.most_rows(context) for context in tokens}
    predictions = [pair.best(n, c, num_drafts) for c in tokens for n in rows if n <= fitting[c]]
    pays = {context: pair.pays_up_to(context, num_drafts) for context in tokens}
    if asked.as_json:
        found = {
            "prediction": True,
            **{name: dataclasses.asdict(getattr(pair, name)) for name in ("machine", "target", "draft")},
            "alpha": asked.alpha,
            "rows": [dataclasses.asdict(p) | {"per_second": p.per_second} for p in predictions],
            "pays_up_to": pays,
            "fits": fitting,
        }
        typer.echo(json.dumps(found))
        return
    remark(f"{WARNING}{_about(pair)}", err=False)
    head = ["context", "rows", "K", "tau", "plain\nms", "step\nms", "of it\ndraft", "speed-up", "tokens/s", "limit"]
    lines = [
        [
            *(str(n) for n in (p.context, p.rows, p.num_drafts)),
            f"{p.tau:.2f}",
            f"{1e3 * p.plain_step:.3g}",
            f"{1e3 * (p.draft_seconds + p.target_seconds):.3g}",
            f"{p.draft_seconds / (p.draft_seconds + p.target_seconds):.0%}",
            f"{p.speedup:.2f}",
            f"{p.per_second:,.0f}",
            p.bound,
            f"{p.operations:.2f}",
            f"{p.bytes:.2f}",
        ]
        for p in predictions
    ]
    print_table([*head, *SPENT], lines)
    for context, most in pays.items():
        remark(_pays(context, most, fitting[context], pair.machine.memory is None), err=False)


def _about(pair: Pair) -> str:
    shapes = (("target", pair.target), ("draft", pair.draft))
    sizes = ", ".join(
        f"{name} {s.parameters / 1e9:.3g}B ({s.weights / 1e9:.3g} GB, {s.cache(1) / 1e3:.3g} kB of cache a token)"
        for name, s in shapes
    )
    m = pair.machine
    count = f"{m.count} x " if m.count > 1 else ""
    reached = f"{m.bandwidth / 1e9:,.0f} GB/s and {m.rate / 1e12:,.3g} TFLOP/s"
    return f"{sizes}, alpha {pair.alpha:g}, on {count}{m.name}: {reached} ({m.about})."


def _pays(context: int, most: int, fits: int, unlimited: bool) -> str:
    where = f"With {context} tokens of context, speculation"
    if fits == 0:
        return f"With {context} tokens of context, not one sequence fits in memory."
    if most == 0:
        return f"{where} does not pay at any batch size."
    if most >= fits:
        return f"{where} pays at every batch size{'' if unlimited else f' that fits: up to {fits}'}."
    return f"{where} pays up to batch size {most}" + ("." if unlimited else f"; up to {fits} fit in memory.")
