"""Times conv_window, delta_step and ssd_step on a CPU in the shapes of models, against transformers' own functions and
the floor: one pass, in place, over what a layer holds.

    python bench/bench_recurrent.py --json bench/results/recurrent.json

A forward reads all its weights between two calls of one layer. So calls go over the states of many layers in turn, more
than the caches hold. README.md says how each number is made.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Annotated

import report
import torch
import typer
from measure import Method, compared, interleave, prepare, summary
from specdec_layers import DeltaState, Feed, SsdState, conv_window, delta_step, ssd_step

WINDOW, START = 12, 16  # places of a window; tokens before the first of a step
TOKENS, ACCEPTED = (1, 4, 8), (0, 2)  # fed by a step; of the step before, which a state takes first


@dataclass
class Layers:
    """One layer's calls, on the states of many layers.

    Attributes:
        held: what layer i holds and a call has to read and write at least, in one tensor.
        ours, theirs: a call on layer i. Theirs cannot be rolled back, and takes no tokens of the step before.
    """

    held: list[torch.Tensor]
    ours: Callable[[int, Feed], torch.Tensor]
    theirs: Callable[[int], torch.Tensor]


def transformers_function(model: str, name: str) -> Callable:
    return getattr(import_module(f"transformers.models.{model}.modeling_{model}"), name)


def delta_rule(tokens: int, most_bytes: int, heads: int, key_heads: int, size: int) -> Layers:
    q, k = torch.randn(2, 1, tokens, key_heads, size)
    v, g, beta = torch.randn(1, tokens, heads, size), -torch.rand(1, tokens, heads), torch.rand(1, tokens, heads)
    states = [DeltaState.empty(1, WINDOW, k, v, g, beta) for _ in range(layers_of(heads * size * size, most_bytes))]
    for state in states:
        state.base.fill_(START)
    recurrent = transformers_function("qwen3_5", "torch_recurrent_gated_delta_rule")
    options = {"output_final_state": True, "use_qk_l2norm_in_kernel": True}
    # Older versions of the function want keys and queries of each head.
    wide_q, wide_k = (part.repeat_interleave(heads // key_heads, 2) for part in (q, k))
    return Layers(
        [s.state for s in states],
        lambda i, feed: delta_step(states[i], q, k, v, g, beta, feed),
        lambda i: recurrent(wide_q, wide_k, v, g, beta, initial_state=states[i].state, **options)[0],
    )


def state_space(tokens: int, most_bytes: int, heads: int, size: int, numbers: int, groups: int) -> Layers:
    """Mamba-2, and with heads of size 1 Mamba-1; transformers' functions take one token."""
    x, dt = torch.randn(1, tokens, heads, size), torch.rand(1, tokens, heads)
    B, C = torch.randn(2, 1, tokens, groups, numbers)
    A, D = -torch.rand(heads, numbers) if size == 1 else -torch.rand(heads), torch.rand(heads)
    states = [SsdState.empty(1, WINDOW, x, dt, B) for _ in range(layers_of(heads * size * numbers, most_bytes))]
    for state in states:
        state.base.fill_(START)
    mamba1 = transformers_function("jamba", "mamba_selective_state_update")
    mamba2 = transformers_function("nemotron_h", "mamba2_selective_state_update")
    wide_dt, wide_D = dt[..., None].expand_as(x), D[:, None].expand(heads, size)
    wide_A = A if size == 1 else A[:, None, None].expand(heads, size, numbers)

    def one(state: torch.Tensor, t: int) -> torch.Tensor:
        if size == 1:
            return mamba1(state[:, :, 0], x[:, t, :, 0], dt[:, t], A, B[:, t, 0], C[:, t, 0], D)[..., None]
        return mamba2(state, x[:, t], wide_dt[:, t], wide_A, B[:, t], C[:, t], wide_D)

    def theirs(i: int) -> torch.Tensor:
        return torch.stack([one(states[i].state, t) for t in range(tokens)], 1)

    return Layers([s.state for s in states], lambda i, feed: ssd_step(states[i], x, dt, B, C, A, D, feed), theirs)


def convolution(tokens: int, most_bytes: int, channels: int, taps: int) -> Layers:
    """What a layer holds is only its earlier inputs; beside these a call moves the fed ones."""
    x, weight = torch.randn(1, tokens, channels), torch.randn(channels, taps)
    layers = layers_of(channels * (WINDOW + taps - 1), most_bytes)
    windows = [torch.randn(1, WINDOW + taps - 1, channels) for _ in range(layers)]
    before = [(START - taps + tap) % (WINDOW + taps - 1) for tap in range(taps)]
    pasts, columns = [w[:, before].transpose(1, 2).contiguous() for w in windows], x.transpose(1, 2)
    update = transformers_function("lfm2", "causal_conv1d_update")
    return Layers(
        [w[:, : taps - 1 + tokens] for w in windows],
        lambda i, feed: conv_window(windows[i], x, weight, None, feed),
        lambda i: update(columns, pasts[i], weight).transpose(1, 2),
    )


def layers_of(numbers: int, most_bytes: int) -> int:
    return max(most_bytes // (4 * numbers), 2)


LAYERS = {  # by the models that have them
    "Qwen3.5 of 16 heads": (delta_rule, 16, 16, 128),
    "Qwen3.5-27B": (delta_rule, 48, 16, 128),
    "Nemotron-H": (state_space, 64, 64, 128, 8),
    "Jamba": (state_space, 8192, 1, 16, 1),
    "LFM2": (convolution, 2048, 3),
}


def measure_row(name: str, tokens: int, accepted: int, most_bytes: int, seconds: float) -> dict[str, object]:
    make, *sizes = LAYERS[name]
    layers = make(tokens, most_bytes, *sizes)
    count, start = len(layers.held), torch.tensor([START])
    feed = Feed(start, start, torch.ones(1, tokens, dtype=torch.bool))

    def ours(i: int) -> None:
        if i == 0:
            start.add_(accepted)  # all layers of a forward are at one position
        layers.ours(i, feed)

    ways = {"cpu": ours, "transformers": layers.theirs, "floor": lambda i: layers.held[i].mul_(1.0)}
    methods = [Method(way, run, count) for way, run in ways.items()]
    ready, unavailable = prepare(methods, torch.device("cpu"), seconds)
    samples = interleave(ready, torch.device("cpu"), seconds)
    mine, *others = ready
    row = {"layer": name, "sizes": sizes, "tokens": tokens, "accepted": accepted, "layers": count}
    row |= {"held_bytes": layers.held[0].numel() * 4, "unavailable": unavailable}
    row["seconds"] = {key: summary(values) for key, values in samples.items()}
    return row | {"ratios": compared(mine, others, samples, {})}


def main(
    threads: report.Threads = None,
    seconds: Annotated[float, typer.Option(min=0, help="a row, at least 5 rounds")] = 1.0,
    quick: report.Quick = False,
    json_path: report.JsonPath = None,
) -> None:
    """Times every layer."""
    device = torch.device("cpu")
    most_bytes = 1 << 20 if quick else 3 * report.cache_bytes(device)
    results = report.Report("recurrent", device, json_path, threads, quick=quick)
    for name, tokens, accepted in itertools.product(LAYERS, TOKENS, ACCEPTED):
        results.add(measure_row(name, tokens, accepted, most_bytes, seconds))
    lines = [{**row, **row["seconds"], **row["ratios"]} for row in results.rows]
    columns = ("layer", "tokens", "accepted", "cpu", "cpu/floor", "cpu/transformers")
    results.show("recurrent layers", lines, columns)
    results.finish()


if __name__ == "__main__":
    typer.run(main)
