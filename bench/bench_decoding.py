"""End-to-end decoding of pairs with the cost of real models and a chosen acceptance, against transformers.

    python bench/bench_decoding.py --preset tiny
    python bench/bench_decoding.py --device cuda --preset 1b,8b --json bench/results/decoding.json

Eager on every side: no CUDA graph, no torch.compile. bench/README.md says how each number is made.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Annotated

import torch
import typer
from measure import Method, first_line, interleave, ratios, summary, warm_up
from options import Device, JsonPath, Threads, read_device, read_integers, read_names, reading
from report import Report, terminal
from rich.console import Console
from rich.table import Table
from specdec import SpeculativeDecoder
from specdec.evaluation.contenders import assistant_config, counted_forwards
from transformers import PreTrainedModel
from tunable_pair import PRESETS, TunablePair, make_pair

from specdec_kernels import SamplingParams

Said = dict[str, float | None]  # what a call says about itself: counts, ratios, seconds of its parts


@dataclass(frozen=True)
class Workload:
    batch: int
    prompt_tokens: int
    new_tokens: int
    temperature: float

    def prompts(self, i: int, model: PreTrainedModel) -> torch.Tensor:
        """Random tokens, others for each call, the same for every method."""
        generator = torch.Generator().manual_seed(i)
        shape = (self.batch, self.prompt_tokens)
        return torch.randint(model.config.vocab_size, shape, generator=generator).to(model.device)


@dataclass
class Decoding:
    """One way to decode. ``generate(i)`` decodes the workload's prompts number i."""

    name: str
    generate: Callable[[int], Said]
    said: list[Said] = field(default_factory=list)

    def run(self, i: int) -> None:
        self.said.append(self.generate(i))

    def means(self) -> Said:
        keys = self.said[0]
        return {k: None if keys[k] is None else sum(s[k] for s in self.said) / len(self.said) for k in keys}


def transformers_decoding(
    name: str, pair: TunablePair, load: Workload, assistant: PreTrainedModel | None = None
) -> Decoding:
    """``generate`` of transformers, with its default (dynamic) cache; tau counts the target's forwards."""
    sampling: dict[str, object] = {"do_sample": False}
    if load.temperature > 0:
        sampling = {"do_sample": True, "temperature": load.temperature, "top_k": 0}

    def generate(i: int) -> Said:
        torch.manual_seed(i)
        ids = load.prompts(i, pair.target)
        with counted_forwards(pair.target) as forwards:
            out = pair.target.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=load.new_tokens,
                pad_token_id=0,
                assistant_model=assistant,
                **sampling,
            )
        made = out.shape[1] - ids.shape[1]
        if made != load.new_tokens:  # tokens a second would compare different texts
            raise RuntimeError(f"{name} made {made} tokens, not {load.new_tokens}")
        return {"tau": made / forwards[0], "alpha": None, "acceptance_rate": None, "loop_fraction": None}

    return Decoding(name, generate)


def assistant_with(draft: PreTrainedModel, num_drafts: int | None) -> PreTrainedModel:
    """The draft as transformers' assistant: K drafts and no early stop, or (None) its own defaults."""
    assistant = copy.copy(draft)  # its weights are shared; only the generation settings are its own
    assistant.generation_config = assistant_config(num_drafts)
    return assistant


def specdec_decoding(pair: TunablePair, load: Workload, num_drafts: int) -> Decoding:
    decoder = SpeculativeDecoder(pair.target, pair.draft, num_drafts=num_drafts)
    params = SamplingParams(temperature=load.temperature)

    def generate(i: int) -> Said:
        result = decoder.generate(
            load.prompts(i, pair.target),
            max_new_tokens=load.new_tokens,
            params=params,
            seed=[i * load.batch + b for b in range(load.batch)],
            eos_token_id=[],
        )
        stats, seconds = result.stats, result.stats.seconds
        return {
            "tau": stats.tau,
            "alpha": stats.alpha,
            "acceptance_rate": stats.acceptance_rate,
            "loop_fraction": seconds["loop"] / seconds["total"],
            **{f"{part}_seconds": value for part, value in seconds.items()},
        }

    return Decoding(f"specdec K={num_drafts}", generate)


def decodings_of(pair: TunablePair, load: Workload, num_drafts: list[int]) -> list[Decoding]:
    found = [transformers_decoding("plain", pair, load)]
    if load.batch == 1:  # transformers' assisted generation takes one sequence
        for k in num_drafts:
            found.append(transformers_decoding(f"assisted K={k}", pair, load, assistant_with(pair.draft, k)))
        default = assistant_with(pair.draft, None)
        found.append(transformers_decoding("assisted default", pair, load, default))
    return found + [specdec_decoding(pair, load, k) for k in num_drafts]


