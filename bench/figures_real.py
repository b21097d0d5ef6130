"""The figures of real models, and of other programs with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from figures import mark, milliseconds, number, page, source, spread, table
from results import Results

PEER = "transformers"  # of bench_greedy_texts.py, which names it

CROWDS = {"free": "none", "half": "half of them", "grammars": "all"}  # of bench_clients.py


def greedy_texts(results: Results) -> str:
    """Of each dtype and way to decode: how many texts are those of transformers' plain decoding, and of its own."""
    r = results["greedy_texts"]
    rows = []
    for row in r["rows"]:
        left = row["near_ties"] + row["bugs"]
        often = f", once in {row['compared'] / left:.0f} tokens" if left else ""
        shares = [f"{row[name]} of {row['texts']}" for name in ("as_transformers", "as_own_plain")]
        rows.append((row["dtype"], row["method"], f"{shares[0]}{often}", shares[1], str(row["bugs"])))
    head = ("dtype", "", "as transformers' plain text", "as its own plain text", "bugs")
    said = (
        f"{r['target']}, {r['prompts']} prompts, up to {r['new_tokens']} new tokens each. Every text that is another "
        "one is judged where it first differs: a near-tie that rounding explains, or a bug. "
        f"{source(results, 'greedy_texts')}"
    )
    return page(table(head, rows, mark(results, "greedy_texts")), said)


def rivals(name: str) -> Callable[[Results], str]:
    """A file of ``rivals.py``: of each kind of weights and each program tokens a second, and times llama.cpp's
    decoding, plain and its best."""

    def figure(results: Results) -> str:
        r = results[name]
        rows = []
        for row in r["rows"]:
            beside = [spread(row[key]) if key in row else "" for key in ("over_llama_cpp", "over_its_best")]
            rows.append((row["weights"], row["method"], spread(row["tokens_per_second"]), *beside))
        head = ("weights", "", "tokens a second", "times llama.cpp plain", "times its best")
        return page(table(head, rows, mark(results, name)), f"{_of_rivals(r)} {source(results, name)}")

    return figure


def _of_rivals(r: Mapping) -> str:
    return (
        f"{r['target']}, {len(r['prompts'])} prompts of as many kinds, {r['new_tokens']} new tokens each, greedily and "
        "one at a time; medians and quartiles over prompts, the reading of the prompt included."
    )


def contention(results: Results) -> str:
    """Of each program its speed alone, and what is left of it beside processes that keep a core busy each."""
    r = results["contention"]
    by_way: dict[str, dict[int, Mapping]] = {}
    for row in r["rows"]:
        by_way.setdefault(row["method"], {})[row["busy"]] = row
    counts = [count for count in next(iter(by_way.values())) if count]
    rows = [
        (name, spread(of[0]["tokens_per_second"]), *(spread(of[count]["of_alone"]) for count in counts))
        for name, of in by_way.items()
    ]
    head = ("", "tokens a second, alone", *(f"of that beside {count} busy" for count in counts))
    said = f"Weights of {r['rows'][0]['weights']}. {_of_rivals(r)} {source(results, 'contention')}"
    return page(table(head, rows, mark(results, "contention")), said)


def loading(results: Results) -> str:
    """Of each kind of weights and each program: memory beside the bytes of the files."""
    r = results["loading"]
    columns = {"loaded": "after loading", "peak_while_loading": "at most till then", "peak": "at most with decoding"}
    rows = [
        (
            row["weights"], row["program"], f"{row['bytes'] / 1e6:.0f} MB",
            *(f"{row[key] / 1e6:.0f} MB, {row[key] / row['bytes']:.2f}" for key in columns),
        )
        for row in r["rows"]
    ]  # fmt: skip
    said = (
        f"{r['target']}: resident memory beyond that of the imports, mapped files among it, and times the files. "
        f"{source(results, 'loading')}"
    )
    return page(table(("weights", "", "files", *columns.values()), rows, mark(results, "loading")), said)


def cpu_step(results: Results) -> str:
    """Of each shape, dtype of the weights and number of tokens: a step against its floor."""
    r = results["cpu_step"]
    rows = [
        (
            row["shape"], row["weights"], str(row["tokens"]), milliseconds(row["step"]), spread(row["step/floor"]),
            spread(row["step/products"]), f"{row['gigabytes_per_second']:.1f}",
        )
        for row in r["rows"]
    ]  # fmt: skip
    head = ("model", "weights", "tokens", "step", "times the floor", "times its products", "GB/s of the floor")
    said = (
        f"{r['stored']} tokens are stored. The floor is the sum of a buffer of as many bytes as the weights, in turns "
        f"with the steps. {source(results, 'cpu_step')}"
    )
    return page(table(head, rows, mark(results, "cpu_step")), said)


def perplexity(results: Results) -> str:
    """Of each way to store the weights: the perplexity of one text."""
    r = results["perplexity"]
    rows = [(row["weights"], f"{row['perplexity']:.3f}") for row in r["rows"]]
    said = (
        f"{r['target']}, {r['tokens']:,} tokens of the docstrings of Python's standard library. "
        f"{source(results, 'perplexity')}"
    )
    return page(table(("weights", "perplexity"), rows, mark(results, "perplexity")), said)


