"""The figures of decoding: every method, against transformers, by rows and by load, and whether it is exact."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from figures import mark, number, page, source, spread, table
from measure import AGAIN, PLAIN, ratios, summary
from results import Results
from specdec.evaluation.report import fastest_of_each, read_results, sections_of
from specdec.evaluation.report.kinds import lines_of, over
from specdec.evaluation.report.plot import Plot
from specdec.evaluation.report.results import ASSISTED, Setting

if TYPE_CHECKING:
    from specdec.evaluation.report.results import Cell

AUTO = "auto"  # as bench_lengths.py names the adaptive K
# What the README has pictures and lines of: one sequence at a time of a real model.
README, SAMPLED, PICTURED = Setting(0.0), Setting(1.0), "smollm2"
PICTURES = {"speed.svg": f"speed-{README.file_name}", "speed_by_kind.svg": f"kinds-{README.file_name}"}  # in docs/
SLOWER = 0.98  # times plain decoding; what is nearer to it is called noise


# ---- specdec bench


def texts_of_bench(result: Mapping) -> str:
    prompts = result["prompts"]
    kinds = len({prompt["category"] for prompt in prompts})
    return f"{len(prompts)} prompts of {kinds} kinds, up to {result['settings']['max_new_tokens']} new tokens each"


def bench(name: str, every_k: bool = False) -> Callable[[Results], str]:
    """A file of ``specdec bench``: by setting, each method at its fastest K, or with every K; and by kind of prompt
    where the file has the times of prompts."""

    def figure(results: Results) -> str:
        read, parts = read_results(results[name]), []
        said, slower = f"{model_of_bench(results[name])}: {texts_of_bench(results[name])}.", []
        for setting, cells in read.by_setting().items():
            rows = [
                (
                    c.name,
                    quartiles(c.speed),
                    quartiles(c.over_plain),
                    quartiles(c.over_transformers),
                    two(c.alpha),
                    two(c.tau),
                )
                for c in (cells if every_k else fastest_of_each(cells))
            ]
            head = ("", "tokens/s", "times plain", "times transformers", "alpha", "tau")
            parts += [f"{setting.words[0].upper()}{setting.words[1:]}:", table(head, rows, mark(results, name))]
            if lines := lines_of(cells):
                head = ("times transformers, by kind", *(c.name for c in lines))
                medians = [[kind, *(number(of[kind].median) for of in lines.values())] for kind in cells[0].by_kind]
                parts += [table(head, medians, mark(results, name))]
                slower.append(f"{setting.words}: {losses(cells)}")
        said += f" Slower than plain decoding by specdec: {'; '.join(slower)}." if slower else ""
        verdicts = "; ".join(verdict.words for verdict in read.verdicts if verdict.words)
        return page(*parts, f"{said} Verdicts: {verdicts}. {source(results, name)}")

    return figure


def model_of_bench(result: Mapping) -> str:
    """The target and its dtype."""
    return f"{result['models']['target']['name'].rsplit('/')[-1]} in {result['environment']['dtype']}"


def losses(cells: Sequence[Cell]) -> str:
    """The kinds of prompts with which a method of ours is slower than plain decoding, by medians."""
    found, plain = [], next(c for c in cells if c.series.method == PLAIN)
    for cell in (c for c in fastest_of_each(cells) if not c.is_baseline and c.series.method != ASSISTED):
        times = {kind: over(speeds, plain.by_kind[kind]).median for kind, speeds in cell.by_kind.items()}
        slower = [f"{kind} ({number(value)})" for kind, value in times.items() if value < SLOWER]
        found += [f"{cell.name} with {', '.join(slower)}"] if slower else []
    return "; ".join(found) or "no method of specdec with any kind of prompt"


def pictures(results: Results) -> dict[str, Plot]:
    """The README's, by the names of their files."""
    plots = {plot.name: plot for section in sections_of(read_results(results[PICTURED])) for plot in section.plots}
    return {file: plots[name] for file, name in PICTURES.items()}


def images(results: Results) -> str:
    """The README's line with its pictures, whose texts are those of the report."""
    shown = pictures(results).items()
    return " ".join(f"![{plot.title}. {plot.says}{mark(results, PICTURED)}](docs/{file})" for file, plot in shown)


def fastest(result: Mapping, setting: Setting = README) -> tuple[Cell, dict[str, Cell]]:
    """The fastest method with drafts, and each method's fastest cell."""
    cells = read_results(result).by_setting()[setting]
    best_of_each = fastest_of_each(cells)
    best = next(c for c in best_of_each if not c.is_baseline and c.series.method != ASSISTED)
    return best, {c.series.method: c for c in reversed(best_of_each)}


