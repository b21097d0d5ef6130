"""Results for spreadsheets: a line a cell, and a line a call."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence

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
