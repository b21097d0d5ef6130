"""The figures of the pages, each a function from results to Markdown; ``tables.py`` puts them in their places."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from measure import summary


class Missing(Exception):
    """A result that does not exist, or is not whole; its name is the argument."""


class Results:
    """The results of a folder, by name."""

    def __init__(self, folder: Path):
        self.folder, self._read = folder, dict[str, dict]()

    def __getitem__(self, name: str) -> dict:
        """
        Raises:
            Missing: there is no such file, it is not whole, or it comes from a smoke run.
        """
        if name not in self._read:
            path = self.folder / f"{name}.json"
            content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
            if not content.get("complete") or content.get("quick"):
                raise Missing(name)
            self._read[name] = content
        return self._read[name]


# ---- Numbers, rows and tables


def number(value: float) -> str:
    """Three digits, and never an exponent: 0.0376, 1.57, 12.3, 1,234."""
    return f"{value:,.0f}" if abs(value) >= 99.95 else f"{value:#.3g}".rstrip(".")


def spread(of: Mapping[str, float]) -> str:
    """The median, and the quartiles in brackets."""
    return f"{number(of['median'])} ({number(of['q1'])} to {number(of['q3'])})"


def times_faster(of: Mapping[str, float]) -> dict[str, float]:
    """Of a ratio of seconds, ours over theirs: how many times as fast ours is. Quartiles change places."""
    return {"median": 1 / of["median"], "q1": 1 / of["q3"], "q3": 1 / of["q1"]}


def milliseconds(of: Mapping[str, float]) -> str:
    return f"{number(1e3 * of['median'])} ms"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def not_measured(missing: Missing) -> str:
    return f"Not measured yet: `python bench/regenerate.py {missing}`."


def source(name: str, result: dict) -> str:
    """Where a figure comes from: the file, the commit, the day, the kernels' instructions and the command."""
    commit = f"{result['commit'][:10]}{' with changes' if result['dirty'] else ''}"
    about = f"commit {commit}, {result['date'][:10]}, {result['instruction_set']}, {result['threads']} threads"
    return f"`results/cpu/{name}.json` ({about}): `{_shown(result['command'])}`"


def _shown(command: str) -> str:
    """A command as a reader can repeat it: without the file that it wrote."""
    return command.split(" --json ")[0].removesuffix(" --json")


def machine(results: Results) -> str:
    r = results["speculative_step"]
    versions, hardware = r["versions"], r["hardware"]
    return (
        f"{r['threads']} threads on {hardware['cores']} cores of an {hardware['cpu']} ({r['instruction_set']}) in a "
        f"virtual machine,\nfloat32, torch {versions['torch'].split('+')[0]}, transformers {versions['transformers']}, "
        f"Python {versions['python']}."
    )


# ---- The README


def readme(results: Results) -> str:
    head = ("measured", "against", "times as fast (quartiles)")
    lines = []
    for row in (
        *(_readme_compared(other) for other in ("plain", "assisted")),
        _readme_wide,
        *(_readme_step(*case) for case in README_STEPS),
        _readme_filters,
    ):
        try:
            lines.append(row(results))
        except Missing as missing:
            lines.append((not_measured(missing), "", ""))
    return table(head, lines)


README_STEPS = (  # the result, B, K, V, drafts
    ("speculative_step", 1, 5, 128256, "typical"),
    ("speculative_step", 8, 5, 128256, "typical"),
    ("speculative_step", 1, 8, 32000, "all_accepted"),
    ("speculative_step.avx2", 1, 5, 128256, "typical"),
    ("speculative_step.avx2", 8, 5, 128256, "typical"),
    ("speculative_step.avx2", 1, 8, 32000, "all_accepted"),
)
Row = tuple[str, str, str]


def _readme_compared(other: str) -> Callable[[Results], Row]:
    names = {"plain": "transformers' `generate`", "assisted": "transformers' assisted generation"}

    def row(results: Results) -> Row:
        r = results["compare"]
        by_name = {m["name"]: m for m in r["methods"]}
        ours, theirs = by_name["specdec"], by_name[other]
        measured = (
            f"embedded pair, greedy, K = {ours['num_drafts']}: {number(ours['tokens_per_second'])} tokens/s"
            if other == "plain"
            else "the same"
        )
        return measured, f"{names[other]}: {number(theirs['tokens_per_second'])} tokens/s", _by_round(r, other)

    return row


def _by_round(result: dict, other: str) -> str:
    return spread(summary(result["ratios"][f"specdec/{other}"]["per_round"]))


