"""The report as one HTML file: verdicts in words, what measured, pictures with their numbers, and reservations."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from importlib import resources
from typing import Any

from .cells import all_cells
from .markup import name_of, picture, table, text
from .plot import Section
from .reservations import reservations
from .results import Results
from .tokens import texts

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


def page(results: Results, sections: Sequence[Section]) -> str:
    """HTML that asks no other host for anything and runs no script, which a policy inside it also tells the browser."""
    style = resources.files(__package__).joinpath("page.css").read_text("utf-8")
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    title = _title(results)
    parts = [("Measured on", _measured_on(results))]
    parts += [(section.title, _section(section)) for section in sections]
    parts += [("Texts by producer", texts(results))]
    parts += [("Every measurement", table(all_cells(results), "every measurement"))]
    parts += [("How it was measured, and what to doubt", _list(reservations(results)))]
    links = "".join(f'<li><a href="#{name_of(name)}">{text(name)}</a></li>' for name, _ in parts)
    body = "".join(
        f'<section aria-labelledby="{name_of(name)}"><h2 id="{name_of(name)}">{text(name)}</h2>{content}</section>'
        for name, content in parts
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{text(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n"
        f"<header><h1>{text(title)}</h1></header>\n<main>\n"
        f'<section class="verdicts" aria-label="Verdicts">{_list(_verdicts(results))}</section>'
        f'<nav aria-label="Parts of this page"><ul>{links}</ul></nav>\n{body}</main>\n</body>\n</html>\n'
    )


def _title(results: Results) -> str:
    names = [results.models.get(role) for role in ("target", "draft")]
    known = [m["name"] for m in names if isinstance(m, dict) and m.get("name")]
    return "specdec bench" + (f": {' with '.join(map(str, known))}" if known else "")


def _verdicts(results: Results) -> Iterable[str]:
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


def _measured_on(results: Results) -> str:
    rows = {}
    for name, value in results.environment.items():
        if value is not None and name != "command":
            rows[FIELDS.get(name, _spaced(name))] = text(_words(value))
    for name, model in results.models.items():
        if model:
            rows[_spaced(name)] = text(_words(model))
    if settings := {k: v for k, v in results.settings.items() if v is not None}:
        rows["settings"] = text(_words(settings))
    if results.prompts:
        categories = dict.fromkeys(category for _, category in results.prompts if category)
        rows["prompts"] = text(f"{len(results.prompts)} ({', '.join(categories) or 'no categories'})")
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
    return about + "".join(map(picture, section.plots)) + left_out


def _list(sentences: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li>{text(sentence)}</li>' for sentence in sentences)}</ul>"
