"""How ``specdec verify`` prints its results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .show import describe
from .terminal import print_table, remark

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..evaluation.verify import (
        Cell,
        DistributionResult,
        DistributionTest,
        ServerVerification,
        TextResult,
        Verification,
    )

SHOWN = 5  # how many findings of each kind are printed
NOTHING_FOUND = ("no bug found", "green")


def print_verification(verification: Verification, tokenizer: PreTrainedTokenizerBase) -> None:
    """Prints two tables, the findings, and the verdict."""
    v = verification
    columns = ("check", "drafter", "rule", "K", "B", "tau")
    if v.texts:
        rows = []
        for r in v.texts:
            counts = (r.texts, r.tokens, r.differing, r.unlike_plain, len(r.bugs))
            rows.append((*_cell(r.cell), f"{r.stats.tau:.2f}", *map(str, counts)))
        print_table((*columns, "texts", "tokens", "differ", "unlike\nplain", "bugs"), rows)
    if v.distributions:
        rows = []
        for d in v.distributions:
            lowest = min((test.p_value / test.level for test in d.tests), default=math.inf)
            numbers = (str(d.samples), str(len(d.tests)), f"{lowest:.2g}", str(len(d.bugs)))
            rows.append((*_cell(d.cell), f"{d.stats.tau:.2f}", *numbers))
        print_table((*columns, "texts", "tests", "lowest p\n/ level", "bugs"), rows)
    for check in dict.fromkeys(r.cell.check for r in v.texts):
        results = [r for r in v.texts if r.cell.check == check]
        texts, differing = sum(r.texts for r in results), sum(r.differing for r in results)
        bugs = sum(len(r.bugs) for r in results)
        _say(
            f"{check} texts: {differing} of {texts} differ from transformers', once in "
            f"{1 / v.difference_rate(check):.0f} tokens; near-ties all of them but {bugs}"
            if differing
            else f"{check} texts: all {texts} equal transformers'"
        )
    if v.distributions:
        bias = max(test.detectable for r in v.distributions for test in r.tests if test.kind == "ranks")
        _say(
            f"distribution: {sum(len(r.tests) for r in v.distributions)} tests, level {v.level:g} together; "
            f"ranks find probabilities off by {bias:.0%} each, in 999 of 1000 runs"
        )
    everything: list[TextResult | DistributionResult] = [*v.texts, *v.distributions]
    for result in everything:
        if result.error:
            _say(f"error: {result.cell.name}: {result.error}", "red")
    differences = [d for r in v.texts for d in r.differences]
    for verdict in ("bug", "near-tie"):
        found = list({(d.prompt, d.position, d.tokens): d for d in differences if d.verdict == verdict}.values())
        _say_first([describe(d, tokenizer) for d in found])
    _say_first([_describe_test(r.cell.name, r.scenes, test, tokenizer) for r in v.distributions for test in r.bugs])
    for name in v.never_accepted:
        _say(f"note: no draft of {name} was accepted on these prompts: what follows one was not checked")
    verdict, style = NOTHING_FOUND if v.passed else ("bugs found", "red")
    _say(f"{verdict}, {v.seconds:.0f} s", style)


def print_server(v: ServerVerification, tokenizer: PreTrainedTokenizerBase) -> None:
    """Prints how a server was asked, what its texts show, and the verdict."""
    how = {"ids": "by their ids", "logprobs": "by their texts in logprobs", "text": "by reading its texts again"}
    _say(
        f"{v.model} at {v.url}: tokens known {how[v.read_by]}; prompts sent as {'ids' if v.prompts_as_ids else 'text'}"
    )
    if v.refused:
        _say(f"fields that it does not take: {', '.join(v.refused)}", "dim")
    if v.unread:
        _say(f"{v.unread} of {v.texts + v.samples} texts were read up to a token that cannot be told from others")
    if v.read_by == "text" and v.samples:
        _say("note: read again, a text may become other tokens; tests may fail a right server (docs/verify.md)")
    if v.texts:
        bugs = sum(d.verdict == "bug" for d in v.differences)
        _say(
            f"greedy texts: {len(v.differences)} of {v.tokens} tokens in {v.texts} texts are not the reference's best; "
            f"near-ties all of them but {bugs}; at most {v.largest_gap:.3g} below the best logit"
        )
    columns = (
        "test",
        "token",
        "draws",
        "tests",
        "lowest p\n/ level",
        "total\nvariation",
        "by\nchance",
        "finds",
        "bugs",
    )
    groups: dict[tuple[str, int], list[DistributionTest]] = {}
    for test in v.tests:
        groups.setdefault((test.kind, test.position), []).append(test)
    table = []
    for (kind, position), tests in groups.items():
        worst = min(tests, key=lambda test: test.p_value / test.level)
        biases = [test.detectable for test in tests if test.degrees]
        table.append(
            (
                *(kind, str(position), str(sum(test.draws for test in tests)), str(len(tests))),
                f"{worst.p_value / worst.level:.2g}",
                *(f"{worst.variation:.3f}", f"{worst.by_chance:.3f}"),
                f"{min(biases) / 2:.3f}" if biases else "–",
                str(sum(not test.passed for test in tests)),
            )
        )
    if table:
        print_table(columns, table)
        _say(
            f"{len(v.tests)} tests of {v.samples} texts, level {v.level:g} together; finds: the total variation that "
            "is found in 999 of 1000 runs where all outcomes are off alike"
        )
    for error in v.errors[:SHOWN]:
        _say(f"error: {error}", "red")
    if len(v.errors) > SHOWN:
        _say(f"and {len(v.errors) - SHOWN} more of these")
    for verdict in ("bug", "near-tie"):
        _say_first([describe(d, tokenizer) for d in v.differences if d.verdict == verdict])
    failed = [test for test in v.tests if not test.passed]
    _say_first([_describe_test("server", v.scenes, test, tokenizer) for test in failed])
    verdict, style = ("bugs found", "red") if v.bugs else ("requests failed", "red") if v.errors else NOTHING_FOUND
    _say(f"{verdict}, {v.seconds:.0f} s", style)


def _say_first(findings: Sequence[str]) -> None:
    for finding in findings[:SHOWN]:
        _say(finding)
    if len(findings) > SHOWN:
        _say(f"and {len(findings) - SHOWN} more of these")


def _say(text: str, style: str = "") -> None:
    remark(text, style, err=False)


def _cell(cell: Cell) -> tuple[str, ...]:
    return cell.check, cell.drafter, cell.rule, str(cell.num_drafts), str(cell.batch_size)


def _describe_test(
    name: str, scenes: Sequence[Sequence[int]], test: DistributionTest, tokenizer: PreTrainedTokenizerBase
) -> str:
    if test.scene is None:
        what = f"ranks of token {test.position}" + (f" and {test.position + 1}" if test.kind == "pairs" else "")
    else:
        what = f"token {test.position} after {tokenizer.decode([*scenes[test.scene], *test.prefix])!r}"
        if test.worst is not None:
            what += f", worst {test.worst} {tokenizer.decode([test.worst])!r}"
    return f"bug: {name}: {what}: p = {test.p_value:.2g} in {test.draws} draws, level {test.level:.2g}"
