"""Generated texts, each token in the colour of what produced it."""

from __future__ import annotations

from collections import Counter

from .markup import attribute, text
from .results import Results, Sample

# The words and, in page.css, the colours of the server's page; the colours are those of ``specdec generate -v``.
PRODUCERS = {
    "accepted": "drafted, and accepted by the large model",
    "recovered": "put by the large model instead of a wrong draft",
    "bonus": "added by the large model when all drafts were right",
    "plain": "written by the large model alone",
}
SHOWN = 3  # texts that are open from the start


def texts(results: Results) -> str:
    """The section's HTML."""
    if not results.samples:
        return "<p>No texts by producer: the results have no samples.</p>"
    names = {cell.id: f"{cell.name} ({cell.setting.words})" for cell in results.cells}
    categories = dict(results.prompts)
    legend = "".join(
        f'<li><span class="token {name}">{name}</span> {text(meaning)}</li>' for name, meaning in PRODUCERS.items()
    )
    parts = [f'<ul class="legend" aria-label="Colours and underlines">{legend}</ul>']
    samples = []
    for sample in results.samples:
        category = categories.get(sample.prompt_id)
        about = f"prompt {sample.prompt_id}" + (f" ({category})" if category and category != sample.prompt_id else "")
        samples.append(_sample(sample, f"{names.get(sample.cell, sample.cell)}, {about}"))
    parts += samples[:SHOWN]
    if more := samples[SHOWN:]:
        parts.append(f"<details><summary>{len(more)} more</summary>{''.join(more)}</details>")
    return "".join(parts)


def _sample(sample: Sample, title: str) -> str:
    counts = Counter(producer for _, producer in sample.pieces)
    said = ", ".join(f"{name} {counts[name]}" for name in dict.fromkeys((*PRODUCERS, *counts)) if counts[name])
    pieces = "".join(
        f'<span class="token {producer}" title="{producer}">{text(piece)}</span>'
        if producer in PRODUCERS
        else f'<span title="{attribute(producer)}">{text(piece)}</span>'
        for piece, producer in sample.pieces
    )
    return f'<h3>{text(title)}</h3><p class="dim">Tokens: {text(said)}.</p><div class="text" dir="auto">{pieces}</div>'
