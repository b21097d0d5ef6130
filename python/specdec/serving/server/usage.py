"""What responses tell of the work behind them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...loop.sequence import SequenceState
from ...stats import Stats


def usage(
    prompt_tokens: int, cached_tokens: int, texts: Sequence[SequenceState], reasoning_tokens: int = 0
) -> dict[str, Any]:
    """OpenAI's ``usage``. All tokens that were generated count, those that a stop string cut off, too.

    Args:
        prompt_tokens: of all prompts; one that has several choices counts once.
        cached_tokens: how many of these were taken over from earlier prompts.
    """
    generated = sum(len(text.tokens) for text in texts)
    accepted = sum(text.stats.accepted for text in texts)
    drafted = sum(text.stats.drafted for text in texts)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": generated,
        "total_tokens": prompt_tokens + generated,
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
            "reasoning_tokens": reasoning_tokens,
            "audio_tokens": 0,
        },
        "prompt_tokens_details": {"cached_tokens": cached_tokens, "audio_tokens": 0},
    }


def speculative_metrics(texts: Sequence[SequenceState], num_drafts: int) -> dict[str, Any]:
    """vLLM's ``metrics``, summed over all choices. Steps without drafts do not count, as there.

    Args:
        num_drafts: the largest K.
    """
    stats = [text.stats for text in texts]
    steps = sum(_from(s.drafted_by_position, 0) for s in stats)
    drafted, accepted = sum(s.drafted for s in stats), sum(s.accepted for s in stats)
    # How many steps accepted at least 0, 1, ... drafts
    at_least = [steps, *(sum(_from(s.accepted_by_position, i) for s in stats) for i in range(num_drafts)), 0]
    histogram = {str(i): count - at_least[i + 1] for i, count in enumerate(at_least[:-1])}
    return {
        "speculative_decoding": {
            "mean_acceptance_length": 1 + accepted / steps if steps else 1.0,
            "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
            "acceptance_histogram": {length: count for length, count in histogram.items() if count},
            "num_spec_steps": steps,
            "num_accepted_draft_tokens": accepted,
            "num_draft_tokens": drafted,
            "num_spec_tokens": num_drafts,
        }
    }


def stats(of: Stats, seconds: float) -> dict[str, Any]:
    """Our own counts of one choice; ``seconds`` from its request to its end."""
    by_position = zip(of.accepted_by_position, of.drafted_by_position, strict=True)
    return {
        "steps": of.steps,
        "drafted": of.drafted,
        "accepted": of.accepted,
        "tau": of.tau,
        "acceptance_rate": of.acceptance_rate,
        "by_position": [accepted / drafted if drafted else 0.0 for accepted, drafted in by_position],
        "seconds": seconds,
        "tokens_per_second": of.emitted / seconds if seconds > 0 else 0.0,
    }


def _from(counts: list[int], index: int) -> int:
    return counts[index] if index < len(counts) else 0
