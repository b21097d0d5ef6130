"""Compares what ``specdec advise`` predicts with what is then measured, on pairs that pay and pairs that do not.

    python bench/bench_advise.py --json bench/results/cpu/advise.json

README.md says how each number is made.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, NamedTuple

import report
import torch
import typer
from measure import in_turns, ratios, summary
from specdec import SpeculativeDecoder, load_embedded_pair
from specdec.cli.compare_command import CODE_PROMPTS
from specdec.evaluation.advise import Advice, AdviseSettings, advise
from transformers import PreTrainedModel
from tunable_pair import TunablePair, named_pair

CPU = torch.device("cpu")


class Pair(NamedTuple):
    target: PreTrainedModel
    draft: PreTrainedModel
    prompts: list[list[int]]


def embedded() -> Pair:
    target, draft, tokenizer = load_embedded_pair()
    return Pair(target, draft, tokenizer(list(CODE_PROMPTS)).input_ids)


def _random_prompts(target: PreTrainedModel) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(target.config.vocab_size, (3, 32), generator=generator).tolist()


def _tuned(alpha: float) -> TunablePair:
    tuned = named_pair("120m", CPU)
    tuned.calibrate(alpha, 0.0)
    return tuned


def tuned(alpha: float) -> Pair:
    pair = _tuned(alpha)
    return Pair(pair.target, pair.draft, _random_prompts(pair.target))


def itself() -> Pair:
    """The draft is right in everything, and as dear as the target."""
    target = _tuned(0.8).target
    return Pair(target, target, _random_prompts(target))


PAIRS: dict[str, Callable[[], Pair]] = {
    "embedded": embedded,
    "113 M, alpha 0.8": lambda: tuned(0.8),
    "113 M, alpha 0.1": lambda: tuned(0.1),
    "113 M, drafted by itself": itself,
}


class Decoded(NamedTuple):
    """What one decoder did: seconds of each round, and tau and texts, which are the same in all."""

    seconds: list[float]
    tau: float
    texts: list[list[list[int]]]


def decode(
    decoders: Mapping[str, SpeculativeDecoder], prompts: Sequence[list[int]], tokens: int, rounds: int
) -> dict[str, Decoded]:
    """Continues the prompts one by one, greedily, with each decoder in turns; the first round does not count."""
    found = {name: Decoded([], 1.0, []) for name in decoders}
    for name in in_turns([*decoders], 1 + rounds):
        results = [decoders[name].generate([p], max_new_tokens=tokens, eos_token_id=[]) for p in prompts]
        seconds = [*found[name].seconds, sum(r.stats.seconds["total"] for r in results)]
        tau = sum(r.stats.emitted for r in results) / sum(r.stats.steps for r in results)
        found[name] = Decoded(seconds, tau, [r.tokens for r in results])
    return {name: each._replace(seconds=each.seconds[1:]) for name, each in found.items()}


def compare(pair: Pair, advice: Advice, rounds: int) -> dict[str, object]:
    """Decodes all prompts plainly and with the advised number of drafts."""
    k, tokens = advice.verdict.num_drafts, advice.settings.tokens
    assert k is not None
    decoders = {
        "plain": SpeculativeDecoder(pair.target, None, 0),
        "specdec": SpeculativeDecoder(pair.target, pair.draft, k),
    }
    plain, ours = decode(decoders, pair.prompts, tokens, rounds).values()
    emitted = tokens * len(pair.prompts)
    return {
        "speedup": ratios(plain.seconds, ours.seconds),
        "plain_tokens_per_second": summary([emitted / s for s in plain.seconds]),
        "tokens_per_second": summary([emitted / s for s in ours.seconds]),
        "tau": ours.tau,
        "greedy_equal": plain.texts == ours.texts,
    }


def row(name: str, pair: Pair, settings: AdviseSettings, rounds: int) -> dict[str, object]:
    advice = advise(pair.target, {"model": pair.draft}, pair.prompts, settings)
    v = advice.verdict
    found: dict[str, object] = {"pair": name, "answer": v.answer, "words": advice.words}
    if v.num_drafts is None:  # the threads wait for CPUs, so nothing was predicted
        return found
    measured, best = compare(pair, advice, rounds), advice.tried[0].best
    return found | {
        "K": v.num_drafts,
        "alpha": advice.tried[0].alpha,
        "c": advice.tried[0].c,
        "predicted": {"speedup": v.speedup, "tau": best.tau, "tokens_per_second": v.tokens_per_second},
        "measured": measured,
        "predicted_over_measured": v.speedup / measured["speedup"]["median"],  # type: ignore[index]
    }


def main(
    pairs: Annotated[str | None, typer.Option(help=f"separated by semicolons; of {'; '.join(PAIRS)}")] = None,
    seconds: Annotated[float, typer.Option(help="for which steps of a pair are measured")] = 40.0,
    new_tokens: Annotated[int, typer.Option(min=2)] = 64,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    threads: report.Threads = None,
    quick: report.Quick = False,
    json_path: report.JsonPath = None,
) -> None:
    """Asks for advice, then measures the advised K beside plain decoding: greedy, float32, one sequence at a time."""
    names = [*PAIRS] if pairs is None else pairs.split(";")
    if unknown := [name for name in names if name not in PAIRS]:
        report.refuse("pairs", repr(unknown[0]), "; ".join(PAIRS))
    if quick:
        names, seconds, new_tokens, rounds = ["embedded"], 0.1, 6, 1
    settings = AdviseSettings(seconds, new_tokens, most_drafts=2 if quick else 8, batch_sizes=())
    results = report.Report("advise", CPU, json_path, threads, quick=quick, new_tokens=new_tokens, rounds=rounds)
    for name in names:
        found = row(name, PAIRS[name](), settings, rounds)
        results.add(found)
        results.say({name: found["words"][0]})  # type: ignore[index]
        if "measured" in found:
            results.say({"predicted over measured": found["predicted_over_measured"]})
    results.finish()


if __name__ == "__main__":
    typer.run(main)
