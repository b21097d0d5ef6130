"""What the rounds of a benchmark come to: the contents of results.json."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Iterable, Mapping, Sequence

from torch import nn
from transformers import PreTrainedModel

from ...drafters.protocol import Drafter
from ...models.exchanged.packed_weights import num_parameters
from ..theory import expected_speedup, expected_tau
from .grid import PLAIN, TRANSFORMERS, BenchCell, Grid
from .suite_table import suite_results
from .verdicts import quartiles, ratios, summary, tail, verdict

FORMAT = "specdec bench 1"


def results(header: Mapping, grid: Grid, rounds: Sequence[Mapping]) -> dict:
    """
    Args:
        header: what holds for all rounds: environment, models, settings and prompts.
        rounds: as :class:`~specdec.evaluation.bench.session.Session` returns them.

    Returns:
        As docs/bench.md describes it. Cells without a round are left out.
    """
    by_setting = {setting: [r for r in rounds if r["setting"] == setting.name] for setting in grid.settings()}
    cells, verdicts = [], []
    for setting, played in by_setting.items():
        if not played:
            continue
        of_setting = grid.cells(setting)
        by_id = {cell.id: [r["cells"][cell.id] for r in played] for cell in of_setting}
        speeds = {name: [each["tokens_per_second"] for each in of_cell] for name, of_cell in by_id.items()}
        made = [_cell(cell, of_setting, by_id[cell.id], speeds) for cell in of_setting]
        plain = next(cell for cell in made if cell["method"] == PLAIN)
        cells += [{**cell, "predicted": predicted(cell, plain)} for cell in made]
        verdicts.append(verdict(setting, of_setting, speeds))
    return {
        "format": FORMAT,
        **{name: header[name] for name in ("environment", "models", "settings", "prompts")},
        "cells": cells,
        "verdicts": verdicts,
        "greedy": _greedy(grid, rounds),
        **({"suite": suite_results(header, grid, rounds)} if "suite" in header else {}),
    }


def _greedy(grid: Grid, rounds: Sequence[Mapping]) -> dict:
    """Whether our greedy texts are those of transformers (None: none were compared), and all differences."""
    differences: list[dict] = []
    for each in (each for r in rounds for each in r["differences"]):
        if each not in differences:  # a run that goes on does not know which were found before
            differences.append(each)
    ours = {cell.id for cell in grid.all_cells() if cell.ours}
    equal = not any(ours & {*each["methods"]} for each in differences)
    return {"equal": equal if any(r["greedy"] for r in rounds) else None, "differences": differences}


def _cell(
    cell: BenchCell, of_setting: Sequence[BenchCell], rounds: Sequence[Mapping], speeds: Mapping[str, Sequence[float]]
) -> dict:
    own = speeds[cell.id]
    baselines = {c.method: ratios(own, speeds[c.id]) for c in of_setting if c.method in (PLAIN, TRANSFORMERS)}
    first, gaps = (_joined(rounds, name) for name in ("time_to_first_token", "inter_token"))
    per_token = [r["time_per_output_token"] for r in rounds if r["time_per_output_token"] is not None]
    memory = [r["peak_memory"] for r in rounds if r["peak_memory"] is not None]
    return {
        **cell.to_dict(),
        "rounds": [{name: value for name, value in r.items() if name != "talks"} for r in rounds],
        "tokens_per_second": {**_spread(own), "min": min(own), "max": max(own)},
        "time_to_first_token": tail(first),
        "time_per_output_token": _spread(per_token) if per_token else None,
        "inter_token": tail(gaps),
        "acceptance_rate": _ratio(rounds, "accepted", "drafted"),
        "alpha": _ratio(rounds, "accepted", "tested"),
        "tau": _ratio(rounds, "tokens", "steps"),
        "accepted_by_position": _accepted(rounds),
        "shares": _shares(rounds),
        "peak_memory": max(memory, default=None),
        "speedup": {"over_plain": summary(baselines[PLAIN]), "over_transformers": summary(baselines[TRANSFORMERS])},
    }


def _spread(values: Sequence[float]) -> dict:
    return {"median": statistics.median(values), "quartiles": quartiles(values)}


def _joined(rounds: Sequence[Mapping], name: str) -> list[float]:
    return [value for r in rounds for value in r[name]]


def _total(rounds: Sequence[Mapping], name: str) -> int | None:
    values = [r[name] for r in rounds]
    return None if None in values else sum(values)


def _ratio(rounds: Sequence[Mapping], part: str, whole: str) -> float | None:
    a, b = _total(rounds, part), _total(rounds, whole)
    return a / b if a is not None and b else None


def _accepted(rounds: Sequence[Mapping]) -> list[float] | None:
    """Of the steps that drafted so many, the fraction in which the first, the second, ... draft was accepted."""
    if any(r["drafted_by_position"] is None for r in rounds):
        return None
    drafted, accepted = (_by_position(rounds, f"{name}_by_position") for name in ("drafted", "accepted"))
    return [a / d for a, d in zip(accepted, drafted, strict=True) if d] or None


def _by_position(rounds: Sequence[Mapping], name: str) -> list[int]:
    longest = max(len(r[name]) for r in rounds)
    return [sum(r[name][i] for r in rounds if i < len(r[name])) for i in range(longest)]


def _shares(rounds: Sequence[Mapping]) -> dict[str, float] | None:
    """Of the seconds of steps, prompts left out; None where they are not known: on a GPU, a step is one graph, or its
    parts are not waited for."""
    if any(r["seconds_by_part"] is None for r in rounds):
        return None
    names = {"draft": "draft_forwards", "target": "target_forwards", "kernels": "kernels", "loop": "loop"}
    seconds = {name: sum(r["seconds_by_part"][part] for r in rounds) for name, part in names.items()}
    whole = sum(seconds.values())
    return {name: value / whole for name, value in seconds.items()} if whole else None


def predicted(cell: Mapping, plain: Mapping) -> dict[str, float] | None:
    """What theorem 3.8 of Leviathan et al. (arXiv 2211.17192) says of the alpha and the c that a cell with a fixed K
    measured: tau, and the speed-up over ``plain``, the cell of plain decoding in the same setting. None of trees, and
    where the parts of a step's time are not known.

    Where drafts are not accepted independently with one probability, where a target's forward over K + 1 tokens takes
    longer than one over a single token, or where a step has time outside both models, the measured speed-up is lower.
    """
    shares, of_plain, alpha, k = cell["shares"], plain["shares"], cell["alpha"], cell["num_drafts"]
    if not (shares and of_plain and alpha is not None and isinstance(k, int) and k > 0 and cell["tree"] is None):
        return None
    forward = of_plain["target"] * _step_seconds(plain)
    c = shares["draft"] * _step_seconds(cell) / k / forward
    return {"c": c, "tau": expected_tau(alpha, k), "speedup": expected_speedup(alpha, c, k)}


def _step_seconds(cell: Mapping) -> float:
    """Seconds of all rounds' steps, without the prompts, over steps. A step of a batch counts once for each of its
    sequences."""
    rounds = cell["rounds"]
    seconds = sum(taken for r in rounds for part, taken in r["seconds_by_part"].items() if part != "prefill")
    return seconds / sum(r["steps"] for r in rounds)


COLUMNS = (
    *("id", "method", "rule", "num_drafts", "tree", "temperature", "batch", "top_k", "top_p", "min_p", "rounds"),
    *("tokens_per_second", "tokens_per_second_q1", "tokens_per_second_q3"),
    *("time_to_first_token", "time_to_first_token_p99", "time_per_output_token", "inter_token", "inter_token_p99"),
    *("acceptance_rate", "alpha", "tau", "share_draft", "share_target", "share_kernels", "share_loop", "peak_memory"),
    *("speedup_over_plain", "speedup_over_plain_low", "speedup_over_plain_high"),
    *("speedup_over_transformers", "speedup_over_transformers_low", "speedup_over_transformers_high"),
)


def cells_csv(whole: Mapping) -> str:
    """Of results.json. What is not known is empty."""
    return _csv(COLUMNS, (_row(cell) for cell in whole["cells"]))


def log_csv(whole: Mapping) -> str:
    """Seconds and new tokens of every call: of one prompt, or of a batch."""
    rows = [
        (number, cell["id"], " + ".join(prompts), seconds, tokens)
        for cell in whole["cells"]
        for number, played in enumerate(cell["rounds"])
        for prompts, seconds, tokens in played["by_prompt"]
    ]
    return _csv(("round", "cell", "prompts", "seconds", "tokens"), rows)


def _row(cell: Mapping) -> list[object]:
    speed, first, gap = cell["tokens_per_second"], cell["time_to_first_token"] or {}, cell["inter_token"] or {}
    shares, plain, other = cell["shares"] or {}, cell["speedup"]["over_plain"], cell["speedup"]["over_transformers"]
    return [
        *(cell[name] for name in COLUMNS[:10]),
        len(cell["rounds"]),
        *(speed["median"], *speed["quartiles"]),
        *(first.get("median"), first.get("p99")),
        (cell["time_per_output_token"] or {}).get("median"),
        *(gap.get("median"), gap.get("p99")),
        *(cell[name] for name in ("acceptance_rate", "alpha", "tau")),
        *(shares.get(name) for name in ("draft", "target", "kernels", "loop")),
        cell["peak_memory"],
        *(plain["median"], *plain["interval"]),
        *(other["median"], *other["interval"]),
    ]


def _csv(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return text.getvalue()


def describe(model: PreTrainedModel, name: str) -> dict[str, object]:
    """Its size, for JSON: bytes are those of parameters and buffers as they lie in memory, shared ones once."""
    config = model.config.get_text_config(decoder=True)
    return {"name": name, **_size(model), "layers": config.num_hidden_layers, "vocabulary": config.vocab_size}


def described_head(drafter: Drafter | None) -> dict[str, object]:
    """The size of a drafter that is a module, or holds one; {} of any other."""
    module = getattr(drafter, "model", None)
    return _size(module) if isinstance(module, nn.Module) else {}


def _size(module: nn.Module) -> dict[str, object]:
    tensors = [*module.parameters(), *module.buffers()]
    return {"parameters": num_parameters(module), "bytes": sum(each.numel() * each.element_size() for each in tensors)}
