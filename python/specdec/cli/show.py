"""How commands print texts, counts and comparisons: answers on stdout, remarks on stderr."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer
from rich.text import Text

from ..detokenize import IncrementalText, continuation
from ..stopping import cut_after
from .terminal import print_table, remark, write

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..evaluation.compare import Comparison, Spread
    from ..evaluation.near_ties import Difference
    from ..loop.sequence import Output, SequenceState
    from ..result import Producer
    from ..stats import Stats

# What tables call alpha and tau.
RATIOS = "alpha: accepted / tested drafts, where those after a rejection are not tested. tau: tokens a step."
COLOURS = {"accepted": "green", "recovered": "red", "bonus": "blue"}


class Page:
    """Prints one prompt and its continuation.

    Args:
        tokenizer: the target's.
        text: the prompt.
        prompt: its token ids.
        coloured: whether a token has the colour of what produced it.
        stop: strings that end the text. What the last token has after such a string is not shown.
        shows_prompt: whether the prompt is printed before the first token.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        text: str,
        prompt: Sequence[int],
        coloured: bool,
        stop: Sequence[str] = (),
        shows_prompt: bool = True,
    ):
        self._text, self._coloured, self._stop, self._started = text, coloured, stop, not shows_prompt
        self._continuation = IncrementalText(tokenizer, prompt)
        self.shown = ""

    def show(self, tokens: Sequence[int], produced_by: Sequence[Producer]) -> None:
        """Prints the text that the next tokens completed."""
        self._start()
        for token, producer in zip(tokens, produced_by, strict=True):
            colour = COLOURS[producer] if self._coloured else None
            write(self._new(self._continuation.push([token])), colour)

    def on_emit(self, output: Output) -> None:
        """As ``SpeculativeDecoder.generate`` calls it."""
        self.show(output.tokens, output.produced_by)

    def finish(self) -> None:
        self._start()
        write(self._new(self._continuation.finish()) + "\n")

    def _new(self, piece: str) -> str:
        """The part of the next piece that is shown."""
        before, whole = len(self.shown), self.shown + piece
        self.shown = cut_after(whole, self._stop, self._text)
        return self.shown[before:]

    def _start(self) -> None:
        """Prints the prompt once, when the first tokens are there: a refused prompt prints nothing to stdout."""
        if not self._started:
            write(self._text, dim=True)
        self._started = True


def print_stats(
    stats: Stats, produced_by: Sequence[Sequence[Producer]], verbose: bool, with_speed: bool = False, nodes: int = 0
) -> None:
    """A line on stderr about the texts whose tokens came from ``produced_by``; with ``verbose`` also how many tokens
    have which colour, where the time went, how far drafts went, and how often those of each place were accepted.

    Args:
        nodes: of the trees that were verified; 0: chains.
    """
    if verbose:
        producers = [str(p) for row in produced_by for p in row]
        legend = (Text(f"{name} {producers.count(name)}", c) for name, c in COLOURS.items())
        remark(Text("tokens: ") + Text(", ").join(legend))
        parts = (f"{part} {value:.3f}" for part, value in stats.seconds.items())
        remark("seconds: " + ", ".join(parts), "dim")
        taken = (f"{k} in {count}" for k, count in enumerate(stats.steps_by_drafts) if count)
        what = f"depth of the trees of up to {nodes} drafts" if nodes else "drafts asked for"
        remark(f"{what}: " + ", ".join(taken) + " steps", "dim")
        tests = zip(stats.accepted_by_position, stats.tested_by_position, strict=True)
        accepted = (f"{i}: {passed / tested:.0%}" for i, (passed, tested) in enumerate(tests, 1) if tested)
        remark(f"accepted by {'depth' if nodes else 'place'}, of those tested: " + (", ".join(accepted) or "–"), "dim")
    remark(in_short(stats, stats.seconds["total"] if with_speed else 0.0), "dim")


def in_short(stats: Stats, seconds: float = 0.0) -> str:
    """Of tokens that took so many seconds; 0: without their speed."""
    speed = f", {stats.emitted / seconds:.1f} tokens/s" if seconds else ""
    return f"{stats.emitted} tokens in {stats.steps} steps{speed}: {ratios(stats)}"