def measure(pair: TunablePair, load: Workload, num_drafts: list[int], seconds: float, rounds: int) -> dict[str, object]:
    device = pair.target.device
    decodings = decodings_of(pair, load, num_drafts)
    most = max(rounds, 20)
    methods = [Method(d.name, d.run, calls=most) for d in decodings]
    methods, unavailable = warm_up(methods, device, 1)
    for d in decodings:
        d.said.clear()
    samples = interleave(methods, device, seconds, least=rounds, most=most)
    # Tokens a second of one over the other's: as many tokens, so the other's seconds over its own.
    compared = {
        f"{name}/{other}": ratios(samples[other], samples[name])
        for name in samples
        for other in samples
        if name != other and (other == "plain" or (name.startswith("specdec") and "assisted" in other))
    }
    return {
        "methods": [
            {
                "name": d.name,
                "tokens_per_second": summary([load.batch * load.new_tokens / s for s in samples[d.name]]),
                "seconds": summary(samples[d.name]),
                **d.means(),
            }
            for d in decodings
            if d.name in samples
        ],
        "ratios": compared,
        "unavailable": unavailable,
    }


def show(console: Console, row: dict) -> None:
    title = f"{row['preset']}, B={row['B']}, temperature {row['temperature']:g}, {row['new_tokens']} new tokens"
    table = Table("method", "tokens/s", "quartiles", "tau", "alpha", "loop", "times plain", title=title)
    for m in row["methods"]:
        t, over = m["tokens_per_second"], row["ratios"].get(f"{m['name']}/plain")
        said = ["-" if m[key] is None else f"{m[key]:.2f}" for key in ("tau", "alpha", "loop_fraction")]
        times_plain = f"{over['median']:.2f}" if over else "-"
        table.add_row(m["name"], f"{t['median']:.1f}", f"{t['q1']:.1f} to {t['q3']:.1f}", *said, times_plain)
    console.print(table)
    for name, reason in row["unavailable"].items():
        console.print(f"{name}: not measured: {reason}")


def main(
    device: Device = "cpu",
    preset: Annotated[str, typer.Option(help=f"some of {', '.join(PRESETS)}, separated by commas")] = "tiny",
    alpha: Annotated[float, typer.Option(help="the acceptance that pairs are tuned to, between 0 and 1")] = 0.8,
    eps: Annotated[float | None, typer.Option(help="sets pairs directly; leaves --alpha out")] = None,
    temperature: float = 1.0,
    batches: Annotated[str, typer.Option("--batches", "-B")] = "1,8",
    num_drafts: Annotated[str | None, typer.Option("--num-drafts", "-K", help="default: 2,4,8")] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1)] = 64,
    new_tokens: Annotated[int | None, typer.Option(min=1, help="default: 128")] = None,
    seconds: Annotated[
        float | None, typer.Option(min=0, help="a batch size, at least --rounds rounds; default: 20")
    ] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="default: 5")] = None,
    threads: Threads = None,
    quick: Annotated[bool, typer.Option(help="a smoke run: other defaults, K=4, few tokens and rounds")] = False,
    json_path: JsonPath = None,
) -> None:
    """Times decoding loops on pairs of real size."""
    with reading():
        where = read_device(device)
        names = read_names("preset", preset, PRESETS)
        sizes = read_integers("batches", batches)
        ks = read_integers("num-drafts", num_drafts or ("4" if quick else "2,4,8"))
        if not 0 < alpha < 1:
            raise ValueError(f"alpha: got {alpha}, allowed: between 0 and 1, both excluded")
        if eps is not None and not 0 < eps < float("inf"):
            raise ValueError(f"eps: got {eps}, allowed: a number > 0")
        SamplingParams(temperature=temperature)
    new_tokens = new_tokens or (24 if quick else 128)
    rounds = rounds or (2 if quick else 5)
    seconds = (0.0 if quick else 20.0) if seconds is None else seconds
    if threads is not None:
        torch.set_num_threads(threads)
    console = terminal()
    report = Report("decoding", where, json_path, quick=quick, graphs="none: every method is eager")
    for name in names:
        shape = {k: str(v) if isinstance(v, torch.dtype) else v for k, v in PRESETS[name]._asdict().items()}
        try:
            pair = make_pair(PRESETS[name], where)
            if eps is not None:
                pair.set_eps(eps)
            else:
                pair.calibrate(alpha, temperature)
            expected = pair.expected_alpha(temperature)
        except torch.OutOfMemoryError as error:
            report.add({"preset": name, "shape": shape, "unavailable": {name: first_line(error)}})
            console.print(f"{name}: not measured: {first_line(error)}")
            continue
        for batch in sizes:
            load = Workload(batch, prompt_tokens, new_tokens, temperature)
            row = {
                "preset": name,
                "shape": shape,
                "eps": pair.eps,
                "expected_alpha": expected,
                "cost_ratio": pair.cost_ratio,
                "B": batch,
                "prompt_tokens": prompt_tokens,
                "new_tokens": new_tokens,
                "temperature": temperature,
                **measure(pair, load, ks, seconds, rounds),
            }
            report.add(row)
            show(console, row)
        del pair
        if where.type == "cuda":
            torch.cuda.empty_cache()
    report.finish()


if __name__ == "__main__":
    typer.run(main)
