"""The decision, and how it is put: what to do first, then why, then what would change it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ...models.machine.free_memory import size_text
from .compatibility import PADDING
from .machine_trouble import Shares, Threads
from .new_draft import NewDraft, describe, pays_from
from .prediction import Prediction, Tried

NOTHING_MORE = (
    "Sampled texts and several sequences at a time were not measured: with sampling fewer drafts are accepted as a "
    "rule, and the more sequences there are, the more a forward over drafts costs."
)
BETTER_RULE = 1.03  # times as fast, from which on a rule other than the default is advised


@dataclass(frozen=True)
class Verdict:
    """
    Attributes:
        answer: "speculate"; "plain": it does not pay; "threads" or "copies": what is to be changed first.
        drafter, num_drafts, rule: what to speculate with, or what would come closest.
        threads: for torch.
        speedup: that is expected over plain decoding, greedily with one sequence.
        tokens_per_second, plain_tokens_per_second: the same in tokens.
        stops_at_batch: the smallest of the measured batch sizes from which on speculation does not pay; None: it paid
            with all of them.
    """

    answer: Literal["speculate", "plain", "threads", "copies"]
    threads: int
    drafter: str | None = None
    num_drafts: int | None = None
    rule: str | None = None
    speedup: float | None = None
    tokens_per_second: float | None = None
    plain_tokens_per_second: float | None = None
    stops_at_batch: int | None = None


def verdict(
    tried: Sequence[Tried], sampled: Mapping[str, Prediction], batches: Mapping[int, Prediction], threads: Threads,
    shares: Shares | None,
) -> Verdict:  # fmt: skip
    """Decides. ``tried`` begins with the fastest."""
    one = tried[0].best
    rule = "token"
    if "block" in sampled and sampled["block"].speedup > BETTER_RULE * sampled["token"].speedup:
        rule = "block"
    stops: int | None = None
    for size in sorted(batches, reverse=True):
        if batches[size].pays:
            break
        stops = size
    answer: Literal["speculate", "plain", "copies"] = "speculate" if one.pays else "plain"
    if shares is not None and shares.copies_dominate:
        answer = "copies"
    plain = one.tokens_per_second / one.speedup
    return Verdict(
        answer, threads.best, tried[0].name, one.num_drafts, rule, one.speedup, one.tokens_per_second, plain, stops
    )


def say(
    result: Verdict,
    threads: Threads,
    shares: Shares | None,
    tried: Sequence[Tried],
    sampled: Mapping[str, Prediction],
    batches: Mapping[int, Prediction],
    tokens: int,
    temperature: float | None,
    new: NewDraft | None = None,
) -> list[str]:
    """Returns the advice as sentences."""
    if result.answer == "threads":
        return _threads_trouble(threads)
    first = tried[0]
    lines = [_answer(result, first, tokens)]
    if result.answer == "copies" and shares is not None:
        lines.insert(0, _copies_trouble(shares))
    lines.append(_why(first))
    if temperature is not None and sampled:
        lines.append(_sampled(result, sampled, temperature))
    lines.append(_batches(result, batches) if sampled else NOTHING_MORE)
    if result.threads != threads.count:
        lines.append(
            f"Threads: a forward of the target takes {_ms(threads.seconds[threads.count])} with {threads.count} "
            f"threads and {_ms(threads.seconds[result.threads])} with {result.threads}: set "
            f"OMP_NUM_THREADS={result.threads}, and ask again."
        )
    if first.has_model:
        lines += [_memory(first), _what_if(first)]
    if first.memory.target_row or first.memory.draft_row:
        lines.append(_states(first))
    lines += [line for t in tried if (line := _tokens_of(t)) is not None]
    return lines if new is None else lines + describe(new)


def _answer(result: Verdict, first: Tried, tokens: int) -> str:
    speed, plain = f"{result.tokens_per_second:.1f}", f"{result.plain_tokens_per_second:.1f}"
    k, texts = result.num_drafts, f"texts of {tokens} tokens, one at a time, greedy"
    if first.best.pays:
        return (
            f"Yes, speculate: with {first.name} and K = {k}, {speed} tokens/s are expected, {result.speedup:.2f} times "
            f"the {plain} of plain decoding ({texts})."
        )
    return (
        f"No, do not speculate: plain decoding writes {plain} tokens/s. What comes closest is {first.name} with "
        f"K = {k}: {speed} tokens/s, {result.speedup:.2f} times as fast ({texts})."
    )


def _why(first: Tried) -> str:
    b, parts = first.best, first.parts[first.best.num_drafts]
    drafting, forward = parts["draft_forwards"], parts["target_forwards"]
    wide = forward / first.plain_forward if first.plain_forward else 1.0
    chances = ", ".join(f"{a:.2f}" for a in first.by_position[: b.num_drafts])
    of_draft = f"{_ms(drafting)} of drafting (c = {first.c:.2f}), " if first.has_model else ""
    rest = max(b.step - forward - (drafting if first.has_model else 0.0), 0.0)
    said = (
        f"Why: a step with K = {b.num_drafts} emits {b.tau:.2f} tokens (alpha {first.alpha:.2f}; by position "
        f"{chances}) in {_ms(b.step)}, a plain step one in {_ms(b.plain)}: {b.tau * b.plain / b.step:.2f} times as "
        f"fast, and {b.speedup:.2f} times with the reading of the prompts. The {_ms(b.step)} are {of_draft}"
        f"{_ms(forward)} of the target's forward over {b.num_drafts + 1} tokens ({wide:.2f} times that over one) and "
        f"{_ms(rest)} of everything else."
    )
    if b.pays:
        return said
    reasons = []
    if first.has_model and first.c > 0.5:
        reasons.append("the draft is nearly as expensive as the target")
    if first.alpha < 0.4:
        reasons.append("its drafts are seldom accepted")
    if wide > 1.5:
        reasons.append("on this machine, verifying several tokens costs nearly as much as decoding them")
    return f"{said} So {' and '.join(reasons)}." if reasons else said


def _sampled(result: Verdict, sampled: Mapping[str, Prediction], temperature: float) -> str:
    by_rule = ", ".join(
        f"{rule} {p.speedup:.2f} times plain with K = {p.num_drafts} (tau {p.tau:.2f})" for rule, p in sampled.items()
    )
    pays = any(p.pays for p in sampled.values())
    return (
        f"At temperature {temperature:g}: {by_rule}. "
        + (f"Use rule {result.rule}" if pays else "It does not pay there")
        + "; greedy texts are the same with every rule, and coupled texts depend on no draft."
    )


def _batches(result: Verdict, batches: Mapping[int, Prediction]) -> str:
    each = ", ".join(f"{size}: {p.speedup:.2f} (K = {p.num_drafts})" for size, p in sorted(batches.items()))
    end = (
        f"it pays with {max(batches)}, the most that were tried"
        if result.stops_at_batch is None
        else f"it does not pay from {result.stops_at_batch} on"
    )
    return f"Times plain by sequences at a time: {each}; {end}."


def _memory(first: Tried) -> str:
    m = first.memory
    part = f" ({m.draft / m.target:.0%} of the target's)" if m.target else ""
    cache = f"{size_text(m.draft_slot)} of cache for each token, beside the target's {size_text(m.target_slot)}"
    return f"Memory: {first.name} takes {size_text(m.draft)} of weights{part} and {cache}."


def _states(first: Tried) -> str:
    m = first.memory
    states = f"{size_text(m.target_row)} for the target's states and {size_text(m.draft_row)} for those of {first.name}"
    return f"Recurrent layers: each sequence takes {states}, however long it is."


def _what_if(first: Tried) -> str:
    half, more, k = first.half_the_draft, first.more_alpha, first.best.num_drafts
    least = pays_from(first, first.parts[k]["draft_forwards"] / k)
    pays = "would not pay with any alpha" if least is None else f"pays from alpha {least:.2f} on"
    return (
        f"A draft that takes as long {pays}. One that takes half the time would give {half.speedup:.2f} times plain "
        f"(K = {half.num_drafts}), and 0.05 more alpha {more.speedup:.2f} (K = {more.num_drafts})."
    )


def _tokens_of(tried: Tried) -> str | None:
    c = tried.compatibility
    if c is None or c.kind == "equal":
        return None
    if c.kind in PADDING:
        return f"Tokens of {tried.name}: the target's, padded to another size; only the tokenizer's are drafted."
    return (
        f"Tokens of {tried.name}: another tokenizer's, translated as text. {c.shared:.0%} of the target's tokens are "
        f"among them, and the prompts take {c.tokens_each:.2f} times as many."
    )


def _threads_trouble(threads: Threads) -> list[str]:
    timed = ", ".join(f"{n}: {_ms(s)}" for n, s in sorted(threads.seconds.items()))
    load = "" if threads.load is None else f", and a load of {threads.load:.1f}"
    return [
        f"First, the threads: torch computes with {threads.count} on {threads.usable} usable CPUs{load}, so operations "
        f"wait for threads that wait for a CPU. Set OMP_NUM_THREADS={threads.best}, or free the CPUs, and ask again.",
        f"A forward of the target takes, by the number of threads: {timed}. Anything measured now would be about that.",
    ]


def _copies_trouble(shares: Shares) -> str:
    return (
        f"First, the copies: {shares.copies:.0%} of the target's forward copies tensors, and {shares.matrix:.0%} "
        "multiplies matrices. That is mostly attention which repeats or joins keys and values: load the model with "
        "attn_implementation='sdpa', or see docs/models.md for its type. The numbers below are of it as it is."
    )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f} ms"
