"""The CPU of this process as a machine for roofline.py. Its numbers are measured, in about ten seconds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch.nn import functional as F

from .machine import cpu_name
from .roofline import Machine

WIDTH = 1024  # of square matrices of float32, 4 MB each
ROWS = 8  # of the products that are bound by operations: a verification of seven drafts
SECONDS, LEAST = 1.5, 5  # of each measurement, and its fewest samples
LAYERS, NEW_TOKENS = 8, 48  # of the model whose layers cost nothing but their calls, and of its text


def measure_cpu(weights: float) -> Machine:
    """
    Args:
        weights: bytes of the weights that are read in turn. Those that fit in a cache are read faster.
    """
    count = max(1, min(round(weights / (4 * WIDTH * WIDTH)), 256))
    matrices = [torch.randn(WIDTH, WIDTH) for _ in range(count)]
    one, several = torch.randn(1, WIDTH), torch.randn(ROWS, WIDTH)
    with torch.inference_mode():
        by_bytes = _seconds(lambda: [F.linear(one, m) for m in matrices])
        few = matrices[:4]
        by_operations = _seconds(lambda: [F.linear(several, m) for m in few])
    size = WIDTH * WIDTH
    return Machine(
        name=f"{cpu_name()}, {torch.get_num_threads()} threads",
        bandwidth=4.0 * size * count / by_bytes,
        rate=2.0 * ROWS * size * len(few) / by_operations,
        layer=_layer_seconds(),
        memory=None,
        about=f"measured here: products of float32 with {count} matrices of 4 MB, and layers of a tiny model",
    )


def _seconds(call: Callable[[], object]) -> float:
    """The median of some samples."""
    call()
    samples, end = list[float](), time.perf_counter() + SECONDS
    while len(samples) < LEAST or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        samples.append(time.perf_counter() - start)
    return statistics.median(samples)


def _layer_seconds() -> float:
    """Of a layer in specdec's own loop, whose products take no time worth speaking of."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from ..decoder import SpeculativeDecoder

    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=LAYERS, **sizes, **ends)).eval()
    decoder, found = SpeculativeDecoder(model, None, 0), []
    for _ in range(LEAST):
        stats = decoder.generate([[1, 2]], max_new_tokens=NEW_TOKENS, eos_token_id=[], pad_token_id=0).stats
        found.append(stats.seconds["target_forwards"] / stats.steps / LAYERS)
    return statistics.median(found)
