"""How the costs grow: the operations with V, K and B, and a decoding step with the context and the size of the model;
and how far specdec's roofline model is off on this CPU.

    python bench/bench_scaling.py --json bench/results/scaling.json

The points of a curve are timed in the same rounds. README.md says how each number is made.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Annotated

import report
import torch
import typer
from cases import Case, Shape, StepInputs
from measure import in_turns, interleave, summary
from scaling_fit import fit
from specdec import SpeculativeDecoder, load_embedded_pair
from specdec.evaluation.model_shapes import shape_of
from specdec.evaluation.roofline import Machine, Pair
from specdec.evaluation.this_cpu import measure_cpu
from transformers import PreTrainedModel
from tunable_pair import PRESETS, Preset, make_pair

PARTS = ("operations", "context", "size", "roofline")
BASE = {"B": 1, "K": 4, "V": 32768}
CURVES = {"V": (8192, 16384, 32768, 65536, 131072), "K": (1, 2, 4, 8, 16), "B": (1, 2, 4, 8, 16)}
CONTEXTS = (128, 512, 1024, 2048, 4096, 8192)
CONTEXT_PRESET = "tiny"
# hidden, layers; everything else as in the preset of 113 million parameters
SIZES = ((128, 6), (256, 8), (384, 10), (512, 12), (768, 16))
DRAFTS, NEW_TOKENS, SHORT = 4, 24, 64  # K, the tokens of a timed text, and its prompt's where the context is no matter
ALPHA = 0.8  # of the pair of 113 million parameters


def settings_of(curve: str) -> list[Shape]:
    return [Shape(**(BASE | {curve: value}), dtype="float32") for value in CURVES[curve]]


def operations(curve: str, where: torch.device, seconds: float, quick: bool) -> dict[str, object]:
    """One curve of ``speculative_step`` by rule ``token``, with the draft's statistics handed over."""
    shapes = settings_of(curve)[: 3 if quick else None]
    shapes = [dataclasses.replace(s, V=s.V // 64) if quick else s for s in shapes]
    case, methods = Case("scaling", shapes[0]), []
    for shape in shapes:
        inputs = StepInputs(shape, "typical", case.temperature, where, 2 if quick else 64)
        methods.append(inputs.method(str(getattr(shape, curve)), "auto", stats=True))
    for method in methods:
        for _ in range(4):
            method.sample()
        method.pace(where, seconds / 10 / len(methods))
    found = interleave(methods, where, seconds)
    points = {int(name): summary(samples) for name, samples in found.items()}
    fixed = ", ".join(f"{name} = {value}" for name, value in BASE.items() if name != curve)
    return {"part": "operations", "of": "speculative_step", "against": curve, "fixed": fixed} | fitted(points)


def fitted(points: Mapping[int, Mapping[str, float]]) -> dict[str, object]:
    x, y = [*points], [point["median"] for point in points.values()]
    return {"points": {str(n): point for n, point in points.items()}, "fit": fit(x, y)}


def step_seconds(decoder: SpeculativeDecoder, prompt: Sequence[int], tokens: int) -> dict[str, float]:
    """Seconds of a step by part, ``total`` of them without the prompt, and ``tau`` and ``alpha``."""
    stats = decoder.generate([prompt], max_new_tokens=tokens, eos_token_id=[], pad_token_id=0).stats
    parts = {part: taken / stats.steps for part, taken in stats.seconds.items() if part not in ("prefill", "total")}
    return parts | {"total": sum(parts.values()), "tau": stats.tau, "alpha": stats.alpha or 0.0}


def steps(
    decoders: Mapping[int, SpeculativeDecoder], prompts: Mapping[int, Sequence[int]], rounds: int, tokens: int
) -> dict[int, dict[str, float | int]]:
    """Times of a step by point, in turns, after one round that does not count."""
    samples: dict[int, list[float]] = {x: [] for x in decoders}
    for turn, x in enumerate(in_turns([*decoders], rounds + 1)):
        taken = step_seconds(decoders[x], prompts[x], tokens)["total"]
        if turn >= len(decoders):
            samples[x].append(taken)
    return {x: summary(of) for x, of in samples.items()}


def random_prompt(vocabulary: int, tokens: int) -> list[int]:
    return torch.randint(vocabulary, (tokens,), generator=torch.Generator().manual_seed(tokens)).tolist()


def context(where: torch.device, rounds: int, quick: bool) -> list[dict[str, object]]:
    pair = make_pair(PRESETS[CONTEXT_PRESET], where)
    contexts = CONTEXTS[:3] if quick else CONTEXTS
    prompts = {n: random_prompt(PRESETS[CONTEXT_PRESET].vocabulary, n) for n in contexts}
    rows = []
    for k in (0, DRAFTS):
        decoder = SpeculativeDecoder(pair.target, pair.draft if k else None, k)
        points = steps(dict.fromkeys(contexts, decoder), prompts, rounds, NEW_TOKENS)
        fixed = f"K = {k}, {parameters(pair.target) / 1e6:.2g} million parameters"
        rows.append({"part": "context", "of": "a step", "against": "context", "fixed": fixed} | fitted(points))
    return rows


def parameters(model: PreTrainedModel) -> int:
    return sum(weight.numel() for weight in model.parameters())


def size(where: torch.device, rounds: int, quick: bool) -> list[dict[str, object]]:
    pairs = [make_pair(preset_of(hidden, layers), where) for hidden, layers in (SIZES[:3] if quick else SIZES)]
    by_size = {parameters(pair.target): pair for pair in pairs}
    prompts = dict.fromkeys(by_size, random_prompt(PRESETS["120m"].vocabulary, SHORT))
    rows = []
    for k in (0, DRAFTS):
        decoders = {n: SpeculativeDecoder(pair.target, pair.draft if k else None, k) for n, pair in by_size.items()}
        points = steps(decoders, prompts, rounds, NEW_TOKENS)
        fixed = f"K = {k}, context {SHORT}"
        rows.append({"part": "size", "of": "a step", "against": "parameters", "fixed": fixed} | fitted(points))
    return rows


def preset_of(hidden: int, layers: int) -> Preset:
    large = PRESETS["120m"]
    heads = hidden // large.head_dim
    return large._replace(
        hidden=hidden, intermediate=hidden * 8 // 3, heads=heads, kv_heads=max(1, heads // 3), target_layers=layers
    )


def checked(name: str, target: PreTrainedModel, draft: PreTrainedModel, rounds: int) -> dict[str, object]:
    """Steps of a pair, and what the roofline model predicts of them on this CPU from their shapes. The machine's rates
    are measured between the rounds, since it is shared."""
    shapes = [shape_of(model.config, name) for model in (target, draft)]
    assert all(shapes)
    with_bytes = [dataclasses.replace(shape, weight_bytes=4.0, number_bytes=4.0) for shape in shapes if shape]
    decoders = {k: SpeculativeDecoder(target, draft if k else None, k) for k in (0, DRAFTS)}
    prompt = random_prompt(target.config.vocab_size, SHORT)
    for decoder in decoders.values():
        step_seconds(decoder, prompt, NEW_TOKENS)
    taken: dict[int, list[dict[str, float]]] = {k: [] for k in decoders}
    machines: list[Machine] = []
    for k in in_turns([*decoders], rounds):
        taken[k].append(step_seconds(decoders[k], prompt, NEW_TOKENS))
        if k == 0:
            machines.append(measure_cpu(sum(shape.read * shape.weight_bytes for shape in with_bytes)))
    rates = {n: statistics.median(getattr(m, n) for m in machines) for n in ("bandwidth", "rate", "layer")}
    machine = dataclasses.replace(machines[0], **rates)
    median = {k: {n: statistics.median(t[n] for t in of) for n in of[0]} for k, of in taken.items()}
    alpha, tau = median[DRAFTS]["alpha"], median[DRAFTS]["tau"]
    said = Pair(*with_bytes, machine, alpha).predict(1, SHORT, DRAFTS)
    measured = {
        "plain step": median[0]["total"],
        "draft forwards": median[DRAFTS]["draft_forwards"],
        "target forward over K + 1": median[DRAFTS]["target_forwards"],
        "speed-up": tau * median[0]["total"] / median[DRAFTS]["total"],
    }
    predicted = {
        "plain step": said.plain_step,
        "draft forwards": said.draft_seconds,
        "target forward over K + 1": said.target_seconds,
        "speed-up": said.speedup,
    }
    error = {what: predicted[what] / measured[what] - 1 for what in measured}
    about = {"part": "roofline", "pair": name, "alpha": alpha, "tau": tau, "predicted_tau": said.tau}
    return about | {"measured": measured, "predicted": predicted, "error": error, "machine": rates}


def roofline(where: torch.device, rounds: int, quick: bool) -> list[dict[str, object]]:
    target, draft, _ = load_embedded_pair(device=where)
    rows = [checked("embedded", target, draft, rounds)]
    preset = PRESETS["tiny" if quick else "120m"]
    pair = make_pair(preset, where)
    pair.calibrate(ALPHA, 0.0)
    return [*rows, checked("113 million" if not quick else "tiny", pair.target, pair.draft, rounds)]


def main(
    parts: Annotated[str, typer.Option(help="separated by commas")] = ",".join(PARTS),
    seconds: Annotated[float, typer.Option(min=0, help="of a curve of operations, at least 5 rounds")] = 6.0,
    rounds: Annotated[int | None, typer.Option(min=1, help="of decoding; default: 5")] = None,
    threads: report.Threads = None,
    quick: report.Quick = False,
    json_path: report.JsonPath = None,
) -> None:
    """Times curves on a CPU, and fits exponents to them."""
    where, asked = torch.device("cpu"), report.read_names("parts", parts, dict.fromkeys(PARTS))
    results = report.Report("scaling", where, json_path, threads, quick=quick, new_tokens=NEW_TOKENS)
    played = rounds or (1 if quick else 5)
    for part in asked:
        if part == "operations":
            rows = [operations(curve, where, 0.01 if quick else seconds, quick) for curve in CURVES]
        else:
            rows = {"context": context, "size": size, "roofline": roofline}[part](where, played, quick)
        for row in rows:
            results.add(row)
            results.say({str(row.get("against", row.get("pair"))): row.get("fit", row.get("error"))})
    results.finish()


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    typer.run(main)
