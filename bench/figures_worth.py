"""The tables of docs/worth_it.md: when speculation pays, out of results that were measured for other tables."""

from __future__ import annotations

from figures import Results, number, page, source, spread, table

CASES = (  # workload, drafter as the result names it, and in words
    ("writing code", "model, K=4", "embedded pair, its draft model"),
    ("editing code", "prompt lookup, K=8", "embedded target, prompt lookup on an edit"),
    ("random tokens, alpha set to 0.8", "model, K=4", "113 M parameters, random weights, a tuned draft"),
    ("random tokens, alpha set to 0.8", "prompt lookup, K=8", "the same, prompt lookup on text that never repeats"),
    ("writing code", "early exit after 4, K=4", "embedded target, its first 4 of 16 layers"),
    ("writing code", "never right, K=4", "embedded pair, a draft that is never right"),
    ("writing code", "never right, adaptive", "the same"),
)


def drafts(results: Results) -> str:
    """The speed-up is tau over the cost of a step: that cost, in plain steps, is tau over the measured speed-up."""
    r = results["drafters"]
    found = {(row["workload"], m["name"]): m for row in r["rows"] for m in row["methods"]}
    rows = []
    for workload, name, words in CASES:
        m = found[workload, name]
        length = name.rsplit(", ", 1)[1].replace("=", " = ").replace("adaptive", "K adapts")
        cost = number(m["tau"] / m["speedup"]["median"])
        alpha = f"{m['alpha']:.2f}" if m["drafted"] else ""
        rows.append((f"{words}, {length}", alpha, f"{m['tau']:.2f}", cost, spread(m["speedup"])))
    head = ("one text at a time, greedy", "alpha", "tokens a step (tau)", "a step costs", "times plain")
    return page(table(head, rows), source("drafters", r))


def rows(results: Results) -> str:
    """Times plain decoding by the number of texts at a time, for a draft model."""
    r = results["lengths"]
    rounds = r["rows"][0]["plain_again"]["rounds"]
    of_model = [row for row in r["rows"] if row["drafter"] == "model"]
    temperatures = sorted({row["temperature"] for row in of_model})
    widths = [name.rsplit("K=", 1)[1] for name in of_model[0]["times_plain_of_fixed"]]
    head, found = ["texts at a time"], {(row["temperature"], row["rows"]): row for row in of_model}
    for temperature in temperatures:
        where = "greedy" if temperature == 0 else f"temperature {temperature:g}"
        head += [f"{where}: K = {k}" for k in widths] + [f"{where}: K adapts"]
    lines = []
    for count in sorted({row["rows"] for row in of_model}):
        cells = [str(count)]
        for row in (found[temperature, count] for temperature in temperatures):
            cells += [number(times) for times in row["times_plain_of_fixed"].values()] + [number(row["of_plain"])]
        lines.append(cells)
    said = f"Times plain decoding of as many texts, of {rounds} rounds. {source('lengths', r)}"
    return page(table(head, lines), said)


def step_costs(results: Results) -> str:
    """What a step with K drafts costs, as the decoder learned it."""
    r = results["drafters"]
    found = {(row["workload"], m["name"]): m["step_costs"] for row in r["rows"] for m in row["methods"]}
    cases = (
        ("embedded pair, its draft model", "writing code", "model, adaptive"),
        ("113 M parameters and its draft", "random tokens, alpha set to 0.8", "model, adaptive"),
        ("embedded target, its first 4 of 16 layers", "writing code", "early exit after 4, adaptive"),
    )
    most = max(len(found[workload, name]) for _, workload, name in cases)
    lines = [(words, *(f"{cost:.2f}" for cost in found[workload, name])) for words, workload, name in cases]
    return page(table(["a step costs", *(f"K = {k}" for k in range(most))], lines), source("drafters", r))