def _readme_wide(results: Results) -> Row:
    rows = [r for r in _of_part(results["throughput"], "rows") if r["temperature"] == 0]
    most = max(r["rows"] for r in rows)
    plain, ours = (next(r for r in rows if (r["rows"], r["method"]) == (most, m)) for m in ("plain", "K adapts"))
    speeds = [number(r["tokens_per_second"]["median"]) for r in (ours, plain)]
    return (
        f"the same pair, {most} rows of a `Scheduler`, K adapts: {speeds[0]} tokens/s",
        f"plain decoding by the same: {speeds[1]} tokens/s",
        spread(ours["times_plain"]),
    )


def _readme_step(name: str, B: int, K: int, V: int, drafts: str) -> Callable[[Results], Row]:
    def row(results: Results) -> Row:
        wanted = (B, K, V, drafts)
        found = next(r for r in results[name]["rows"] if (r["B"], r["K"], r["V"], r["drafts"]) == wanted)
        isa = results[name]["instruction_set"].replace("avx", "AVX-") if "." in name else ""
        shape = f"`speculative_step`{f' with {isa}' if isa else ''}, B = {B}, K = {K}, V = {V}, {_accepted(found)}"
        ratio = spread(times_faster(found["ratios"]["cpu/transformers"]))
        return f"{shape}: {milliseconds(found['seconds']['cpu'])}", "transformers' `_speculative_sampling`", ratio

    return row


def _accepted(row: dict, case: str = "step") -> str:
    return "all accepted" if row["drafts"] == "all_accepted" else f"alpha {row['cases'][case]['alpha']:.2f}"


def _readme_filters(results: Results) -> Row:
    row = next(r for r in results["settings"]["rows"] if r["drafts"] == "typical")
    case = "token top_k+top_p"
    ratio = spread(times_faster(row["ratios"][f"cpu {case}/transformers {case}"]))
    shape = f"B = {row['B']}, K = {row['K']}, V = {row['V']}, top-k 50 and top-p 0.95"
    return (
        f"{shape}: {milliseconds(row['seconds'][f'cpu {case}'])}",
        "transformers' processors and `_speculative_sampling`",
        ratio,
    )


# ---- Decoding


def compare(results: Results) -> str:
    r = results["compare"]
    names = {"plain": "target alone (`generate`)", "assisted": "assisted generation (`generate`)"}
    lines, about = [], {}
    for m in r["methods"]:
        about[m["name"]] = m
        faster = _by_round(r, m["name"]) if m["name"] != "specdec" else ""
        k = m.get("num_drafts", m.get("num_assistant_tokens", ""))
        speed = spread(summary(m["spread"]["tokens_per_second"]["per_round"]))
        lines.append((names.get(m["name"], "specdec"), str(k), speed, faster))
    ours = about["specdec"]
    equal = "equal" if r["greedy_equal"] else "not equal"
    return (
        table(("", "K", "tokens/s", "specdec is faster by"), lines)
        + f"\n\nThe acceptance rate is {ours['acceptance_rate']:.2f}, alpha {ours['alpha']:.2f} and tau {ours['tau']:.2f}; "
        f"{100 * ours['loop_fraction']:.1f} % of specdec's\ntime is spent outside the two models. Greedy texts of "
        f"specdec and of the target alone are {equal}.\n{source('compare', r)}"
    )


def drafters(results: Results) -> str:
    r = results["drafters"]
    loads = r["rows"]
    by_load = [{_general(m["name"]): m for m in load["methods"]} for load in loads]
    head = ["drafter"] + [f"{load['workload']}: decoding | with prefill | tau" for load in loads]
    lines = []
    for name in (n for n in by_load[0] if n != "plain"):
        cells = [
            f"{spread(m['speedup'])} | {number(m['speedup_with_prefill']['median'])} | {m['tau']:.2f}"
            for m in (methods[name] for methods in by_load)
        ]
        lines.append([name, *cells])
    head_cells = " | ".join(head).split(" | ")
    body = table(head_cells, [" | ".join(line).split(" | ") for line in lines])
    of_that = [m["of_that"]["median"] for methods in by_load for n, m in methods.items() if n != "plain"]
    over_tau = [m["efficiency"] for methods in by_load for n, m in methods.items() if n != "plain"]
    return (
        f"{body}\n\nTimes plain decoding by the same loop, {r['prompts']} prompts of {r['new_tokens']} new tokens. All "
        f"drafters reach {100 * min(of_that):.0f} to {100 * max(of_that):.0f} % of what\ntheir forwards alone allow; over "
        f"tau, speed-ups are {min(over_tau):.2f} to {max(over_tau):.2f}.\n{source('drafters', r)}"
    )


