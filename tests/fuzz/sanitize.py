"""Steps of every rule, form of q and distribution over rows with tails, for compute-sanitizer to watch.

    compute-sanitizer --tool memcheck --error-exitcode 86 python -m tests.fuzz.sanitize --device cuda

Inputs are made on the CPU and copied, so that little but our kernels runs on the GPU. With
PYTORCH_NO_CUDA_MEMORY_CACHING=1 every tensor is an allocation of its own, with nothing after it. Results are not
compared here: compare.py does that.
"""

from __future__ import annotations

import functools
import itertools
import random
import time
from collections.abc import Callable
from typing import Annotated

import torch
import typer

from specdec_kernels import draft_step, speculative_step
from specdec_kernels.testing import StepInputs, random_step

from .options import read_backends, read_device

# (B, K, V): one token, less than a warp, about blocks of 1024, several blocks with a rest, more blocks than warps.
SHAPES = ((2, 2, 1), (3, 3, 33), (2, 2, 1023), (1, 4, 1025), (2, 2, 2050), (1, 1, 5000), (40, 1, 1300), (1, 2, 20_001))
# More rows than a block's memory has room for, so that an operation is split into two launches.
MANY_ROWS = (1, 6000, 33)
FORMS = {"full": {}, "stats": {"stats": True}, "reduced": {"reduced": 0.7}, "one_hot": {}}
FILTERS = {"top_k": (0, 20, 1), "top_p": (0.9, 1.0, 0.3), "min_p": (0.0, 0.02)}
PENALTIES = {"table": 5, "repetition_penalty": (1.3, 0.8), "presence_penalty": (0.5,), "frequency_penalty": (0.2,)}
MASKS = {"allowed": 0.5, "masked_drafts": 1}
DISTRIBUTIONS = {"plain": {}, "filters": FILTERS, "penalties": PENALTIES, "all": {**FILTERS, **PENALTIES, **MASKS}}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def made(number: int, shape: tuple[int, int, int], rule: str, form: str, distribution: str) -> StepInputs:
    """A step on the CPU."""
    batch, num_drafts, vocabulary = shape
    options = dict(FORMS[form])
    if "reduced" in options:
        options["reduced"] = max(1, int(options["reduced"] * vocabulary))
    inputs = random_step(
        batch, num_drafts, vocabulary, rule=rule, kind="one_hot" if form == "one_hot" else "similar", drafter="cpu",
        dtype=DTYPES[number % 3], draft_dtype=DTYPES[number // 3 % 3], temperature=(0.8, 0.0, 1.3),
        log_probs=number % 4 == 0, random_state=number, **options, **DISTRIBUTIONS[distribution],
    )  # fmt: skip
    if number % 2:
        inputs = inputs.replace(num_drafts=torch.arange(batch) % (num_drafts + 1))
    return inputs


def many_rows(rule: str) -> StepInputs:
    inputs = random_step(*MANY_ROWS, rule=rule, kind="one_hot", drafter="cpu")
    return inputs if rule == "coupled" else inputs.replace(draft_logits=inputs.target_logits[:, :-1].clone())


def run(inputs: StepInputs, backend: str, device: torch.device) -> None:
    """Draws and verifies; waits, so that a fault is this step's."""
    inputs = inputs.to(device)
    common = {"params": inputs.params, "seed": inputs.seed, "position": inputs.position, "table": inputs.table}
    common |= {"rule": inputs.rule, "backend": backend}
    logits = inputs.target_logits[:, 0] if inputs.draft_logits is None else inputs.draft_logits[:, 0]
    draft_step(logits, offset=0, d2t=inputs.d2t, allowed=inputs.allowed_to_draft(0), **common).tokens.cpu()
    out = speculative_step(
        inputs.target_logits, inputs.draft_tokens, inputs.draft_logits, num_drafts=inputs.num_drafts, d2t=inputs.d2t,
        draft_stats=inputs.draft_stats, allowed=inputs.allowed, masked_drafts=inputs.masked_drafts,
        log_probs=inputs.log_probs, **common,
    )  # fmt: skip
    for tensor in out:  # what was never written is read here
        if tensor is not None:
            tensor.cpu()


def cases() -> list[Callable[[], StepInputs]]:
    """What makes each step, in an order in which every part of them has every rule and form."""
    every = list(itertools.product(SHAPES, ("token", "block", "coupled"), FORMS, DISTRIBUTIONS))
    random.Random(0).shuffle(every)
    makers = [functools.partial(made, number, *case) for number, case in enumerate(every)]
    makers[20:20] = [functools.partial(many_rows, rule) for rule in ("token", "block", "coupled")]
    return makers


def main(
    device: Annotated[str, typer.Option(help="cpu or cuda")] = "cpu",
    backend: Annotated[str | None, typer.Option(help="default: that of the device")] = None,
    seconds: Annotated[float, typer.Option(min=0, help="at most so long; 0: all steps")] = 0.0,
) -> None:
    """Runs steps with tails."""
    where = read_device(device)
    (name,) = read_backends(backend or where.type)
    start, done, todo = time.monotonic(), 0, cases()
    for make in todo:
        if seconds and time.monotonic() - start > seconds:
            break
        run(make(), name, where)
        done += 1
    print(f"{name}: {done} of {len(todo)} steps in {time.monotonic() - start:.1f} s")


if __name__ == "__main__":
    typer.run(main)
