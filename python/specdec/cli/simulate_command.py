"""``specdec simulate``: what an acceptance and a cost should gain, without a model."""

from __future__ import annotations

import json
from dataclasses import dataclass

import typer

from . import options
from .drafting import K
from .option_groups import command, option
from .terminal import print_table, remark

NUMBERS = "1,2,3,4,5,6,7,8"


@dataclass(frozen=True)
class SimulationOptions:
    """What is simulated"""

    alpha: float = option(..., "Probability that a draft that is tested is accepted, from 0 to 1.")
    c: float = option(0.0, "Time of a draft forward, over that of a target forward.", "--c")
    num_drafts: str = option(NUMBERS, "K, or several with commas; of a tree, its longest path.", *K)
    c_hat: float | None = option(None, "The same ratio of operations for a token. Default: --c.", "--c-hat")
    tree: int | None = option(None, "A tree of up to N drafts in each step, instead of a chain.", metavar="N")
    steps: int = option(100_000, "Of the random run.")
    seed: int = option(0, "Of the random run.")
    as_json: bool = options.as_json()


@command
def simulate(asked: SimulationOptions) -> None:
    """Predicts tokens a step (tau), speed-up and operations by the formulas of Leviathan et al. (arXiv 2211.17192), and
    simulates the same with random numbers, beside them with its standard error.

    It assumes what they assume: every tested draft is accepted with the same probability, independently, and a target
    forward over K + 1 tokens takes as long as over one. In a tree, siblings are tested one after the other, each with
    that probability. docs/theory.md says where that is wrong; specdec bench measures.
    """
    from ..evaluation import theory
    from ..evaluation.simulate import simulate

    numbers = options.read_counts("--num-drafts", asked.num_drafts, 0)
    alpha, c, tree, steps, seed = asked.alpha, asked.c, asked.tree, asked.steps, asked.seed
    ratio = c if asked.c_hat is None else asked.c_hat
    found = [simulate(alpha, c, k, ratio, steps, seed, tree) for k in numbers]
    most = max(numbers)
    best = theory.best_k(alpha, c, most)
    sure = theory.sure_speedup(alpha, c)
    if asked.as_json:
        settings = {"alpha": alpha, "c": c, "c_hat": ratio, "tree": tree, "steps": steps, "seed": seed}
        rows = [s.to_dict() for s in found]
        chain = {"best_k": best, "up_to": most, "sure_speedup": sure}
        typer.echo(json.dumps({"settings": settings, "rows": rows, "chain": chain}))
        return
    fastest = max(found, key=lambda s: s.speedup)
    head = ["K", "nodes", "tau", "simulated", "speed-up", "simulated", "operations", "simulated"]
    lines = []
    for s in found:
        pairs = ((s.tau, s.simulated_tau), (s.speedup, s.simulated_speedup), (s.operations, s.simulated_operations))
        cells = (text for exact, drawn in pairs for text in (f"{exact:.3f}", f"{drawn.mean:.3f} +- {drawn.error:.3f}"))
        lines.append([str(s.num_drafts), str(s.nodes), *cells])
    remark(f"alpha {alpha:g}, c {c:g}, c_hat {ratio:g}; simulated: {steps} steps with seed {seed}", err=False)
    print_table(head, lines)
    remark(f"The fastest of these: K = {fastest.num_drafts}, {fastest.speedup:.2f} times plain decoding.", err=False)
    if tree is None and best == 0:
        remark("No K pays, as alpha is not above c (corollary 3.9).", err=False)
    elif tree is None:
        gain = f"some K gains at least {sure:.2f} times (corollary 3.9)."
        remark(f"The best K up to {most} is {best}; {gain}", err=False)