def _general(name: str) -> str:
    """Early exits end after a quarter of the layers, which is another number for each target."""
    return f"a quarter of the layers, {name.split(', ')[1]}" if name.startswith("early exit") else name


def _of_part(result: dict, part: str) -> list[dict]:
    return [row for row in result["rows"] if row["part"] == part]


def throughput(results: Results) -> str:
    r = results["throughput"]
    rows = _of_part(r, "rows")
    numbers = [*dict.fromkeys(row["rows"] for row in rows)]
    methods = [*dict.fromkeys(row["method"] for row in rows)]
    lines = []
    for temperature in dict.fromkeys(row["temperature"] for row in rows):
        for n in numbers:
            found = {row["method"]: row for row in rows if (row["rows"], row["temperature"]) == (n, temperature)}
            cells = [f"{temperature:g}", str(n)]
            for method in methods:
                cells.append(number(found[method]["tokens_per_second"]["median"]))
            cells += [spread(found[m]["times_plain"]) for m in methods if m != "plain"]
            cells += [number(found[m][f"times_{numbers[0]}_row"]["median"]) for m in methods]
            lines.append(cells)
    head = ["temperature", "rows", *(f"{m}: tokens/s" for m in methods)]
    head += [f"{m}: times plain" for m in methods if m != "plain"] + [f"{m}: times {numbers[0]} row" for m in methods]
    return f"{table(head, lines)}\n\n{source('throughput', r)}"


def admission(results: Results) -> str:
    r = results["throughput"]
    (row,) = _of_part(r, "admission")
    return (
        f"Of {row['requests']} requests with log-normal lengths ({number(row['new_tokens'])} new tokens in all), refilled "
        f"rows are busy {row['busy']:.0%} of the time\n(whole batches: {row['busy_whole_batches']:.0%}), and decode "
        f"{number(row['times_whole_batches'])} times as many tokens/s as the same rows that wait for whole batches."
    )


def memory(results: Results) -> str:
    r = results["throughput"]
    (row,) = _of_part(r, "memory")
    first, last = (row["growth"]["resident"][q] / 1e6 for q in ("first_quarter", "last_quarter"))
    stay = "moved" if row["large_storages_moved"] else "stay where they are"
    tensors = row["growth"]["tensors"]
    kept = "stays the same" if tensors["first_quarter"] == tensors["last_quarter"] else "changes"
    return (
        f"Over {number(row['tokens'])} tokens through one scheduler, caches and weights "
        f"({number(row['cache_and_weight_bytes'] / 1e6)} MB) {stay}, the number of tensors\n{kept}, and the process goes "
        f"from {number(first)} to {number(last)} MB (medians of the first and the last quarter)."
    )


def rules(results: Results) -> str:
    r = results["rules"]
    rows = {(row["rule"], row["filters"], row["K"]): row for row in r["rows"]}
    settings = [*dict.fromkeys((filters, k) for _, filters, k in rows)]
    settings.sort(key=lambda s: (s[0] != "none", s[1]))
    shown = {"none": "", "top_k+top_p": ", top-k 50 and top-p 0.95"}
    head = ["rule", *(f"K = {k}{shown[filters]}" for filters, k in settings)]
    lines = []
    for rule in dict.fromkeys(rule for rule, _, _ in rows):
        found = [rows[rule, *setting] for setting in settings]
        lines.append([f"`{rule}`", *(f"{row['tau']:.2f} +- {row['tau_standard_error']:.2f}" for row in found)])
    return (
        f"{table(head, lines)}\n\ntau with its standard error over {r['texts']} sampled texts of {r['max_new_tokens']} "
        f"tokens. {source('rules', r)}"
    )


# ---- Kernels


def steps(name: str) -> Callable[[Results], str]:
    def figure(results: Results) -> str:
        r = results[name]
        peers = [
            p for p in ("transformers", "eager", "compile") if any(f"cpu/{p}" in row["ratios"] for row in r["rows"])
        ]
        head = ["V", "B", "K", "drafts", "time", "with q's statistics", *(f"times as fast as {p}" for p in peers)]
        lines = []
        for row in sorted(r["rows"], key=lambda row: (row["V"], row["B"], row["K"], row["drafts"] != "typical")):
            cells = [str(row["V"]), str(row["B"]), str(row["K"]), _accepted(row)]
            cells += [milliseconds(row["seconds"][ours]) for ours in ("cpu", "cpu+stats")]
            for peer in peers:
                ratio = row["ratios"].get(f"cpu/{peer}")
                cells.append("" if ratio is None else spread(times_faster(ratio)))
            cells.append(spread(row["ratios"]["cpu/floor_all_rows"]))
            lines.append(cells)
        read = f"{r['bandwidth']['read'] / 1e9:.0f} GB/s"
        return (
            f"{table([*head, 'times the floor'], lines)}\n\nThe floor is the bytes of all rows that may be needed, over "
            f"the bandwidth of reading ({read}). {source(name, r)}"
        )

    return figure


