"""The report as one HTML file: verdicts in words, what measured, pictures with their numbers, and reservations."""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Iterable, Iterator, Sequence
from importlib import resources
from typing import Any

from .plot import Plot, Section, Table, decimals, number, spread
from .results import BenchResults, CellResult, visible

OPEN_ROWS = 12  # longer tables are closed until somebody opens them
FEW_ROUNDS, FEW_PROMPTS = 5, 10
# The environment's fields in words; others have their own names.
FIELDS = {
    "cpu": "processor",
    "cpu_count": "processors in the machine",
    "gpu": "GPU",
    "dtype": "number type",
    "python": "Python",
    "torch": "torch",
    "transformers": "transformers",
}


def html_page(results: BenchResults, sections: Sequence[Section]) -> str:
    """HTML that asks no other host for anything and runs no script, which a policy inside it also tells the browser."""
    style = resources.files(__package__).joinpath("page.css").read_text("utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    title = _title(results)
    parts = [("Measured on", _measured_on(results))]
    parts += [(section.title, _section(section)) for section in sections]
    parts += [("Every measurement", _table(Table(HEAD, tuple(map(_row, results.cells))), "every measurement"))]
    parts += [("How it was measured, and what to doubt", _list(_reservations(results)))]
    body = "".join(f"<section><h2>{text(name)}</h2>{content}</section>" for name, content in parts)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{text(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n"
        f"<header><h1>{text(title)}</h1></header>\n<main>\n"
        f'<section class="verdicts" aria-label="Verdicts">{_list(_verdicts(results))}</section>'
        f"{body}</main>\n</body>\n</html>\n"
    )


def _title(results: BenchResults) -> str:
    names = [results.models.get(role) for role in ("target", "draft")]
    known = [m["name"] for m in names if isinstance(m, dict) and m.get("name")]
    return "specdec bench" + (f": {' with '.join(map(str, known))}" if known else "")


def _verdicts(results: BenchResults) -> Iterable[str]:
    for verdict in results.verdicts:
        if verdict.words:
            yield verdict.words
    if not any(verdict.words for verdict in results.verdicts):
        yield "The results have no verdict."
    differences = results.greedy.get("differences") or []
    if results.greedy.get("equal") is True:
        more = f", but for {len(differences)} near-ties that rounding explains" if differences else ""
        yield f"Greedy texts are those of plain decoding{more}."
    elif results.greedy.get("equal") is False:
        yield f"Greedy texts differ from those of plain decoding: {len(differences)} differences. This is a bug."
    else:
        yield "Greedy texts were not compared."


def _measured_on(results: BenchResults) -> str:
    rows = {}
    for name, value in results.environment.items():
        if value is not None and name != "command":
            rows[FIELDS.get(name, _spaced(name))] = text(_words(value))
    for name, model in results.models.items():
        if model:
            rows[_spaced(name)] = text(_words(model))
    if settings := {k: v for k, v in results.settings.items() if v is not None}:
        rows["settings"] = text(_words(settings))
    if prompts := results.categories:
        rows["prompts"] = text(f"{len(prompts)} ({', '.join(dict.fromkeys(filter(None, prompts))) or 'no categories'})")
    if command := results.environment.get("command"):
        rows["command"] = f"<code>{text(command)}</code>"
    if not rows:
        return "<p>The results do not say what measured them.</p>"
    return f"<dl>{''.join(f'<dt>{text(name)}</dt><dd>{value}</dd>' for name, value in rows.items())}</dl>"


def _spaced(name: str) -> str:
    return name.replace("_", " ")


def _words(value: Any) -> str:
    """A value of the file in a line: ``name tiny, layers 4``."""
    if isinstance(value, dict):
        return ", ".join(f"{_spaced(str(k))} {_words(v)}" for k, v in value.items() if v is not None)
    if isinstance(value, list):
        return " ".join(map(_words, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}" if value >= 10_000 else str(value)
    return str(value)


def _section(section: Section) -> str:
    left_out = "".join(f"<p>{text(why)}</p>" for why in section.left_out)
    about = f"<p>{text(section.about)}</p>" if section.plots else ""
    return about + "".join(map(_picture, section.plots)) + left_out


def _list(sentences: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li>{text(sentence)}</li>' for sentence in sentences)}</ul>"


def text(of: object) -> str:
    """Escaped, and visible, as on the server's page."""
    return "".join(f'<span class="escape">{visible(c)}</span>' if visible(c) != c else html.escape(c) for c in str(of))


def _table(of: Table, caption: str) -> str:
    """A table with headings for screen readers, in a box of its own that scrolls where it is too wide."""
    head = "".join(f'<th scope="col">{text(cell)}</th>' for cell in of.head)
    lines = []
    for first, *rest in of.rows:
        cells = "".join(f"<td>{text(cell)}</td>" for cell in rest)
        lines.append(f'<tr><th scope="row">{text(first)}</th>{cells}</tr>')
    opened, label = " open" if len(of.rows) <= OPEN_ROWS else "", html.escape(visible(caption))
    return (
        f"<details{opened}><summary>Numbers<span class=unseen>: {text(caption)}</span></summary>"
        f'<div class="scroll" tabindex="0" role="region" aria-label="{label}"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table></div></details>"
    )


def _picture(plot: Plot) -> str:
    """The picture, and the table of its numbers."""
    source = f"data:image/svg+xml;base64,{base64.b64encode(plot.file('svg')).decode()}"
    image = f'<img src="{source}" alt="{html.escape(visible(plot.says))} The table has the numbers.">'
    return f"<figure>{image}<figcaption><p>{text(plot.says)}</p></figcaption>{_table(plot.table, plot.title)}</figure>"


HEAD = (
    *("cell", "setting", "rounds", "tokens/s (quartiles)", "times plain", "its interval", "times transformers"),
    *("first token, ms", "output token, ms", "between tokens, p99, ms", "accepted", "alpha", "tau", "peak memory, MiB"),
)


def _row(cell: CellResult) -> tuple[str, ...]:
    interval = f"{number(cell.interval[0])} to {number(cell.interval[1])}" if cell.interval else "–"
    times = (cell.first_token, cell.between_tokens, cell.inter_token_p99)
    speeds = (spread(cell.speed), spread(cell.over_plain), interval, spread(cell.over_transformers))
    return (
        *(cell.id, cell.setting.words, str(cell.rounds), *speeds),
        *(number(None if seconds is None else 1e3 * seconds) for seconds in times),
        *map(decimals, (cell.acceptance_rate, cell.alpha, cell.tau)),
        number(None if cell.peak_memory is None else cell.peak_memory / 2**20),
    )


def _reservations(results: BenchResults) -> Iterator[str]:
    """Sentences: first the method, then what to doubt, of which some is only there where it applies."""
    rounds = [cell.rounds for cell in results.cells]
    yield (
        "Methods take turns on the same prompts within each round, so that whatever else the machine does slows all "
        "of them alike. A number is the median of the rounds, with the quartiles in brackets. A ratio is taken within "
        "each round, and its median over the rounds is not always the ratio of two medians."
    )
    yield (
        "Two methods are within noise of each other where the interval of their ratio contains 1: another run may have "
        "the other one ahead."
    )
    yield (
        "There are two baselines, since ratios to the first flatter: transformers' generate, which spends much time "
        "in Python on small models, and plain decoding by specdec, the same loop without drafts. Speed-ups against K "
        "and predictions are over the second."
    )
    yield (
        "Where the fastest of several K is shown, it was chosen by the same measurements, so it is a little flattered: "
        "among equals, the lucky one is chosen. The table of every measurement has all of them."
    )
    yield (
        "Predictions assume that drafts are accepted independently, and that verifying takes no longer than a forward "
        "over one token, which on a processor without a GPU is seldom true."
    )
    yield "Where no accept rule is named, it is token, and with trees coupled."
    if rounds and min(rounds) < FEW_ROUNDS:
        yield f"A cell has as few as {min(rounds)} rounds: its quartiles say little."
    if 0 < len(results.categories) < FEW_PROMPTS:
        yield f"Prompts: {len(results.categories)}. Acceptance, and with it the speed, depends on the text."
    yield "It is one machine and one pair of models. On others, measure again."
