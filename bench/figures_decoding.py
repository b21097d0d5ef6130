"""The figures of decoding: against transformers, by drafter, by rows, by accept rule, and whether it is exact."""

from __future__ import annotations

from collections.abc import Callable

from figures import Results, milliseconds, number, page, percent, source, spread, table
from measure import summary

PLAIN = "plain"


def compare(name: str) -> Callable[[Results], str]:
    return lambda results: _compared(name, results[name])


def _compared(name: str, r: dict) -> str:
    names = {"plain": "target alone (`generate`)", "assisted": "assisted generation (`generate`)"}
    rows = []
    for m in r["methods"]:
        k = m.get("num_drafts", m.get("num_assistant_tokens", ""))
        speed = spread(summary(m["spread"]["tokens_per_second"]["per_round"]))
        faster = by_round(r, m["name"]) if m["name"] in names else ""
        rows.append((names.get(m["name"], m["name"]), str(k), speed, faster))
    ours = next(m for m in r["methods"] if m["name"] == "specdec")
    equal = "equal" if r["greedy_equal"] else "not equal"
    said = (
        f"The acceptance rate is {ours['acceptance_rate']:.2f}, alpha {ours['alpha']:.2f} and tau {ours['tau']:.2f}; "
        f"{number(100 * ours['loop_fraction'])} % of specdec's time is spent outside the two models. The texts of "
        f"specdec and of the target alone are {equal}. {source(name, r)}"
    )
    return page(table(("", "K", "tokens/s", "specdec is faster by"), rows), said)


def by_round(result: dict, other: str) -> str:
    """How many times as fast specdec is, of a result of ``specdec compare``."""
    return spread(summary(result["ratios"][f"specdec/{other}"]["per_round"]))


def drafters(results: Results) -> str:
    r = results["drafters"]
    head, loads = ["drafter"], []
    for load in r["rows"]:
        head += [f"{load['workload']}: times plain", "with the prefill", "tau"]
        loads.append({_general(m["name"]): m for m in load["methods"] if m["name"] != PLAIN})
    rows = []
    for name in loads[0]:
        rows.append([name])
        for m in (methods[name] for methods in loads):
            rows[-1] += [spread(m["speedup"]), number(m["speedup_with_prefill"]["median"]), f"{m['tau']:.2f}"]
    of_that = [m["of_that"]["median"] for methods in loads for m in methods.values()]
    over_tau = [m["efficiency"] for methods in loads for m in methods.values()]
    said = (
        f"Greedy, float32, one sequence at a time, {r['prompts']} prompts of {r['new_tokens']} new tokens. The "
        f"drafters reach {percent(min(of_that))} to {percent(max(of_that))} of what their forwards alone allow; over "
        f"tau, the speed-ups are {min(over_tau):.2f} to {max(over_tau):.2f}. {source('drafters', r)}"
    )
    return page(table(head, rows), said)


def advised(results: Results) -> str:
    r = results["advise"]
    rows = []
    for found in r["rows"]:
        said = (
            "speculate"
            if found["answer"] == "speculate"
            else "do not"
            if found["answer"] == "plain"
            else found["answer"]
        )
        if "measured" not in found:
            rows.append([found["pair"], said, *[""] * 6])
            continue
        predicted, measured = found["predicted"], found["measured"]
        taus = [f"{of['tau']:.2f}" for of in (predicted, measured)]
        speeds = [f"{predicted['speedup']:.2f}", spread(measured["speedup"])]
        over = f"{found['predicted_over_measured']:.2f}"
        rows.append([found["pair"], said, str(found["K"]), *taus, *speeds, over])
    head = ("pair", "advice", "K", "tau predicted", "measured", "times plain predicted", "measured", "ratio")
    said = (
        f"Greedy, float32, one sequence at a time, texts of {r['new_tokens']} new tokens, {r['rounds']} rounds. "
        f"{source('advise', r)}"
    )
    return page(table(head, rows), said)


