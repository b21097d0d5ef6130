"""What steps and prompts of Llama-3.1-8B, with Llama-3.2-1B as its draft, take on a GPU: by the roofline and the kernel
that was measured, or by steps where these were measured. ``predict_cluster.py`` makes clusters of it."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from bench_loop import fastest
from cluster_costs import Costs, Text
from specdec.evaluation.model_shapes import shape_of
from specdec.evaluation.roofline import MOST_DRAFTS, Pair, gpu_machine
from specdec.evaluation.theory import expected_tau
from transformers import LlamaConfig

COMMON = {"vocab_size": 128256, "num_attention_heads": 32, "num_key_value_heads": 8}
TARGET = LlamaConfig(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, **COMMON)
DRAFT = LlamaConfig(
    hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, head_dim=64, tie_word_embeddings=True, **COMMON
)
LONGEST = 4  # times the mean of the texts: where they are cut


class Asked(NamedTuple):
    """What is assumed of a job and of what runs it, as the options say."""

    prompts: int
    prompt_tokens: int
    new_tokens: int
    alpha: float
    price: float
    startup: float
    load: float

    @property
    def longest(self) -> int:
        """Tokens of a prompt and its text, for which every row has room."""
        return self.prompt_tokens + LONGEST * self.new_tokens

    @property
    def context(self) -> int:
        """Of a step, on average."""
        return self.prompt_tokens + self.new_tokens // 2

    def texts(self) -> list[Text]:
        """New tokens are drawn from an exponential distribution, and cut at LONGEST times its mean."""
        draw, most = random.Random(0), LONGEST * self.new_tokens
        lengths = (1 + int(draw.expovariate(1 / self.new_tokens)) for _ in range(self.prompts))
        return [Text(self.prompt_tokens - 1, min(length, most)) for length in lengths]


def pair_on(gpu: str, alpha: float) -> Pair:
    shapes = [shape_of(config, name) for config, name in ((TARGET, "Llama-3.1-8B"), (DRAFT, "Llama-3.2-1B"))]
    return Pair(*shapes, gpu_machine(gpu), alpha)  # type: ignore[arg-type]


def measured_steps(path: Path, pair: Pair, context: int) -> dict[str, dict[int, float]]:
    """Of a file of ``bench_loop.py``: by rows, how many times as long as its roofline a step took, plain and with
    drafts, in the context nearest to this. Empty where there is no file, or none of this pair."""
    found: dict[str, dict[int, float]] = {"plain": {}, "specdec": {}}
    content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    rows = content["rows"] if content.get("pair") == "8b+1b" and not content["quick"] else []
    nearest = min((row["context"] for row in rows), key=lambda n: abs(n - context), default=0)
    for row in (row for row in rows if row["context"] == nearest):
        methods = {method["name"]: method for method in row["methods"]}
        speeds = {name: [method["tokens_per_second"]["median"]] for name, method in methods.items()}
        for kind, k in (("plain", 0), ("specdec", row["K"])):
            if (name := fastest(speeds, kind)) is not None:
                step = pair.predict(row["B"], nearest + row["new_tokens"], k)
                seconds = row["B"] * methods[name]["tau"] / speeds[name][0]
                found[kind][row["B"]] = seconds / (step.draft_seconds + step.target_seconds)
    return found


def steps_measured(gpu: str, asked: Asked, folder: Path) -> tuple[str, dict[str, dict[int, float]]]:
    """What :func:`measured_steps` finds of this GPU, and how it is called; where none were measured on this one, of the
    H100: others of its family are as far from their own rooflines, about."""
    for name, told in ((gpu, "measured"), ("H100 SXM", "as an H100's")):
        path = folder / name.split()[0].lower() / "decode.json"
        if any((found := measured_steps(path, pair_on(name, asked.alpha), asked.context)).values()):
            return told, found
    return "by roofline", found


def verification(path: Path) -> float:
    """Seconds that the kernel took for a row of logits where it verified many, on an H200."""
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    row = next(row for row in rows if row["goal"] == "token" and row["drafts"] == "typical")
    return row["seconds"]["cuda+stats [cold]"]["median"] / (row["B"] * (row["K"] + 1))


@dataclass(frozen=True)
class OnGpu:
    """What decodes on a GPU. ``kernel``: seconds of verifying a row of logits; ``factors``: as ``measured_steps`` finds
    them."""

    pair: Pair
    asked: Asked
    kernel: float
    factors: Mapping[str, Mapping[int, float]]

    @staticmethod
    def kind(k: int) -> str:
        return "specdec" if k else "plain"

    def step(self, live: int, k: int) -> float:
        """By the roofline and the kernel in addition; where steps were measured, the roofline times what they were of
        it at the nearest number of rows."""
        step, factors = self.pair.predict(live, self.asked.context, k), self.factors[self.kind(k)]
        seconds = step.draft_seconds + step.target_seconds
        if factors:
            return seconds * factors[min(factors, key=lambda n: abs(n - live))]
        return seconds + self.kernel * live * (k + 1)

    def costs(self, rows: int, k: int) -> Costs:
        models = (self.pair.target, self.pair.draft) if k else (self.pair.target,)
        tokens = self.asked.prompt_tokens
        reading = sum(model.seconds(self.pair.machine, 1, tokens, tokens // 2) for model in models)
        steps = [self.step(live, k) for live in range(1, rows + 1)]
        return Costs(steps, expected_tau(self.pair.alpha, k), reading / tokens)

    def of_text(self, rows: int, k: int) -> float:
        """Seconds of a mean text and its prompt."""
        step, costs = self.step(rows, k), self.costs(1, k)
        return costs.token * self.asked.prompt_tokens + self.asked.new_tokens / costs.tau * step / rows

    def best(self, rows: int) -> int:
        """The K with the most prompts a second, of those that draft."""
        return min(range(1, MOST_DRAFTS + 1), key=lambda k: self.of_text(rows, k))

    def pays_up_to(self, fits: int) -> int:
        """The most rows with which drafts are faster, prompts included."""
        slower = (n for n in range(1, fits + 1) if self.of_text(n, self.best(n)) >= self.of_text(n, 0))
        return next(slower, fits + 1) - 1
