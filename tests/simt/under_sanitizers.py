"""Runs steps and products of the CUDA kernels on fibers for test_simt.py, built with sanitizers, which abort on a
fault. Each tensor is an allocation of its own, so that what is beyond it is seen."""

from __future__ import annotations

import itertools

import torch
from simt import kernels

from specdec_kernels.ops import RULES
from specdec_kernels.testing import random_step

FILTERS = {"top_k": (0, 4, 30), "top_p": (0.8, 1.0, 0.9), "min_p": (0.0, 0.1, 0.02)}
TABLE = {"table": 9, "repetition_penalty": 1.3, "presence_penalty": 0.25, "frequency_penalty": 0.5}
MASKS = {"allowed": 0.5, "masked_drafts": 2}
SAMPLING = ({}, FILTERS | MASKS, TABLE, FILTERS | TABLE | MASKS)
Q = ({}, {"stats": True}, {"reduced": 20}, {"kind": "one_hot"})


def main() -> None:
    steps = 0
    for rule, q, sampling, vocabulary in itertools.product(RULES, Q, SAMPLING, (33, 1100)):
        if rule == "coupled" and q and "stats" not in q:
            continue
        more = {"temperature": (0.0, 0.7, 1.3), "rule": rule, "log_probs": True, "drafter": "cpu"}
        inputs = random_step(3, 2, vocabulary, **more, **sampling, **q)
        threads = kernels.THREADS[steps % len(kernels.THREADS)]
        got = kernels.speculative_step(*inputs.operands(), threads=threads)
        # The reference would take most of the time here. test_parity.py compares with it what runs without sanitizers.
        assert torch.equal(got[0], inputs.run("cpu").tokens)
        if rule != "block":
            kernels.draft_step(
                inputs.target_logits[:, 1], inputs.sampling(), inputs.draft_tokens[:, :1].contiguous(), None,
                None if inputs.allowed is None else inputs.allowed[:, 1], inputs.seed, inputs.position, 1,
                RULES.index(rule), threads=threads,
            )  # fmt: skip
        steps += 1
    products = 0
    for dtype, rows, inputs, outputs in itertools.product(
        (torch.bfloat16, torch.float16), (1, 8, 11, 16, 17), (32, 288, 1312), (1, 16, 37)
    ):
        x, weight, bias = (torch.randn(shape).to(dtype) for shape in ((rows, inputs), (outputs, inputs), (outputs,)))
        expected = torch.nn.functional.linear(x, weight, bias)
        torch.testing.assert_close(kernels.linear(x, weight, bias), expected, rtol=2e-2, atol=2e-2)
        kernels.linear(x, weight, bias, norm=x[0], epsilon=1e-6)
        kernels.linear(x, weight.repeat(2, 1), bias.repeat(2), norm=x[0], epsilon=1e-6, activation="silu")
        kernels.linear(x, weight, bias, base=expected)
        products += 4
    print(f"{steps} steps, {products} products")


if __name__ == "__main__":
    main()