def better_draft(results: Results) -> str:
    """What advise promises for a better draft, and what one was worth."""
    r = results["better_draft"]
    (found,) = r["rows"]
    (before, after), more = found["alpha"], r["promised_alpha"]
    said = (
        f"{r['less']} and {r['more']} further steps; {r['prompts']} held-out prompts, {r['new_tokens']} new tokens, "
        f"greedy, {r['rounds']} rounds. {source('better_draft', r)}"
    )
    ratio = found["measured_over_promised"]
    rows = [
        [f"alpha + {more:g}", "", f"{found['promised_for_more_alpha']:.2f}", "", ""],
        [
            f"alpha {before:.3f} to {after:.3f}",
            " to ".join(map(str, found["K"])),
            f"{found['promised']:.2f}",
            spread(found["measured"]),
            f"{ratio:.2f}",
        ],
    ]
    return page(table(("", "K", "times as fast, promised", "measured", "ratio"), rows), said)


def distilled(results: Results) -> str:
    """What drafts of one start are worth after as many steps of each kind."""
    r = results["distill"]
    begun = r["rows"][0]["before"]
    rows = [["before", *(f"{w['alpha']:.3f}" for w in begun), *(f"{w['tau']:.2f}" for w in begun), ""]]
    for row in r["rows"]:
        after = [[seed["after"][i] for seed in row["seeds"]] for i in (0, 1)]
        minutes = sum(seed["seconds"] for seed in row["seeds"]) / 60 / len(row["seeds"])
        rows.append(
            [
                row["method"],
                *(_of_seeds([w["alpha"] for w in some], 3) for some in after),
                *(_of_seeds([w["tau"] for w in some], 2) for some in after),
                f"{minutes:.1f}",
            ]
        )
    head = ("", "alpha, greedy", "alpha, temperature 1", "tau, greedy", "tau, temperature 1", "minutes")
    said = (
        f"{r['steps']} steps of {r['batch_size']} texts of {r['length']} tokens of the Python standard library; the "
        f"mean of {r['seeds']} seeds, with the least and the most; {r['judged']} held-out prompts, K = 4. "
        f"{source('distill', r)}"
    )
    return page(table(head, rows), said)


def _of_seeds(values: list[float], digits: int) -> str:
    mean = sum(values) / len(values)
    return f"{mean:.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


def _general(name: str) -> str:
    """Early exits end after a quarter of the layers, which is another number for each target."""
    return f"a quarter of the layers, {name.split(', ')[1]}" if name.startswith("early exit") else name


def heads(results: Results) -> str:
    r = results["heads"]
    head, of_rows = ["drafter", "K"], []
    for row in r["rows"]:
        where = "greedy" if row["temperature"] == 0 else f"temperature {row['temperature']:g}"
        head += [f"{where}: tau", "tokens/s", "times plain"]
        of_rows.append({m["name"]: m for m in row["methods"]})
    lines = []
    for name in of_rows[0]:
        lines.append([name, "" if name == PLAIN else str(of_rows[0][name]["K"])])
        for m in (methods[name] for methods in of_rows):
            lines[-1] += [f"{m['tau']:.2f}", number(m["tokens_per_second"]["median"]), spread(m["times_plain"])]
    greedy = next(row["methods"] for row in r["rows"] if row["temperature"] == 0)
    texts = next(m["equal_to_plain"] for m in greedy if m["name"] == PLAIN)
    others = [m["equal_to_plain"] for m in greedy if m["name"] != PLAIN]
    counted = "all" if min(others) == texts else f"{sum(others)} of {texts * len(others)}"
    said = (
        f"float32, one sequence at a time, {r['new_tokens']} new tokens a text, trees of {r['nodes']} nodes; K of a "
        f"tree is its longest path. Of the greedy texts, {counted} are those of plain decoding. {source('heads', r)}"
    )
    return page(table(head, lines), said)


def of_part(result: dict, part: str) -> list[dict]:
    return [row for row in result["rows"] if row["part"] == part]


