"""The table of every cell that was measured, as the report ends with it."""

from __future__ import annotations

from .plot import Table, decimals, milliseconds, number, percent, spread
from .results import Cell, Results

HEAD = (
    *("cell", "setting", "rounds", "tokens/s (quartiles)", "times plain", "its interval", "times transformers"),
    *("first token", "output token", "between tokens, p99", "accepted", "alpha", "tau", "peak memory"),
)


def all_cells(results: Results) -> Table:
    return Table(HEAD, tuple(_row(cell) for cell in results.cells))


def _row(cell: Cell) -> tuple[str, ...]:
    interval = f"{number(cell.interval[0])} to {number(cell.interval[1])}" if cell.interval else "–"
    times = (milliseconds(s) for s in (cell.first_token, cell.between_tokens, cell.inter_token_p99))
    memory = "–" if cell.peak_memory is None else f"{cell.peak_memory / 2**20:,.0f} MiB"
    counts = (percent(cell.acceptance_rate), decimals(cell.alpha), decimals(cell.tau))
    speeds = (spread(cell.speed), spread(cell.over_plain), interval, spread(cell.over_transformers))
    return (cell.id, cell.setting.words, str(cell.rounds), *speeds, *times, *counts, memory)