def prefixes(results: Results) -> str:
    """Of each number of users and each reuse: tokens read in all turns, and the seconds to a first token."""
    r = results["prefixes"]
    rows = []
    for users, reuse in dict.fromkeys((row["users"], row["reuse"]) for row in r["rows"]):
        turns = [row for row in r["rows"] if (row["users"], row["reuse"]) == (users, reuse)]
        first, last = (f"{turns[i]['first_token']:.2f}" for i in (0, -1))
        read, same = sum(row["read"] for row in turns), f"{turns[0]['same']} of {turns[0]['texts']}"
        rows.append((str(users), reuse, f"{read:,}", first, last, same))
    head = ("at once", "reuse", "tokens read", "first token, turn 1 (s)", f"turn {r['turns']}", "texts as with off")
    said = (
        f"{r['target']}, {r['turns']} turns with answers of {r['new_tokens']} tokens, greedy, parts of "
        f"{r['prefill_chunk']} tokens. {source(results, 'prefixes')}"
    )
    return page(table(head, rows, mark(results, "prefixes")), said)


def grammar(results: Results) -> str:
    """Of each drafter and temperature: valid texts, what schemas force of them, and the speed with and without."""
    r = results["grammar"]
    rows = [
        (
            row["drafter"], f"{row['temperature']:g}", f"{row['whole']} of {row['texts']}",
            f"{row['valid']} of {row['texts']}", f"{row['forced_share']:.0%}",
            f"{row['grammar_tokens_per_second']:.1f}", f"{row['free_tokens_per_second']:.1f}",
        )
        for row in r["rows"]
    ]  # fmt: skip
    head = ("drafts", "temperature", "ended", "valid", "forced tokens", "tokens/s", "free text as long")
    said = (
        f"{r['target']}, {r['weights']} weights, {r['schemas']} schemas, {r['num_drafts']} drafts, up to "
        f"{r['max_new_tokens']} tokens, one text at a time. {source(results, 'grammar')}"
    )
    return page(table(head, rows, mark(results, "grammar")), said)


def clients(results: Results) -> str:
    """Of each crowd of clients: the server's speed, and how many of the texts that had to obey did."""
    r = results["clients"]
    rows = [
        (
            CROWDS[row["crowd"]], spread(row["tokens_per_second"]), spread(row["of_free"]), f"{row['lost']}",
            f"{row['whole']} of {row['obeying']}", f"{row['valid']}", f"{row['changed']}",
        )
        for row in r["rows"]
    ]  # fmt: skip
    head = ("texts that obey", "tokens/s", "of that without", "lost", "ended", "valid", "changed by others")
    said = (
        f"{r['target']}, {r['clients']} clients at once, {r['server_rows']} rows, up to {r['max_new_tokens']} tokens, "
        f"temperature 1. {source(results, 'clients')}"
    )
    return page(table(head, rows, mark(results, "clients")), said)


def greedy_in_short(results: Results) -> str:
    """The README's sentence: the fewest texts of any of our ways that are those of plain decoding, and
    transformers'."""
    r = results["greedy_texts"]
    said = []
    for dtype in dict.fromkeys(row["dtype"] for row in r["rows"]):
        ours = [row for row in r["rows"] if row["dtype"] == dtype and not row["method"].startswith(PEER)]
        plain, peer = (min(row[key] for row in ours) for key in ("as_own_plain", "as_transformers"))
        said.append(f"{plain} of {r['prompts']} ({peer}) in {dtype}")
    bugs = sum(row["bugs"] for row in r["rows"])
    others = f"{bugs} differences are bugs" if bugs else "the others leave it at near-ties"
    return (
        f"Greedy texts that are plain decoding's in all our ways to decode (and transformers'): {', '.join(said)}; "
        f"{others} ({r['target']}, up to {r['new_tokens']} tokens each){mark(results, 'greedy_texts')}."
    )


def verified(name: str) -> Callable[[Results], str]:
    """A file of ``specdec verify``: by drafter, whether everything that was checked holds."""

    def figure(results: Results) -> str:
        r = results[name]
        rows = [_verified(r, drafter) for drafter in dict.fromkeys(cell["drafter"] for cell in r["texts"])]
        tests = [test for cell in r["distributions"] for test in cell["tests"]]
        detectable = max(test["detectable"] or 0.0 for test in tests if test["kind"] == "ranks")
        samples = max(cell["samples"] for cell in r["distributions"])
        said = (
            f"A test of the distribution has {samples} texts, and finds ranks whose probabilities are off by a factor "
            f"1 +- {number(detectable)} each with probability 0.999; smaller biases may pass. {source(results, name)}"
        )
        head = ("drafter", "greedy texts", "texts of rule coupled", "tests of the distribution", "tau, greedy", "exact")
        return page(table(head, rows, mark(results, name)), said)

    return figure


def _verified(r: Mapping, drafter: str) -> tuple[str, ...]:
    cells = [cell for cell in r["texts"] if cell["drafter"] == drafter]
    tests = [test for cell in r["distributions"] if cell["drafter"] == drafter for test in cell["tests"]]
    passed = sum(test["passed"] for test in tests)
    bugs = sum(cell["bugs"] for cell in cells) + len(tests) - passed
    texts = []
    for check in ("greedy", "coupled"):
        of_check = [cell for cell in cells if cell["check"] == check]
        count, ties = (sum(cell[key] for cell in of_check) for key in ("texts", "near_ties"))
        texts.append(f"{count}, {ties} near-ties" if ties else str(count))
    tau = max(cell["tau"] for cell in cells if cell["check"] == "greedy")
    exact = "not known: no draft was accepted" if drafter in r["never_accepted"] else "yes"
    return drafter, *texts, f"{passed} of {len(tests)} passed", f"{tau:.2f}", f"no: {bugs} bugs" if bugs else exact
