"""What a draft model's window (``draft_window``) saves in a long text, and what it costs in acceptance.

    python bench/bench_draft_window.py
    python bench/bench_draft_window.py --model real_models/SmolLM2-135M-Instruct --text README.md --text CHANGELOG.md

The first times the forward of one drafted token of a model with random weights (hidden size 256, four layers with
eight heads of 64 for keys), over a cache with a whole text and over that of a window. Keys are random numbers. ``move``
is what moving the window takes, for each token of the text. The second lets a model be its own draft, which without a
window is right but for rounding, greedily and sampled, after the first ``--prompt`` tokens of each text.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import report
import torch
import typer
from measure import all_timed, ratios, summary
from specdec import SpeculativeDecoder
from specdec.drafters.draft_window import SINKS, DraftWindow, WindowedRows
from specdec.models.cache.kv_cache import StaticKVCache
from specdec.models.forward.cached_model import CachedModel
from specdec.models.load.loading import load_model, load_tokenizer
from transformers import LlamaConfig, LlamaForCausalLM

from specdec_kernels import SamplingParams

K = 4


def small_draft() -> CachedModel:
    config = LlamaConfig(
        hidden_size=256, intermediate_size=768, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=8,
        head_dim=64, vocab_size=8192, max_position_embeddings=1 << 17,
    )  # fmt: skip
    return CachedModel(LlamaForCausalLM(config).eval())


def forward_of(model: CachedModel, cache: StaticKVCache, stored: int) -> Callable[[int], object]:
    """Returns a forward of one token after so many stored ones."""
    for states in cache.storage():
        states.normal_()
    place, token = torch.tensor([[stored]]), torch.tensor([[7]])
    return lambda _: model(token, cache, model.layout(place, place, min(stored + 1, cache.trash)))


def move_of(model: CachedModel, window: DraftWindow) -> Callable[[int], object]:
    """Returns what moves the window by so many tokens as it drops at once."""
    cache = model.new_cache(1, model.capacity(window.tokens(K)))
    rows, text = WindowedRows(window, cache, cache.trash), [0] * window.size

    def move(_: int) -> None:
        text.extend([0] * window.at_once)
        rows.move({0: text})

    return move


def time_forwards(results: report.Report, contexts: list[int], windows: list[int], seconds: float) -> None:
    model, each = small_draft(), []
    for context in contexts:
        cache = model.new_cache(1, model.capacity(context + K))
        ways = {"whole": forward_of(model, cache, context)}
        for size in windows:
            window = DraftWindow(size)
            own = model.new_cache(1, model.capacity(window.tokens(K)))
            WindowedRows(window, own, own.trash)
            ways |= {f"{size}": forward_of(model, own, SINKS + size), f"{size} move": move_of(model, window)}
        _, samples = all_timed(ways, results.device, seconds)
        whole = {"context": context, "window": None, "draft": summary(samples["whole"])}
        each.append(whole | {"MiB": cache.capacity * model.slot_bytes() / 2**20})
        for size in windows:
            window = DraftWindow(size)
            row = {"context": context, "window": size, "draft": summary(samples[f"{size}"])}
            row["move"] = summary([taken / window.at_once for taken in samples[f"{size} move"]])
            row["whole/window"] = ratios(samples["whole"], samples[f"{size}"])
            each.append(row | {"MiB": model.capacity(window.tokens(K)) * model.slot_bytes() / 2**20})
        results.rows[:] = each
    results.show("one drafted token", each, ("context", "window", "draft", "whole/window", "move", "MiB"))


def count_accepted(
    results: report.Report, folder: Path, texts: list[Path], prompt: int, new: int, windows: list[int]
) -> None:
    model, tokenizer = load_model(folder), load_tokenizer("model", str(folder))
    prompts = [tokenizer(text.read_text(encoding="utf-8")).input_ids[:prompt] for text in texts]
    rows: list[dict[str, object]] = []
    for temperature in (0.0, 1.0):
        for window in (None, *windows):
            decoder = SpeculativeDecoder(model, model, K, draft_window=window)
            more = {"params": SamplingParams(temperature), "seed": [*range(len(prompts))], "eos_token_id": []}
            stats = decoder.generate(prompts, max_new_tokens=new, **more).stats
            rows.append({"temperature": temperature, "window": window, "alpha": stats.alpha, "tau": stats.tau})
            results.add(rows[-1])
    title = f"{folder.name}, its own draft, K = {K}, {len(prompts)} texts of {prompt} + {new} tokens"
    results.show(title, rows, ("temperature", "window", "alpha", "tau"))


@torch.inference_mode()
def main(
    contexts: Annotated[str, typer.Option(help="tokens of the text, separated by commas")] = "16384,65536",
    windows: Annotated[str, typer.Option(help="W, separated by commas")] = "256,2048",
    model: Annotated[Path | None, typer.Option(help="a folder: acceptance with this one is counted instead")] = None,
    text: Annotated[list[Path] | None, typer.Option(help="for --model")] = None,
    prompt: Annotated[int, typer.Option(min=2, help="tokens of each text that are read")] = 1500,
    new: Annotated[int, typer.Option(min=1, help="tokens that are decoded after each")] = 64,
    seconds: Annotated[float, typer.Option(min=0, help="of each context")] = 20.0,
    threads: report.Threads = None,
    quick: report.Quick = False,
    json_path: report.JsonPath = None,
) -> None:
    sizes = report.read_integers("windows", windows)
    asked = [64, 128] if quick else report.read_integers("contexts", contexts)
    results = report.Report("draft_window", torch.device("cpu"), json_path, threads, quick=quick)
    if model is None:
        time_forwards(results, asked, [16] if quick else sizes, 0.1 if quick else seconds)
    else:
        count_accepted(results, model, text or [], prompt, new, sizes)
    results.finish()


if __name__ == "__main__":
    typer.run(main)