def faster(result: Mapping, best: Cell, other: Cell) -> str:
    """How many times as fast, round by round."""
    by_id = {cell["id"]: [r["tokens_per_second"] for r in cell["rounds"]] for cell in result["cells"]}
    return spread(ratios(by_id[best.id], by_id[other.id]))


def speed(cell: Cell) -> str:
    assert cell.speed is not None
    return f"{number(cell.speed.median)} tokens/s"


def quartiles(of: tuple[float, float, float] | None) -> str:
    """Of a median and its quartiles."""
    return "" if of is None else spread(dict(zip(("median", "q1", "q3"), of, strict=True)))


def two(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


# ---- specdec compare and specdec verify


def compare(name: str) -> Callable[[Results], str]:
    def figure(results: Results) -> str:
        r, rows = results[name], []
        names = {"plain": "target alone (`generate`)", "assisted": "assisted generation (`generate`)"}
        for m in r["methods"]:
            k = m.get("num_drafts", m.get("num_assistant_tokens", ""))
            speeds = spread(summary(m["spread"]["tokens_per_second"]["per_round"]))
            over = r["ratios"].get(f"specdec/{m['name']}")
            times = "" if over is None else spread(summary(over["per_round"]))
            rows.append((names.get(m["name"], m["name"]), str(k), speeds, times))
        ours = next(m for m in r["methods"] if m["name"] == "specdec")
        equal = "equal" if r["greedy_equal"] else "not equal"
        said = (
            f"The prompts of `specdec compare`: beginnings of code, as the pair was trained on. Of the drafts, "
            f"{100 * ours['acceptance_rate']:.0f} % are accepted (of those that are tested, alpha, "
            f"{100 * ours['alpha']:.0f} %), and a step emits {ours['tau']:.2f} tokens; "
            f"{number(100 * ours['loop_fraction'])} % of specdec's time is spent outside the two models. The texts of "
            f"specdec and of the target alone are {equal}. {source(results, name)}"
        )
        return page(table(("", "K", "tokens/s", "specdec is faster by"), rows, mark(results, name)), said)

    return figure


def verification(results: Results) -> str:
    head = ("dtype", "texts", "compared", "left transformers'", "unlike plain", "bugs")
    names, rows = ("verify", "verify.bfloat16"), []
    for name in names:
        r = results[name]
        for check in dict.fromkeys(cell["check"] for cell in r["texts"]):
            keys = ("texts", "tokens", "differing", "unlike_plain", "bugs")
            cells = [cell for cell in r["texts"] if cell["check"] == check]
            texts, tokens, differing, unlike, bugs = (sum(cell[key] for cell in cells) for key in keys)
            left = f"{differing}, once in {tokens / differing:.0f} tokens" if differing else "0"
            dtype = f"{r['environment']['dtype']}{mark(results, name)}"
            rows.append((dtype, check, f"{texts} texts, {tokens:,} tokens", left, str(unlike), str(bugs)))
    tested = results["verify"]["distributions"]
    tests = [test for cell in tested for test in cell["tests"]]
    closest = min(test["p_value"] / test["level"] for test in tests)
    said = (
        f"{sum(test['passed'] for test in tests)} of {len(tests)} tests of the distribution passed "
        f"({max(cell['samples'] for cell in tested)} texts each); the lowest p value was {number(closest)} times its "
        f"level. {source(results, *names)}"
    )
    return page(table(head, rows), said)


# ---- Races (race.py)


def texts_of_race(row: Mapping) -> str:
    shortest, longest = row["new_tokens"]
    return f"prompts of {row['prompt_tokens']} tokens of unseen code, {shortest} to {longest} new ones each"


def temperature(value: float) -> str:
    return "greedy" if value == 0 else f"temperature {value:g}"


def by_width(methods: Mapping[str, Mapping], drafter: str) -> dict[str, float]:
    """Times plain decoding of a drafter of bench_lengths.py, by K: "K = 1", ..., "K adapts"."""
    found = {n.removeprefix(f"{drafter}, "): m["times_plain"]["median"] for n, m in methods.items() if drafter in n}
    return {"K adapts" if k == AUTO else k.replace("=", " = "): times for k, times in found.items()}


def of_best(methods: Mapping[str, Mapping], drafter: str) -> float:
    """Speed of the adaptive K over that of the best of plain decoding and the drafter's fixed K."""
    speeds = {n: m["tokens_per_second"]["median"] for n, m in methods.items() if n == PLAIN or drafter in n}
    mine = speeds.pop(f"{drafter}, {AUTO}")
    return mine / max(speeds.values())


def lengths(results: Results) -> str:
    r = results["lengths"]
    rows, worst = [], {"plain": [], "best": []}
    cells = sorted(r["rows"], key=lambda row: (row["temperature"], row["rows"]))
    drafters = dict.fromkeys(n.split(",")[0] for row in cells for n in row["methods"] if n not in (PLAIN, AGAIN))
    widths = dict.fromkeys(k for row in cells for d in drafters for k in by_width(row["methods"], d))
    for drafter in drafters:
        for row in cells:
            times, best = by_width(row["methods"], drafter), of_best(row["methods"], drafter)
            worst["plain"].append(times["K adapts"])
            worst["best"].append(best)
            found = [number(times[k]) if k in times else "" for k in widths]
            again = spread(row["methods"][AGAIN]["times_plain"])
            rows.append([drafter, temperature(row["temperature"]), str(row["rows"]), *found, number(best), again])
    head = ["drafter", "", "rows", *widths, "of the best", "plain again"]
    said = (
        f"Times plain decoding with as many rows, with rule `{r['rule']}`: {texts_of_race(cells[0])}. *Of the best*: "
        f"the adaptive K over the best of plain decoding and the fixed K, by medians. At worst it has "
        f"{number(min(worst['best']))} of these and {number(min(worst['plain']))} of plain decoding. "
        f"{source(results, 'lengths')}"
    )
    return page(table(head, rows, mark(results, "lengths")), said)


def on_a_gpu(results: Results) -> str:
    r, rows = results["decode"], []
    for row in r["rows"]:
        plain, mine = (row["found"][name] for name in ("baseline", "fastest"))
        of = {method["name"]: method for method in row["methods"]}
        speeds = [spread(of[name]["tokens_per_second"]) for name in ("transformers", plain, mine)]
        times = [spread(row["found"]["times"][name]) for name in ("baseline", "transformers")]
        steps = [row["B"] * of[name]["tau"] / of[name]["tokens_per_second"]["median"] for name in (plain, mine)]
        seconds = [f"{number(1e3 * step)} ms" for step in (*steps, next(iter(row["forwards"].values()))["draft"])]
        rows.append([str(row["B"]), *speeds, *times, f"{of[mine]['tau']:.2f}", *seconds])
    head = ["sequences", "transformers, tokens/s", "plain", f"K = {r['rows'][0]['K']}", "times plain"]
    head += ["times transformers", "tau", "a plain step", "with drafts", "draft's forward"]
    said = (
        f"Random weights of the shapes of Llama-3.1-8B and Llama-3.2-1B, whose acceptance is set to "
        f"{r['rows'][0]['expected_alpha']:.2f}; bfloat16, temperature 1, prompts of {r['rows'][0]['context']} tokens; "
        f"CUDA graphs, one step ahead of the host. {source(results, 'decode')}"
    )
    return page(table(head, rows, mark(results, "decode")), said)


def load_aware(results: Results) -> str:
    r = results["load_aware"]
    adaptive, capped = "K adapts", "K adapts, requests with num_drafts=0"
    fixed = [name for name in r["rows"][0]["methods"] if name.startswith("K=")]
    rows = []
    for row in r["rows"]:
        times = {name: method["times_plain"] for name, method in row["methods"].items()}
        steps = row["methods"][adaptive]["steps_by_drafts"]
        cells = [number(times[name]["median"]) for name in (*fixed, adaptive)]
        last = [f"{steps[0] / sum(steps):.0%}", spread(times[capped]), spread(times[AGAIN])]
        rows.append([temperature(row["temperature"]), str(row["load"]), str(row["rows"]), *cells, *last])
    worst = [min(row["methods"][name]["times_plain"]["median"] for row in r["rows"]) for name in (adaptive, capped)]
    head = ["", "sequences", "rows", *fixed, adaptive, "its plain steps", "num_drafts=0", "plain again"]
    said = (
        f"Times plain decoding of as many sequences at a time on as many rows, with rule `{r['rule']}`: "
        f"{texts_of_race(r['rows'][0])}. At worst the adaptive K has {number(worst[0])} of plain decoding, and "
        f"requests with `num_drafts=0` on a scheduler with a draft have {number(worst[1])}. "
        f"{source(results, 'load_aware')}"
    )
    return page(table(head, rows, mark(results, "load_aware")), said)
