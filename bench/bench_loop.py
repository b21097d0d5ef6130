"""Times the decoding loop on pairs of models with random weights: eager, in CUDA graphs and deferred, against
transformers' plain and assisted generation, and plain decoding by the same loop.

    python bench/bench_loop.py --device cuda --pair 8b+1b --json bench/results/loop.json
"""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated

import report
import torch
import typer
from loop_contenders import MODES, Cell, Specdec, Transformers, Window, contenders
from measure import Method, first_line, in_turns, interleave, ratios, summary, synchronize
from specdec import SpeculativeDecoder
from specdec.models.cache.kv_cache import visible_slots
from specdec.models.forward.cached_model import CachedModel
from specdec.models.load.few_bits import round_weights
from transformers import PreTrainedModel
from tunable_pair import PAIRS, TunablePair, named_pair, read_bytes


@torch.inference_mode()
def forward_costs(decoder: SpeculativeDecoder, cell: Cell, graphs: bool, seconds: float) -> dict[str, float]:
    """Seconds of a draft's and a target's forward of one token, and of all forwards of a step together; ``c`` is the
    draft's over the target's. With ``graphs`` as CUDA graphs, on the device's clock."""
    k, context = cell.num_drafts, cell.middle

    def forward(model: CachedModel) -> Callable[[int], Callable[[], object]]:
        cache = model.new_cache(cell.batch, cell.context + cell.room + 1)

        def of_width(width: int) -> Callable[[], object]:
            places = torch.arange(context, context + width, device=model.device).expand(cell.batch, -1).contiguous()
            layout = model.layout(places, places, visible_slots(context + width, cache.capacity))
            tokens = places % model.vocab_size
            return lambda: model(tokens, cache, layout)

        return of_width

    target, draft = forward(decoder.target), forward(decoder.drafter.model)
    step = [draft(2), *[draft(1)] * (k - 1), target(k + 1)]
    calls = {"target": target(1), "draft": draft(1), "step": lambda: [call() for call in step]}
    methods = [Method(name, lambda i, call=call: call()) for name, call in calls.items()]
    for method in [*methods] * 3:  # compiles and allocates
        method.sample()
    synchronize(decoder.target.device)
    methods = [method.captured("cold") if graphs else method for method in methods]
    for method in methods:
        method.pace(decoder.target.device, seconds / (10 * len(methods)))
    samples = interleave(methods, decoder.target.device, seconds)
    found = {m.name: summary(samples[m.key])["median"] for m in methods}
    return found | {"c": found["draft"] / found["target"]}


def measure(
    methods: Sequence[Transformers | Specdec], cell: Cell, device: torch.device, deadline: float, seconds: float
) -> tuple[dict, dict[str, list[float]]]:
    """(methods, forwards and unavailable of a row, tokens a second by method and window).

    On a CPU methods take turns, window by window. On a GPU each runs alone, as caches need not fit side by side.

    Args:
        deadline: on the clock of ``time.perf_counter``; no method begins after it.
        seconds: for the forwards of a mode.
    """
    windows: dict[str, list[Window]] = {}
    rows: list[dict] = []
    costs: dict[str, dict] = {}
    unavailable: dict[str, str] = {}

    def begin(method: Transformers | Specdec) -> None:
        if time.perf_counter() > deadline:
            raise RuntimeError("no time was left for it (--limit)")
        if isinstance(method, Specdec):
            mode = str(method.mode._replace(deferred=False))
            if method.mode.graphs and device.type != "cuda":
                raise RuntimeError("CUDA graphs are of GPUs")
            if method.decoder.most_drafts and mode not in costs:
                try:
                    costs[mode] = forward_costs(method.decoder, cell, method.mode.graphs, seconds)
                except Exception as error:  # out of memory, or what cannot be compiled: a result
                    costs[mode] = {"unavailable": first_line(error)}
                free(device)
        method.open()

    def go_on(method: Transformers | Specdec) -> None:
        windows.setdefault(method.name, []).append(method.window())

    def end(method: Transformers | Specdec) -> None:
        about, mine = method.close(), windows[method.name]
        speeds = summary([w.tokens / w.seconds for w in mine])
        step = summary([w.seconds / w.steps for w in mine])["median"]
        of_steps = {"tau": tau(mine, cell.batch), "tokens": sum(w.tokens for w in mine), "step_seconds": step}
        rows.append({"name": method.name, **of_steps, "tokens_per_second": speeds, **about})
        print(f"{method.name}: {speeds['median']:.1f} tokens/s", flush=True)  # a row is written once it is whole

    for group in [methods] if device.type == "cpu" else [[m] for m in methods]:
        works = [*((begin, m) for m in group), *((go_on, m) for m in in_turns(group, cell.windows))]
        for work, method in [*works, *((end, m) for m in group)]:
            try:
                if method.name not in unavailable:
                    work(method)
            except Exception as error:  # out of memory, or what cannot be compiled: a result
                unavailable[method.name] = first_line(error)
        for method in group:
            method.scheduler = None  # frees caches and graphs, whatever became of it
        free(device)
    speeds = {row["name"]: [w.tokens / w.seconds for w in windows[row["name"]]] for row in rows}
    return {"methods": rows, "forwards": costs, "unavailable": unavailable}, speeds


