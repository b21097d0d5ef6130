"""The figures of the operations on raw logits: by shape, by setting, and of drawing drafts, and of recurrent layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from cases import GOALS
from figures import mark, milliseconds, number, page, source, spread, table, times_faster
from results import Results

SHOWN = (32000, 128256)  # vocabularies; the JSON may have more


def accepted(row: Mapping) -> str:
    """What a row of ``bench_kernels.py step`` accepts."""
    return "all accepted" if row["drafts"] == "all_accepted" else f"alpha {row['cases']['step']['alpha']:.2f}"


def _faster(ratios: Mapping[str, Mapping], peers: Sequence[str], ours: str = "cpu") -> list[str]:
    """How many times as fast ours is; empty where a peer was not measured."""
    found = [ratios.get(f"{ours}/{peer}") for peer in peers]
    return ["" if ratio is None else spread(times_faster(ratio)) for ratio in found]


def _head(peers: Sequence[str]) -> list[str]:
    return [f"times as fast as {'`torch.compile`' if peer == 'compile' else peer}" for peer in peers]


def steps(name: str, vocabularies: Sequence[int] = SHOWN) -> Callable[[Results], str]:
    """The figure of one file of ``bench_kernels.py step``."""

    def figure(results: Results) -> str:
        r = results[name]
        measured = {key for row in r["rows"] for key in row["ratios"]}
        peers = [peer for peer in ("transformers", "eager", "compile") if f"cpu/{peer}" in measured]
        rows = []
        for row in sorted(r["rows"], key=lambda row: (row["V"], row["B"], row["K"], row["drafts"] != "typical")):
            if row["V"] not in vocabularies:
                continue
            shape = [str(row["V"]), str(row["B"]), str(row["K"]), accepted(row)]
            times = [milliseconds(row["seconds"][ours]) for ours in ("cpu", "cpu+stats")]
            floor = spread(row["ratios"]["cpu/floor_all_rows"])
            rows.append([*shape, *times, *_faster(row["ratios"], peers), floor])
        head = ["V", "B", "K", "drafts", "time", "with q's statistics", *_head(peers), "times the floor"]
        said = (
            f"Random logits in float32. The floor is the bytes of all rows that may be needed, over the bandwidth of "
            f"reading ({r['bandwidth']['read'] / 1e9:.0f} GB/s). {source(results, name)}"
        )
        return page(table(head, rows, mark(results, name)), said)

    return figure


def settings(results: Results) -> str:
    r = results["settings"]
    by_batch: dict[int, dict[str, Mapping]] = {}
    for row in r["rows"]:
        by_batch.setdefault(row["B"], {})[row["drafts"]] = row
    some, whole = (by_batch[1][drafts] for drafts in ("typical", "all_accepted"))
    rows = []
    for case, about in some["cases"].items():
        filters = [f"{name.replace('_', '-')} {value}" for name, value in about["filters"].items()]
        with_stats = some["seconds"].get(f"cpu+stats {case}")
        against = [of["ratios"].get(f"cpu {case}/cpu token none") for of in (some, whole)]
        rows.append(
            [
                ", ".join([f"`{about['rule']}`", *filters]),
                f"{about['mean_emitted']:.2f}",
                milliseconds(some["seconds"][f"cpu {case}"]),
                milliseconds(with_stats) if with_stats else "",
                *("" if ratio is None else spread(ratio) for ratio in against),
                *_faster(some["ratios"], [f"transformers {case}"], f"cpu {case}"),
            ]
        )
    head = ["rule, filters", "emitted", "time", "with q's statistics", "times `token` without filters"]
    said = (
        f"B = {some['B']}, K = {some['K']}, V = {some['V']}, {some['dtype']}, random logits; q is disturbed until "
        f"alpha is {some['cases']['token none']['alpha']:.2f} without filters. {source(results, 'settings')}"
    )
    marked = mark(results, "settings")
    return page(table([*head, "the same, all accepted", *_head(["transformers"])], rows, marked), said)


def _microseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{number(1e6 * seconds)} us"


def goals(results: Results) -> str:
    """Verification on a GPU: our kernels beside their goals, the floor and others', as replayed graphs. transformers'
    function, which no graph can hold, is called from Python, and so is ours beside it."""
    r = results["goals"]
    rows = []
    for row in r["rows"]:
        name, drafts = row["goal"], "typical" if row["drafts"] == "typical" else "all accepted"
        floor = row["cases"][name]["floor_seconds"]["stats"]["floor_all_rows"]
        times = [row["seconds"].get(f"{ours}+stats [cold]", {}).get("median") for ours in ("cuda", "triton")]
        faster = _faster(row["ratios"], ["flashinfer [cold]", "eager [cold]"], "cuda+stats [cold]")
        faster += _faster(row["ratios"], ["transformers"], "cuda+stats")
        shown = [_microseconds(seconds) for seconds in (floor, row.get("goal_seconds"), *times)]
        rows.append([f"`{name}`", drafts, *shown, *faster])
    head = ["case", "drafts", "floor", "goal", "`cuda`", "`triton`"]
    head += _head(["FlashInfer", "eager PyTorch", "transformers"])
    there = {row["goal"] for row in r["rows"]}
    missing = [f"`{case.name}`" for case in GOALS if case.name not in there]
    left_out = f"Not reached in the time that there was: {', '.join(missing)}. " if missing else ""
    said = (
        f"Times are medians of replayed graphs on inputs that no cache holds; transformers is called from Python, and "
        f"so is `cuda` beside it. The floor is the bytes of all rows over the bandwidth of copying "
        f"({r['bandwidth']['copy'] / 1e12:.2f} TB/s). {left_out}{source(results, 'goals')}"
    )
    return page(table(head, rows, mark(results, "goals")), said)


def drafts(results: Results) -> str:
    r, peers, rows = results["draft_step"], ("multinomial", "eager", "compile"), []
    for row in sorted(r["rows"], key=lambda row: (row["V"], row["B"])):
        if row["V"] in SHOWN:
            time = milliseconds(row["seconds"]["cpu"])
            rows.append([str(row["V"]), str(row["B"]), time, *_faster(row["ratios"], peers)])
    head = ["V", "B", "time", *_head(peers)]
    return page(table(head, rows, mark(results, "draft_step")), f"float32. {source(results, 'draft_step')}")


def recurrent(name: str) -> Callable[[Results], str]:
    """The figure of one file of ``bench_recurrent.py``."""

    def figure(results: Results) -> str:
        r = results[name]
        cells: dict[tuple[str, int], dict[int, Mapping]] = {}
        for row in r["rows"]:
            cells.setdefault((row["layer"], row["accepted"]), {})[row["tokens"]] = row
        rows = []
        for (layer, taken), by_tokens in cells.items():
            floors = [spread(row["ratios"]["cpu/floor"]) for row in by_tokens.values()]
            time, faster = (
                milliseconds(by_tokens[4]["seconds"]["cpu"]),
                _faster(by_tokens[4]["ratios"], ["transformers"]),
            )
            rows.append([layer, str(taken), time, *faster, *floors])
        head = ["layer", "taken first", "time at T = 4", "times as fast as transformers at T = 4"]
        head += [f"times the floor at T = {tokens}" for tokens in next(iter(cells.values()))]
        said = f"One row, float32, so many layers in turn that their states exceed the caches. {source(results, name)}"
        return page(table(head, rows, mark(results, name)), said)

    return figure
