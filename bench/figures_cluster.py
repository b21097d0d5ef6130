"""The figures of docs/cluster.md: what a cluster yields and costs on paper, and the arithmetic checked on processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from figures import mark, milliseconds, number, page, source, spread, table
from results import Results

OFF = 0.10  # that a prediction may be off


def check(results: Results) -> str:
    """Of each pair, K and number of processes the seconds of a job, predicted and measured; and what they were
    predicted from."""
    rows = _rows(results, "check")
    lines = [
        (
            r["case"], str(r["num_drafts"]), str(r["processes"]), f"{number(r['predicted']['median'])} s",
            f"{number(r['measured']['median'])} s", spread(r["predicted/measured"]),
            number(r["prompts"] / r["measured"]["median"]),
        )
        for r in rows
    ]  # fmt: skip
    head = ("pair", "K", "processes", "predicted", "measured", "predicted over measured", "prompts/s")
    off = [abs(r["predicted/measured"]["median"] - 1) for r in rows]
    within = sum(each <= OFF for each in off)
    said = (
        f"{within} of {len(rows)} are within {OFF:.0%}; at worst it is off by {max(off):.1%}. Medians and quartiles of "
        f"rounds ({rows[0]['measured']['rounds']}), on {rows[0]['cores']} cores. What went in, of one process:"
    )
    jobs = [
        (
            r["case"], str(r["num_drafts"]), str(r["rows"]), f"{r['prompts']}, {r['new_tokens']:,}",
            milliseconds(r["step"]), milliseconds(r["token"]),
            f"{r['tau']['median']:.2f} ({r['tau_of_job']['median']:.2f})",
            ", ".join(f"{n}: {number(of['median'])}" for n, of in r["slowdown"].items() if n != "1"),
            f"{number(r['startup']['median'])} s",
        )
        for r in rows
        if r["processes"] == rows[0]["processes"]
    ]  # fmt: skip
    heads = ("pair", "K", "rows", "prompts, new tokens", "step", "token of a prompt", "tau (that of the job)",
             "times as slow side by side", "loading")  # fmt: skip
    marked = mark(results, "cluster")
    return page(table(head, lines, marked), said, table(heads, jobs, marked), source(results, "cluster"))


def gpus(results: Results) -> str:
    """Of each GPU and number of them what it yields and what the job costs, and the same by rows of one."""
    rows, assumed = _rows(results, "gpus"), results["cluster"]["assumed"]
    prompts, first = assumed["prompts"], rows[0]["rows"]
    many = [
        (
            r["gpu"], f"{r['gpus']:,}", str(r["num_drafts"]), number(r["prompts_per_second"]),
            number(r["prompts_per_day"] / 1e6), f"{number(r['job_seconds'] / 60)} min",
            f"{prompts / r['prompts_per_second'] / r['job_seconds']:.0%}", f"${number(r['price_per_million'])}",
        )
        for r in rows
        if r["rows"] == first
    ]  # fmt: skip
    head = ("GPU", "GPUs", "K", "prompts/s", "million a day", "the job takes", "at full rate", "price of a million")
    of_one = [r for r in rows if r["gpus"] == 1]
    keys = sorted({(r["gpu"], r["rows"]) for r in of_one})
    one = [_by_rows([r for r in of_one if (r["gpu"], r["rows"]) == key]) for key in keys]
    heads = ("GPU", "rows", "K", "step, plain", "with drafts", "prompts/s, plain", "with drafts", "price, plain",
             "with drafts")  # fmt: skip
    pays = dict.fromkeys(f"{r['pays_up_to']} rows on an {r['gpu']}, of {r['fits']} that fit" for r in rows)
    steps = ", ".join(dict.fromkeys(f"{r['gpu']} {r['steps']}" for r in rows))
    said = (
        f"**Predicted, not measured.** Llama-3.1-8B with Llama-3.2-1B as its draft, in bfloat16; K = 0 is plain "
        f"decoding, any other K the best. Steps of the {steps}. A job of {prompts:,} prompts; at full rate is the part "
        f"of its time that it would take if all rows were busy from its beginning to its end. Assumed: alpha "
        f"{assumed['alpha']:g}; prompts of {assumed['prompt_tokens']} tokens; texts of {assumed['new_tokens']} on "
        f"average, exponentially distributed; {first} rows a GPU; ${assumed['price']:g} for a GPU and hour, to which "
        f"prices are proportional; {assumed['startup']:g} s until a process reads the weights, which it gets at "
        f"{assumed['load']:g} GB/s. Drafts yield more up to {'; '.join(pays)}."
    )
    marked = mark(results, "cluster")
    return page(table(head, many, marked), said, table(heads, one, marked), source(results, "cluster"))


def _by_rows(pair: Sequence[Mapping]) -> tuple[str, ...]:
    """``pair``: plain, and with drafts."""
    first, drafts = pair
    return (
        first["gpu"], str(first["rows"]), str(drafts["num_drafts"]), *(f"{number(1e3 * r['step'])} ms" for r in pair),
        *(number(r["prompts_per_second"]) for r in pair), *(f"${number(r['price_per_million'])}" for r in pair),
    )  # fmt: skip


def _rows(results: Results, part: str) -> list[Mapping]:
    return [row for row in results["cluster"]["rows"] if row["part"] == part]
