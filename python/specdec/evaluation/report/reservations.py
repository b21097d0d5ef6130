"""How the numbers were measured, and what they do not say."""

from __future__ import annotations

from collections.abc import Iterator

from .results import Results

FEW_ROUNDS, FEW_PROMPTS = 5, 10


def reservations(results: Results) -> Iterator[str]:
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
        "in Python on small models, and plain decoding by specdec, the same loop without drafts. Speed-ups against K, "
        "maps and predictions are over the second."
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
    if 0 < len(results.prompts) < FEW_PROMPTS:
        yield f"Prompts: {len(results.prompts)}. Acceptance, and with it the speed, depends on the text."
    yield "It is one machine and one pair of models. On others, measure again."