def print_troubles(drafter_error: str | None, texts: Sequence[SequenceState], texts_per_prompt: int = 1) -> None:
    """On stderr: why the drafter was dropped, and which texts ended because of their logits or their grammars."""
    if drafter_error is not None:
        print_drafter_error(drafter_error)
    for i, text in enumerate(texts):
        if text.status or text.error is not None:
            remark(f"Warning: prompt {i // texts_per_prompt}: {text.error or text.status.name}", "red")


def print_drafter_error(error: str) -> None:
    remark(f"Warning: the drafter failed, and tokens came from the target alone: {error}", "red")


def ratios(stats: Stats) -> str:
    """tau, acceptance rate and alpha, each with what it is."""
    accepted = f"acceptance rate {stats.acceptance_rate:.2f} (accepted / drafted)"
    return f"tau {stats.tau:.2f} tokens a step, {accepted}, alpha {stats.alpha:.2f} (accepted / tested)"


def print_comparison(
    comparison: Comparison, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Sequence[int]], shows_prompt: bool
) -> None:
    """Prints the texts of the first prompt, the measurements, the ratios, and whether greedy texts are equal."""
    prompt = str(tokenizer.decode(list(prompts[0]), skip_special_tokens=True)) if shows_prompt else ""
    texts: dict[str, list[str]] = {}
    for m in comparison.measurements:
        text = continuation(tokenizer, prompts[0], m.rounds[0][0].texts[0])
        texts.setdefault(text, []).append(m.name)
    for text, names in texts.items():
        typer.secho(f"--- {', '.join(names)} ---", dim=True)
        write(prompt + text + "\n")

    columns = ("method", "drafts\na step", "seconds", "tokens/s", "acceptance\nrate", "alpha", "tau", "loop")
    rows = []
    for m in comparison.measurements:
        row = m.to_dict()
        drafts = next((str(value) for value in m.setting.values()), "–")
        if "tree" in m.setting:
            drafts += f" deep of {m.setting['tree']}"
        numbers = [_number(row[name]) for name in ("acceptance_rate", "alpha", "tau", "loop_fraction")]
        seconds, speed = f"{row['seconds']:.3f}", _spread(m.tokens_per_second, 1)
        rows.append((m.name, drafts + "*" * bool(m.swept), seconds, speed, *numbers))
    print_table(columns, rows)
    remark(
        "Medians of the rounds (smallest to largest). loop: the part of specdec's time outside the models.", err=False
    )
    remark(f"acceptance rate: accepted / drafted. {RATIOS}", err=False)
    for m in comparison.measurements:
        if m.swept:
            tried = ", ".join(f"{setting}: {speed:.1f}" for setting, speed in m.swept.items())
            remark(f"* {m.name}: the fastest of these settings in short rounds (tokens/s): {tried}", err=False)
    for ours, other in comparison.ratios_of:
        remark(f"{ours}/{other}: {_spread(comparison.ratio(other, ours), 2)} times as fast", err=False)
    if comparison.greedy_equal is not None:
        remark(f"greedy texts of specdec and plain equal: {'yes' if comparison.greedy_equal else 'no'}", err=False)
    for difference in comparison.differences:
        remark(describe(difference, tokenizer), err=False)


def describe(d: Difference, tokenizer: PreTrainedTokenizerBase) -> str:
    def candidate(i: int) -> str:
        token = d.tokens[i]
        if token is None:
            return f"{d.methods[i]} ended"
        logits = f"logit {d.logits[i]} in {d.dtype}, {d.wide_logits[i]} in {d.wide_dtype}"
        return f"{d.methods[i]} {token} {tokenizer.decode([token])!r} ({logits})"

    gap = "" if d.gap is None else f"; gap to the best {d.gap:.3g}, rounding allows {d.bound:.3g}"
    return (
        f"{d.verdict}: prompt {d.prompt}, new token {d.position}: {candidate(0)}, {candidate(1)}{gap} "
        f"(twice the largest difference, {d.rounding:.3g}, between full, cached and {d.wide_dtype} forwards)"
    )


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _spread(spread: Spread, digits: int) -> str:
    s = spread.to_dict()
    return f"{s['median']:.{digits}f} ({s['min']:.{digits}f}–{s['max']:.{digits}f})"