def throughput(results: Results) -> str:
    r = results["throughput"]
    found = {(row["temperature"], row["rows"], row["method"]): row for row in of_part(r, "rows")}
    methods = [*dict.fromkeys(method for _, _, method in found)]
    ours = [m for m in methods if m != PLAIN]
    least = min(n for _, n, _ in found)
    head = ["temperature", "rows", *(f"{m}: tokens/s" for m in methods), *(f"{m}: times plain" for m in ours)]
    head += [f"{m}: times {least} row" for m in methods]
    rows = []
    for temperature, n in dict.fromkeys((temperature, n) for temperature, n, _ in found):
        of = {m: found[temperature, n, m] for m in methods}
        speeds = [number(of[m]["tokens_per_second"]["median"]) for m in methods]
        scaling = [number(of[m][f"times_{least}_row"]["median"]) for m in methods]
        rows.append([f"{temperature:g}", str(n), *speeds, *(spread(of[m]["times_plain"]) for m in ours), *scaling])
    prompts = dict.fromkeys(str(row["prompts"]) for row in found.values())
    new = ", ".join(dict.fromkeys(str(row["new_tokens"]) for row in found.values()))
    said = f"Jobs of {', '.join(prompts)} prompts, with {new} new tokens each. "
    return page(table(head, rows), said + source("throughput", r))


def load_aware(results: Results) -> str:
    r = results["load_aware"]
    fixed = [*dict.fromkeys(name for row in r["rows"] for name in row["times_plain_of_fixed"])]
    head = ["temperature", "sequences", "rows", *fixed, "adaptive K", "its plain steps", "num_drafts=0", "plain again"]
    rows = []
    for row in r["rows"]:
        times = [number(row["times_plain_of_fixed"][name]) for name in fixed]
        last = [f"{row['plain_steps']:.0%}", spread(row["num_drafts_0"]), spread(row["plain_again"])]
        about = [f"{row['temperature']:g}", str(row["load"]), str(row["rows"])]
        rows.append([*about, *times, number(row["times_plain"]["median"]), *last])
    adaptive, capped = (min(row[what]["median"] for row in r["rows"]) for what in ("times_plain", "num_drafts_0"))
    said = (
        f"Tokens a second, relative to plain decoding of as many sequences at a time on as many rows, with rule "
        f"`coupled`. At worst the adaptive K has {number(adaptive)} of it, and requests with `num_drafts=0` on a "
        f"scheduler with a draft have {number(capped)}. {source('load_aware', r)}"
    )
    return page(table(head, rows), said)


def server(results: Results) -> str:
    r = results["server"]
    head = [
        "clients",
        "tokens/s",
        "of the scheduler alone",
        "plain, of it alone",
        "adaptive K, times plain",
        "num_drafts=0",
    ]
    ratios = ("tokens_per_second", "of_alone", "plain_of_alone", "times_plain", "num_drafts_0")
    rows = [[str(row["clients"]), *(spread(row[name]) for name in ratios)] for row in r["rows"]]
    said = (
        f"Tokens a second of streamed texts on {r['server_rows']} rows, with rule `{r['rule']}`; the last two columns "
        f"are relative to plain decoding by the same server. {source('server', r)}"
    )
    return page(table(head, rows), said)


def server_latency(results: Results) -> str:
    r = results["server"]
    head = ["clients", "", "first token", "99th percentile", "between pieces", "99th percentile"]
    head += ["server's CPU time a token", "its event loop's", "clients'"]
    rows = []
    for row in r["rows"]:
        for name, method in ((n, m) for n, m in row["methods"].items() if "first" in m):
            cells = [f"{number(1e3 * method[what][q])} ms" for what in ("first", "between") for q in ("median", "p99")]
            cells += [milliseconds(method[what]) for what in ("server_cpu", "loop_cpu", "client_cpu")]
            rows.append([str(row["clients"]), name.removeprefix("served, "), *cells])
    return page(table(head, rows))