def free(device: torch.device) -> None:
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def tau(windows: Sequence[Window], batch: int) -> float:
    """Tokens of a sequence in a step."""
    return sum(w.tokens for w in windows) / sum(w.steps for w in windows) / batch


# ---- What it is compared with


def fastest(speeds: Mapping[str, list[float]], *words: str) -> str | None:
    """By the median of tokens a second, of the methods whose names have all these words."""
    named = [n for n in speeds if {*words} <= {*n.replace("+", " ").split()}]
    return max(named, key=lambda n: summary(speeds[n])["median"], default=None)


def judged(row: dict, speeds: Mapping[str, list[float]], cell: Cell) -> dict[str, object]:
    """Compares the fastest of ours with the others, and with what its forwards allow (Leviathan et al. 2023): a step
    that takes K c + 1 of plain decoding's emits tau tokens.

    Args:
        row: with ``methods`` and ``forwards``.
        speeds: tokens a second by method and window.
    """
    mine, baseline = fastest(speeds, "specdec"), fastest(speeds, "plain")
    found: dict[str, object] = {"fastest": mine, "baseline": baseline}
    if mine is None:
        return found
    others = {"baseline": baseline, "transformers": fastest(speeds, "transformers")}
    others["assisted"] = fastest(speeds, "assisted")
    found["peers"] = {name: other for name, other in others.items() if other is not None}
    over = {name: ratios(speeds[mine], speeds[other]) for name, other in others.items() if other is not None}
    found["times"] = over
    costs = row["forwards"].get("+".join(w for w in mine.split()[-1].split("+") if w != "deferred") or "eager", {})
    if "c" in costs:
        of_mine = next(m for m in row["methods"] if m["name"] == mine)
        found["outside_models"] = 1 - costs["step"] / of_mine["step_seconds"]  # below 0 where measuring is less exact
        if "baseline" in over:
            found["of_allowed"] = over["baseline"]["median"] / of_mine["tau"] * (cell.num_drafts * costs["c"] + 1)
    return found


def floors(pair: TunablePair, cell: Cell, ceilings: dict[str, float]) -> dict[str, dict[str, float]]:
    """The bytes that forwards must read in the middle of what is timed, which are weights and what is cached, and the
    seconds in which this device reads them: of a target's and a draft's forward, and of a step with drafts."""

    def read_by(model: PreTrainedModel) -> int:
        config, dtype = model.config, model.dtype
        cached = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * dtype.itemsize
        return read_bytes(model) + cell.batch * cell.middle * cached

    sizes = {"target": read_by(pair.target), "draft": read_by(pair.draft)}
    sizes["step"] = sizes["target"] + cell.num_drafts * sizes["draft"]
    return {"bytes": sizes, "seconds": {name: report.floor_seconds(size, ceilings) for name, size in sizes.items()}}


