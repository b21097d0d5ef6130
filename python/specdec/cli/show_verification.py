"""How ``specdec verify`` prints its results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .layout import print_table
from .show import describe
from .terminal import remark

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..evaluation.verify import Cell, DistributionResult, DistributionTest, TextResult, Verification

SHOWN = 5  # how many findings of each kind are printed


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
    _say_first([_describe_test(r, test, tokenizer) for r in v.distributions for test in r.bugs])
    for name in v.never_accepted:
        _say(f"note: no draft of {name} was accepted on these prompts: what follows one was not checked")
    verdict, style = ("no bug found", "green") if v.passed else ("bugs found", "red")
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


def _describe_test(r: DistributionResult, test: DistributionTest, tokenizer: PreTrainedTokenizerBase) -> str:
    if test.kind == "ranks" or test.scene is None:
        what = f"ranks of token {test.position}"
    else:
        what = f"token {test.position} after {tokenizer.decode([*r.scenes[test.scene], *test.prefix])!r}"
        if test.worst is not None:
            what += f", worst {test.worst} {tokenizer.decode([test.worst])!r}"
    return f"bug: {r.cell.name}: {what}: p = {test.p_value:.2g} in {test.draws} draws, level {test.level:.2g}"
