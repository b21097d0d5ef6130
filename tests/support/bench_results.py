"""Results as ``specdec bench`` writes them, made up: methods whose speeds follow from an alpha and a c."""

from __future__ import annotations

import copy
from typing import Any

SPEED = 100.0  # tokens/s of plain decoding
SPREAD = 0.05  # of the quartiles around a median
METHODS = {  # alpha at temperature 0, and c
    "model": (0.8, 0.1),
    "lookup": (0.5, 0.01),
}

TWO_KINDS = [{"id": "a", "category": "code", "tokens": 12}, {"id": "b", "category": "story", "tokens": 12}]


def summary(median: float) -> dict[str, Any]:
    low, high = median * (1 - SPREAD), median * (1 + SPREAD)
    return {"median": median, "quartiles": [low, high], "interval": [low, high], "min": low, "max": high}


def cell(method: str, k: int | str | None, temperature: float = 0.0, batch: int = 1, rule: str | None = None) -> dict:
    """One cell; ``rule`` is "token" for what has drafts."""
    speed, tau, alpha, predicted, positions = SPEED, 1.0, None, None, None
    if method == "transformers":
        speed = 0.8 * SPEED
    elif method != "plain":
        first, c = METHODS[method]
        alpha, longest = first - 0.1 * temperature, 5 if k == "auto" else int(k or 0)
        positions = [alpha**i for i in range(1, longest + 1)]
        tau = 1 + sum(positions)
        step = 1 + c * longest
        speed = 0.95 * SPEED * tau / step
        predicted = {"c": c, "tau": tau, "speedup": tau / step}
    drafts = method not in ("transformers", "plain")
    rule = rule or ("token" if drafts else None)
    words = [method, *([rule, f"k={k}"] if drafts else []), f"t={temperature:g}", f"b={batch}"]
    return {
        "id": " ".join(str(w) for w in words),
        "method": method,
        "rule": rule,
        "num_drafts": k,
        "tree": None,
        "temperature": temperature,
        "batch": batch,
        "top_k": None,
        "top_p": None,
        "min_p": None,
        "rounds": [{"seconds": 64 / speed, "tokens": 64, "tokens_per_second": speed}] * 3,
        "tokens_per_second": summary(speed),
        "time_to_first_token": {"median": 0.02, "p99": 0.03},
        "time_per_output_token": {"median": 1 / speed, "p99": 2 / speed},
        "inter_token": {"median": 1 / speed, "p99": 3 / speed},
        "acceptance_rate": sum(positions) / len(positions) if positions else None,
        "alpha": alpha,
        "tau": tau,
        "peak_memory": 50 * 2**20,
        "speedup": {"over_plain": summary(speed / SPEED), "over_transformers": summary(speed / (0.8 * SPEED))},
        "predicted": predicted,
    }


def played(cell: dict, *rounds: tuple[float, float]) -> dict:
    """The cell with rounds that have the seconds of ten tokens after each prompt of TWO_KINDS."""
    times = [{"by_prompt": [[["a"], a, 10], [["b"], b, 10]]} for a, b in rounds]
    return cell | {"rounds": [{**cell["rounds"][0], **each} for each in times]}


def grid(temperatures=(0.0, 1.0), lengths: tuple[int | str, ...] = (1, 2, 4, "auto"), batches=(1,)) -> list[dict]:
    """Both baselines and both methods with every K, at every temperature and batch size."""
    cells = []
    for temperature in temperatures:
        for batch in batches:
            cells += [cell(baseline, None, temperature, batch) for baseline in ("transformers", "plain")]
            cells += [cell(method, k, temperature, batch) for method in METHODS for k in lengths]
    return cells


def results(cells: list[dict] | None = None, **changed: Any) -> dict[str, Any]:
    """A whole file; ``changed`` replaces its parts, and a part that is None is left out."""
    cells = grid() if cells is None else cells
    timed = [c for c in cells if c["tokens_per_second"]]
    verdicts = []
    for t in sorted({c["temperature"] for c in timed}):
        fastest = max((c for c in timed if c["temperature"] == t), key=lambda c: c["tokens_per_second"]["median"])
        about = {name: fastest[name] for name in ("temperature", "batch", "top_k", "top_p", "min_p")}
        words = f"At temperature {t:g}, {fastest['id']} is the fastest."
        verdicts.append({**about, "winner": fastest["id"], "within_noise": [], "words": words})
    whole = {
        "format": "specdec bench 1",
        "environment": {
            "cpu": "Example CPU",
            "threads": 2,
            "dtype": "float32",
            "torch": "2.13.0+cpu",
            "transformers": "5.23.0",
            "command": "specdec bench --repeats 3",
        },
        "models": {"target": {"name": "tiny", "parameters": 4_000_000, "layers": 4}, "draft": {"name": "tinier"}},
        "settings": {"max_new_tokens": 64, "repeats": 3},
        "prompts": [{"id": "q1", "category": "question", "tokens": 12}],
        "cells": cells,
        "verdicts": verdicts,
        "greedy": {"equal": True, "differences": []},
    }
    return copy.deepcopy({name: part for name, part in (whole | changed).items() if part is not None})
