"""``specdec roofline``: how fast a pair should decode on a GPU that is not here."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated

import typer

from . import options
from .layout import print_table
from .options import refuse

if TYPE_CHECKING:
    from ..evaluation.roofline import Pair

WARNING = "PREDICTION, not measured: "


def roofline(
    target: Annotated[str, typer.Argument(help="Folder or hub name, of which only the configuration is read, or 70B.")],
    draft: Annotated[str, typer.Argument(help="The same of the draft.")],
    alpha: Annotated[float, typer.Option(help="Probability that a draft that is tested is accepted: measure it.")],
    gpu: Annotated[
        str, typer.Option(help="A100, H100, H200, B200, RTX 5090, MI300X, or cpu: this one, measured.")
    ] = "H100",
    gpus: Annotated[int, typer.Option(help="That work on one model; what they say to each other costs nothing.")] = 1,
    num_drafts: Annotated[int | None, typer.Option("--num-drafts", "-k", help="K. Default: the best.")] = None,
    batch_sizes: Annotated[str, typer.Option(help="Sequences at a time, with commas.")] = "1,8,32,128",
    contexts: Annotated[str, typer.Option(help="Tokens of each in the cache, with commas.")] = "1024,8192",
    weight_bits: Annotated[
        int | None, typer.Option(help="Of a weight: 4, 8, 16 or 32. Default: 16; with --gpu cpu 32.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Predicts the time of a token, plain and speculative, from the bytes that a step moves and the operations that it
    does, and up to which batch size speculation pays.

    Nothing is measured but the CPU with --gpu cpu. What the prediction assumes, and how far it was off where it could
    be checked, is in docs/theory.md.
    """
    on_cpu = gpu.lower() == "cpu"
    bits = weight_bits or (32 if on_cpu else 16)
    if bits not in (4, 8, 16, 32):
        refuse("--weight-bits", bits, "4, 8, 16 or 32")
    if num_drafts is not None and num_drafts < 1:
        refuse("--num-drafts", num_drafts, "an integer >= 1: plain decoding is predicted beside it anyway")
    options.check_counts(1, gpus=gpus)
    if on_cpu and gpus > 1:
        refuse("--gpus", f"{gpus} with --gpu cpu", "1")
    rows, tokens = options.read_counts("--batch-sizes", batch_sizes, 1), options.read_counts("--contexts", contexts, 1)
    with options.user_errors():
        from ..evaluation.model_shapes import read_shape
        from ..evaluation.roofline import Pair, gpu_machine
        from ..evaluation.theory import check_rate

        check_rate("alpha", alpha)
        machine = None if on_cpu else gpu_machine(gpu).times(gpus)
        number_bits = 32 if on_cpu else 16
        of_target = read_shape("TARGET", target, bits, number_bits)
        of_draft = read_shape("DRAFT", draft, bits, number_bits)
        shapes = (of_target, of_draft)
        if machine is None:
            from ..evaluation.this_cpu import measure_cpu

            machine = measure_cpu(sum(shape.read * shape.weight_bytes for shape in shapes))
        pair = Pair(of_target, of_draft, machine, alpha)
        if machine.memory is not None and not pair.most_rows(min(tokens)):
            size = f"{sum(s.weights for s in shapes) / 1e9:.3g} GB of weights on {machine.memory / 1e9:g} GB"
            refuse("--gpus", f"{gpus}, with {size}", "as many as hold the weights and the cache of a sequence")
        fitting = {context: pair.most_rows(context) for context in tokens}
        predictions = [pair.best(n, c, num_drafts) for c in tokens for n in rows if n <= fitting[c]]
        pays = {context: pair.pays_up_to(context, num_drafts) for context in tokens}
    if as_json:
        found = {
            "prediction": True,
            "machine": dataclasses.asdict(machine),
            "target": dataclasses.asdict(pair.target),
            "draft": dataclasses.asdict(pair.draft),
            "alpha": alpha,
            "rows": [dataclasses.asdict(p) | {"per_second": p.per_second} for p in predictions],
            "pays_up_to": pays,
            "fits": fitting,
        }
        typer.echo(json.dumps(found))
        return
    typer.echo(f"{WARNING}{_about(pair)}")
    head = ["context", "rows", "K", "tau", "plain ms", "step ms", "of it draft", "speed-up", "tokens/s", "limit"]
    lines = [
        [
            *(str(n) for n in (p.context, p.rows, p.num_drafts)),
            f"{p.tau:.2f}",
            f"{1e3 * p.plain_step:.3g}",
            f"{1e3 * (p.draft_seconds + p.target_seconds):.3g}",
            f"{p.draft_seconds / (p.draft_seconds + p.target_seconds):.0%}",
            f"{p.speedup:.2f}",
            f"{p.per_second:,.0f}",
            f"{p.bound}; {p.operations:.2g} x operations, {p.bytes:.2g} x bytes",
        ]
        for p in predictions
    ]
    print_table(head, lines)
    for context, most in pays.items():
        typer.echo(_pays(context, most, fitting[context], machine.memory is None))


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
