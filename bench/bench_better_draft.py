"""Whether a better draft is worth what ``specdec advise`` promises for it: one draft before and after it learned more.

    python bench/bench_better_draft.py --json bench/results/cpu/better_draft.json

README.md says how each number is made.
"""

from __future__ import annotations

import copy
import tempfile
from pathlib import Path
from typing import Annotated

import report
import torch
import typer
from bench_advise import decode
from bench_distill import corpus_of
from measure import ratios
from specdec import SpeculativeDecoder, load_embedded_pair
from specdec.evaluation.advise import MORE_ALPHA
from specdec.evaluation.advise.costs import Workload, measure, shortest_text
from specdec.evaluation.advise.prediction import best, more_accepted
from specdec.models.loading import load_model
from specdec.training.distill import distill, encoded, read_loss, read_text
from specdec.training.settings import DistillSettings, TrainSettings
from specdec.training.starts import cut
from specdec.training.texts import Corpus
from transformers import PreTrainedModel, PreTrainedTokenizerBase

CPU = torch.device("cpu")
MOST, PROMPT = 8, 32  # drafts, and tokens of a prompt


def main(
    less: Annotated[int, typer.Option(min=1, help="steps of the draft before")] = 120,
    more: Annotated[int, typer.Option(min=1, help="further steps, to the draft after")] = 120,
    before: Annotated[Path | None, typer.Option(help="a folder of a draft, which is not trained then")] = None,
    after: Annotated[Path | None, typer.Option(help="the same, of the better one")] = None,
    seconds: Annotated[float, typer.Option(help="for which steps of each pair are measured")] = 25.0,
    prompts: Annotated[int, typer.Option(min=1, help="held-out ones")] = 16,
    new_tokens: Annotated[int, typer.Option(min=2)] = 64,
    rounds: Annotated[int, typer.Option(min=1)] = 4,
    threads: report.Threads = None,
    quick: report.Quick = False,
    json_path: report.JsonPath = None,
) -> None:
    """Trains 2 of the embedded target's layers, and once more from there. What the second training is worth is
    predicted by what advise measures of the first draft, for as much more alpha, and then measured: greedy, float32,
    one sequence at a time."""
    if (before is None) != (after is None):
        report.refuse("before, after", "one of them", "both, or none")
    if quick:
        less, more, seconds, prompts, new_tokens, rounds = 1, 1, 0.1, 1, shortest_text(MOST), 1
    target, _, tokenizer = load_embedded_pair()
    texts = corpus_of(quick)
    drafts = [load_model(folder, "float32") for folder in (before, after) if folder is not None]
    if not drafts:
        drafts.append(trained(target, cut(target, 2).eval(), tokenizer, texts, less))
        drafts.append(trained(target, drafts[0], tokenizer, texts, more))
    held_out = [token for ids in encoded(tokenizer, texts.held_out) for token in ids]
    every = len(held_out) // prompts
    given = [held_out[i * every : i * every + PROMPT] for i in range(prompts)]
    facts = {"less": less, "more": more, "prompts": prompts, "new_tokens": new_tokens, "rounds": rounds}
    results = report.Report("better_draft", CPU, json_path, threads, quick=quick, promised_alpha=MORE_ALPHA, **facts)
    results.add(row(target, *drafts, given, new_tokens, seconds, rounds))
    results.say({"measured over promised": results.rows[-1]["measured_over_promised"]})
    results.finish()


def trained(
    target: PreTrainedModel,
    start: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    texts: Corpus,
    steps: int,
) -> PreTrainedModel:
    train = TrainSettings(read_loss("total_variation"), steps, 2e-3, warm_up=10, every=steps)
    settings = DistillSettings(train, read_text("data"), length=128, judged=2, output_dtype="float32")
    draft = copy.deepcopy(start)
    with tempfile.TemporaryDirectory() as folder:
        distill(target, draft, tokenizer, texts, settings, Path(folder))
    return draft


def row(
    target: PreTrainedModel,
    before: PreTrainedModel,
    after: PreTrainedModel,
    prompts: list[list[int]],
    tokens: int,
    seconds: float,
    rounds: int,
) -> dict[str, object]:
    plain, widths = SpeculativeDecoder(target, None, 0), range(1, MOST + 1)
    known = [
        measure(plain, SpeculativeDecoder(target, d, MOST), Workload(prompts, tokens), 1, widths, seconds)
        for d in (before, after)
    ]
    chances, alphas = known[0].acceptance.by_position(), [m.acceptance.alpha for m in known]
    now = best(known[0], tokens)
    promised = {
        gain: best(known[0], tokens, by_position=more_accepted(chances, alphas[0], gain))
        for gain in (MORE_ALPHA, alphas[1] - alphas[0])
    }
    then = promised[alphas[1] - alphas[0]]
    decoders = {
        "before": SpeculativeDecoder(target, before, now.num_drafts),
        "after": SpeculativeDecoder(target, after, then.num_drafts),
    }
    done = decode(decoders, prompts, tokens, rounds)
    measured = ratios(done["before"].seconds, done["after"].seconds)
    return {
        "alpha": alphas,
        "K": [now.num_drafts, then.num_drafts],
        "tau_predicted": [now.tau, then.tau],
        "tau": [done["before"].tau, done["after"].tau],
        "promised_for_more_alpha": promised[MORE_ALPHA].speedup / now.speedup,
        "promised": then.speedup / now.speedup,
        "measured": measured,
        "measured_over_promised": measured["median"] / (then.speedup / now.speedup),
        "greedy_equal": done["before"].texts == done["after"].texts,
    }


if __name__ == "__main__":
    typer.run(main)