def lengths(results: Results) -> str:
    r = results["lengths"]
    widths = [*dict.fromkeys(name.rsplit("K=", 1)[1] for row in r["rows"] for name in row["times_plain_of_fixed"])]
    head = ["drafter", "temperature", "rows", *(f"K = {k}" for k in widths), "adaptive K", "of the best", "plain again"]
    rows = []
    for row in sorted(r["rows"], key=lambda row: (row["drafter"], row["temperature"], row["rows"])):
        fixed = {name.rsplit("K=", 1)[1]: times for name, times in row["times_plain_of_fixed"].items()}
        cells = [number(fixed[k]) if k in fixed else "" for k in widths]
        last = [number(row["of_plain"]), number(row["of_best"]), spread(row["plain_again"])]
        rows.append([row["drafter"], f"{row['temperature']:g}", str(row["rows"]), *cells, *last])
    worst = {what: min(row[what] for row in r["rows"]) for what in ("of_plain", "of_best")}
    said = (
        f"Tokens a second, relative to plain decoding with as many rows. At worst the adaptive K has "
        f"{number(worst['of_best'])} of the best of plain decoding and the fixed K, and {number(worst['of_plain'])} of "
        f"plain decoding. {source('lengths', r)}"
    )
    return page(table(head, rows), said)


def admission(results: Results) -> str:
    (row,) = of_part(results["throughput"], "admission")
    return page(
        f"Of {row['requests']} requests with log-normal lengths ({row['new_tokens']:,} new tokens in all), "
        f"refilled rows are busy {percent(row['busy'])} of the time (whole batches: "
        f"{percent(row['busy_whole_batches'])}), and decode {number(row['times_whole_batches'])} times as "
        f"many tokens/s as the same rows that wait for whole batches."
    )


def memory(results: Results) -> str:
    (row,) = of_part(results["throughput"], "memory")
    resident, tensors = row["growth"]["resident"], row["growth"]["tensors"]
    stay = "move" if row["large_storages_moved"] else "stay where they are"
    return page(
        f"Over {row['tokens']:,} tokens through one scheduler, the caches and weights "
        f"({number(row['cache_and_weight_bytes'] / 1e6)} MB) {stay}; the process goes from "
        f"{number(resident['first_quarter'] / 1e6)} to {number(resident['last_quarter'] / 1e6)} MB, and from "
        f"{tensors['first_quarter']:.0f} to {tensors['last_quarter']:.0f} tensors (medians of the first and the last "
        f"quarter)."
    )


def rules(results: Results) -> str:
    r = results["rules"]
    found = {(row["rule"], (row["filters"], row["K"])): row for row in r["rows"]}
    settings = sorted(dict.fromkeys(setting for _, setting in found), key=lambda s: (s[0] != "none", s[1]))
    shown = {"none": "", "top_k+top_p": ", top-k 50 and top-p 0.95"}
    rows = []
    for rule in dict.fromkeys(rule for rule, _ in found):
        of = [found[rule, setting] for setting in settings]
        rows.append([f"`{rule}`", *(f"{row['tau']:.2f} +- {row['tau_standard_error']:.2f}" for row in of)])
    said = f"tau with its standard error, over {r['texts']} sampled texts of {r['max_new_tokens']} tokens. "
    return page(
        table(["rule", *(f"K = {k}{shown[filters]}" for filters, k in settings)], rows), said + source("rules", r)
    )


def verification(results: Results) -> str:
    head = ("dtype", "texts", "compared", "left transformers'", "unlike plain", "bugs")
    names, rows = ("verify", "verify.bfloat16"), []
    for r in (results[name] for name in names):
        for check in dict.fromkeys(cell["check"] for cell in r["texts"]):
            keys = ("texts", "tokens", "differing", "unlike_plain", "bugs")
            cells = [cell for cell in r["texts"] if cell["check"] == check]
            texts, tokens, differing, unlike, bugs = (sum(cell[key] for cell in cells) for key in keys)
            left = f"{differing}, once in {tokens / differing:.0f} tokens" if differing else "0"
            compared = f"{texts} texts, {tokens:,} tokens"
            rows.append((r["environment"]["dtype"], check, compared, left, str(unlike), str(bugs)))
    tested = results["verify"]["distributions"]
    tests = [test for cell in tested for test in cell["tests"]]
    closest = min(test["p_value"] / test["level"] for test in tests)
    said = (
        f"{sum(test['passed'] for test in tests)} of {len(tests)} tests of the distribution passed "
        f"({max(cell['samples'] for cell in tested)} texts each); the lowest p value was {number(closest)} times its "
        f"level. " + ", ".join(source(name, results[name]) for name in names)
    )
    return page(table(head, rows), said)
