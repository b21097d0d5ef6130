"""Times the target's forward of a step on a CPU, of a model with random weights, against the floor: its weights are
read once.

    python bench/bench_cpu_step.py --json bench/results/cpu_step.json

The floor is the sum of a buffer of as many bytes, in huge pages as the weights are (``floor``), in turns with the
steps, since a shared machine's bandwidth changes from minute to minute. ``products`` are those of the model's linear
layers, without anything between.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import report
import torch
import typer
from measure import all_timed, compared, summary
from specdec.models.exchanged.huge_pages import move_to_huge_pages
from specdec.models.exchanged.stored_weights import compute_in_float32
from specdec.models.forward.cached_model import CachedModel
from specdec_layers import linears
from transformers import LlamaConfig, LlamaForCausalLM

SHAPES = {  # hidden, intermediate, layers, heads, heads of keys, vocabulary
    "1B": (2048, 8192, 16, 32, 8, 128256),  # Llama-3.2-1B
    "135M": (576, 1536, 30, 9, 3, 49152),  # SmolLM2-135M
    "tiny": (64, 128, 2, 2, 1, 256),
}
STORED = 256  # tokens before the step


def model_of(shape: str, dtype: torch.dtype) -> LlamaForCausalLM:
    hidden, inner, layers, heads, key_heads, vocabulary = SHAPES[shape]
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=inner, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=key_heads, vocab_size=vocabulary, tie_word_embeddings=True, dtype=dtype,
    )  # fmt: skip
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        model = LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)
    return compute_in_float32(model) if dtype == torch.bfloat16 else model  # type: ignore[return-value]


def step_of(cached: CachedModel, tokens: int) -> Callable[[int], object]:
    """Returns a forward of so many tokens of a sequence, as :class:`measure.Method` runs it."""
    cache = cached.new_cache(1, 2 * STORED)
    cached.prefill(cache, [[5] * STORED])
    fed, places = torch.full((1, tokens), 7), STORED + torch.arange(tokens)[None]
    return lambda _: cached(fed, cache, cached.layout(places, places, STORED + tokens))


def main(
    shapes: Annotated[str, typer.Option(help="separated by commas")] = "1B,135M",
    dtypes: Annotated[str, typer.Option(help="of the weights")] = "bfloat16,float32",
    tokens: Annotated[str, typer.Option(help="of a step, K + 1")] = "1,5",
    seconds: Annotated[float, typer.Option(min=0, help="of each row")] = 20.0,
    threads: report.Threads = None,
    quick: report.Quick = False,
    json_path: report.JsonPath = None,
) -> None:
    chosen = ["tiny"] if quick else report.read_names("shapes", shapes, SHAPES)
    seconds = 0.1 if quick else seconds
    device = torch.device("cpu")
    results = report.Report("cpu_step", device, json_path, threads, quick=quick, stored=STORED)
    for shape in chosen:
        rows: list[dict[str, object]] = []
        for dtype in report.read_names("dtypes", dtypes, ("bfloat16", "float32")):
            model = model_of(shape, getattr(torch, dtype))
            weights = [m.weight for m in model.modules() if isinstance(m, torch.nn.Linear)]
            size = sum(weight.numel() * weight.itemsize for weight in weights)
            move_to_huge_pages([buffer := torch.rand(size // 4)])
            cached = CachedModel(model)
            with torch.inference_mode():
                for count in (int(n) for n in tokens.split(",")):
                    x = {width: torch.randn(1, count, width) for width in {w.shape[1] for w in weights}}

                    def products(i: int, x=x, weights=weights) -> list:
                        return [linears(x[w.shape[1]], [w], [None]) for w in weights]

                    def floor(i: int, buffer=buffer) -> torch.Tensor:
                        return buffer.sum()

                    ways = {"step": step_of(cached, count), "products": products, "floor": floor}
                    methods, samples = all_timed(ways, device, seconds)
                    rows.append({
                        "shape": shape, "weights": dtype, "tokens": count, "bytes": size,
                        **{m.key: summary(samples[m.key]) for m in methods},
                        **compared(methods[0], methods[1:], samples, {}),
                        "gigabytes_per_second": size / summary(samples["floor"])["median"] / 1e9,
                    })  # fmt: skip
                    results.add(rows[-1])
            del model, cached, weights, buffer
        results.show(shape, rows, ("weights", "tokens", "step", "step/floor", "step/products", "gigabytes_per_second"))
    results.finish()


if __name__ == "__main__":
    typer.run(main)