def main(
    device: report.DeviceName = "cpu",
    pair: Annotated[str, typer.Option(help=f"one of {', '.join(PAIRS)}")] = "tiny",
    alpha: Annotated[float, typer.Option(help="the acceptance that the pair is tuned to, between 0 and 1")] = 0.8,
    batches: Annotated[str, typer.Option("--batches", "-B")] = "1,8,32",
    contexts: Annotated[str, typer.Option(help="tokens of the prompts")] = "512,8192",
    num_drafts: Annotated[str, typer.Option("--num-drafts", "-K", help="numbers separated by commas")] = "4",
    new_tokens: Annotated[int, typer.Option(min=1, help="of a sequence in a window")] = 128,
    rounds: Annotated[int, typer.Option(min=1, help="windows of a method")] = 5,
    modes: Annotated[
        str | None, typer.Option(help=f"some of {', '.join(MODES)}; default: all that the device has")
    ] = None,
    draft_bits: Annotated[
        int | None, typer.Option(help="8: of the draft, as load_pair(draft_bits=8) rounds it")
    ] = None,
    assisted: Annotated[bool, typer.Option(help="transformers' assisted generation, too, at batch 1")] = True,
    limit: Annotated[float, typer.Option(min=0, help="seconds after which no method begins")] = float("inf"),
    threads: report.Threads = None,
    quick: report.Quick = False,
    json_path: report.JsonPath = None,
) -> None:
    """Times the loop on pairs with random weights, against transformers and its own modes."""
    start = time.perf_counter()
    if quick:
        contexts, new_tokens, rounds = "16", 3, 1
    where = report.read_device(device)
    report.read_names("pair", pair, PAIRS)
    of_device = [name for name, m in MODES.items() if where.type == "cuda" or not m.graphs]
    asked = of_device if modes is None else report.read_names("modes", modes, MODES)
    sizes, lengths = report.read_integers("batches", batches), report.read_integers("contexts", contexts)
    ks = report.read_integers("num-drafts", num_drafts)
    if draft_bits not in (None, 8):
        report.refuse("draft-bits", draft_bits, "8, or none")
    if not 0 < alpha < 1:
        report.refuse("alpha", alpha, "between 0 and 1, both excluded")
    results = report.Report("loop", where, json_path, threads, quick=quick, pair=pair, shapes=[*map(str, PAIRS[pair])])
    ceilings = results.content["bandwidth"] = report.bandwidth(where, quick)
    tuned = named_pair(pair, where)
    of_pair = {"expected_alpha": tuned.calibrate(alpha, 1.0), "eps": tuned.eps, "cost_ratio": tuned.cost_ratio}
    if draft_bits is not None:
        tuned.draft = round_weights(copy.deepcopy(tuned.draft).cpu(), 8, where)
        of_pair |= {"draft_bits": 8, "expected_alpha": tuned.expected_alpha(1.0), "cost_ratio": tuned.cost_ratio}
    cells = [Cell(b, c, new_tokens, rounds, k) for c in lengths for b in sizes for k in ks]
    for cell in sorted(cells, key=lambda cell: cell.batch * cell.context):
        row, speeds = measure(
            contenders(tuned, cell, asked, assisted), cell, where, start + limit, 0.1 if quick else 4.0
        )
        row["found"], row["floor"] = judged(row, speeds, cell), floors(tuned, cell, ceilings)
        about = {"B": cell.batch, "context": cell.context, "new_tokens": new_tokens, "K": cell.num_drafts}
        results.add({**about, **of_pair, **row})
        title = f"{pair}, B={cell.batch}, context {cell.context}, K={cell.num_drafts}"
        results.show(title, row["methods"], ("name", "tokens_per_second", "step_seconds", "tau", "tokens", "alpha"))
        said = {f"{name}: at least": seconds for name, seconds in row["floor"]["seconds"].items()}
        said |= {f"times {name}": speed for name, speed in row["found"].get("times", {}).items()}
        results.say(said | {f"{name}, not measured": reason for name, reason in row["unavailable"].items()})
    results.finish()


if __name__ == "__main__":
    typer.run(main)