def settings(results: Results) -> str:
    r = results["settings"]
    by_drafts = {row["drafts"]: row for row in r["rows"]}
    row, full = by_drafts["typical"], by_drafts["all_accepted"]
    head = ("rule, filters", "emitted", "time", "with q's statistics", "against `token` without filters")
    lines = []
    for case, about in row["cases"].items():
        plain, peer = f"cpu {case}/cpu token none", f"cpu {case}/transformers {case}"
        filters = ", ".join(f"{k.replace('_', '-')} {v}" for k, v in about["filters"].items())
        lines.append(
            (
                f"`{about['rule']}`{', ' if filters else ''}{filters}",
                f"{about['mean_emitted']:.2f}",
                milliseconds(row["seconds"][f"cpu {case}"]),
                milliseconds(row["seconds"][key]) if (key := f"cpu+stats {case}") in row["seconds"] else "",
                spread(row["ratios"][plain]) if plain in row["ratios"] else "",
                spread(full["ratios"][plain]) if plain in full["ratios"] else "",
                spread(times_faster(row["ratios"][peer])) if peer in row["ratios"] else "",
            )
        )
    about = f"B = {row['B']}, K = {row['K']}, V = {row['V']}, {row['dtype']}"
    return (
        f"{table((*head, 'the same, all accepted', 'times as fast as transformers'), lines)}\n\n{about}, q disturbed "
        f"until alpha is {row['cases']['token none']['alpha']:.2f} without filters. {source('settings', r)}"
    )


def drafts(results: Results) -> str:
    r = results["draft_step"]
    peers = ("multinomial", "eager", "compile")
    lines = []
    for row in sorted(r["rows"], key=lambda row: (row["V"], row["B"])):
        ratios = [row["ratios"].get(f"cpu/{peer}") for peer in peers]
        faster = ["" if ratio is None else spread(times_faster(ratio)) for ratio in ratios]
        lines.append((str(row["V"]), str(row["B"]), milliseconds(row["seconds"]["cpu"]), *faster))
    head = ("V", "B", "time", *(f"times as fast as {peer}" for peer in peers))
    return f"{table(head, lines)}\n\n{source('draft_step', r)}"


# ---- Exactness


def verification(results: Results) -> str:
    head = ("dtype", "texts", "compared", "left transformers'", "unlike plain", "bugs")
    lines = []
    for name in ("verify", "verify.bfloat16"):
        r = results[name]
        for check in dict.fromkeys(cell["check"] for cell in r["texts"]):
            cells = [cell for cell in r["texts"] if cell["check"] == check]
            total = {key: sum(cell[key] for cell in cells) for key in ("texts", "tokens", "differing", "unlike_plain")}
            left = f"{total['differing']}"
            if total["differing"]:
                left += f", once in {total['tokens'] / total['differing']:.0f} tokens"
            bugs = sum(cell["bugs"] for cell in cells)
            compared = f"{total['texts']}, {number(total['tokens'])} tokens"
            lines.append((r["environment"]["dtype"], check, compared, left, str(total["unlike_plain"]), str(bugs)))
    r = results["verify"]
    tests = [test for cell in r["distributions"] for test in cell["tests"]]
    margin = min(test["p_value"] / test["level"] for test in tests)
    samples = statistics.mode(cell["samples"] for cell in r["distributions"])
    said = f"All {len(tests)} tests of the distribution" if r["passed"] else f"Of {len(tests)} tests, not all"
    return (
        f"{table(head, lines)}\n\n{said} ({number(samples)} texts each) passed; the closest had {number(margin)} times "
        f"its level.\n\n{source('verify', r)}, {source('verify.bfloat16', results['verify.bfloat16'])}"
    )


FIGURES: dict[str, Callable[[Results], str]] = {
    "machine": machine,
    "readme": readme,
    "compare": compare,
    "drafters": drafters,
    "throughput": throughput,
    "admission": admission,
    "memory": memory,
    "rules": rules,
    "speculative_step": steps("speculative_step"),
    "speculative_step.avx2": steps("speculative_step.avx2"),
    "settings": settings,
    "draft_step": drafts,
    "verification": verification,
}
