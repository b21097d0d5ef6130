"""The peers of ``speculative_step`` as methods to time, on one set of inputs, and why a peer cannot run."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from library_peers import flashinfer_step, vllm_step
from measure import Method, first_line
from peers import Compiler, eager, eager_with_q, transformers_step
from step_inputs import StepInputs

LEFT_OUT = "SPECDEC_BENCH_WITHOUT"  # beginnings of names, separated by commas
WITH_FILTERS = ("transformers", "flashinfer", "flashinfer+q")
ON_GPU = ("flashinfer", "vllm")


def peer_methods(
    inputs: StepInputs, compiler: Compiler, wanted: Sequence[str] | None = None
) -> tuple[list[Method], dict[str, str]]:
    """The wanted peers (None: all) that can run on these inputs, and why the others cannot."""
    t, filters = inputs.temperature, inputs.filters
    logits, int32 = ("target", "tokens", "draft"), "tokens_int32"
    makers: dict[str, tuple[Callable[[], Callable], tuple[str, ...]]] = {  # how to make the step, and what it gets
        "eager": (lambda: eager(t), logits),
        "eager+q": (lambda: eager_with_q(t), ("target", "tokens", "draft_probs")),
        "compile": (lambda: compiler.compiled(eager(t), *inputs.arguments(*logits)(0)), logits),
        "transformers": (lambda: transformers_step(t, filters), ("target", "tokens", "draft_float32")),
        "flashinfer": (lambda: flashinfer_step(t, filters), ("target", int32, "draft", "noise")),
        "flashinfer+q": (lambda: flashinfer_step(t, filters, "q"), ("target", int32, "draft_probs", "noise")),
        "flashinfer+p+q": (lambda: flashinfer_step(t, given="pq"), ("target_probs", int32, "draft_probs", "noise")),
        "vllm+q": (lambda: vllm_step(t), ("target", "tokens", "draft_probs")),
    }
    left_out = tuple(name for name in os.environ.get(LEFT_OUT, "").split(",") if name)
    methods, unavailable = [], {}
    for name, (make, tensors) in makers.items():
        if wanted is not None and name not in wanted:
            continue
        try:
            if left_out and name.startswith(left_out):
                raise RuntimeError(f"left out by {LEFT_OUT}={os.environ[LEFT_OUT]}")
            if name.startswith(ON_GPU) and not inputs.target.is_cuda:
                raise RuntimeError("it runs on NVIDIA GPUs")
            if filters and name not in WITH_FILTERS:
                raise RuntimeError(f"it has no filters here ({', '.join(filters)})")
            step = make()  # before its tensors, which may be large
            arguments = inputs.arguments(*tensors)
            arguments(0)
        except Exception as error:  # why a peer cannot run is a result
            unavailable[name] = first_line(error)
            continue
        methods.append(
            Method(
                name,
                lambda i, s=step, a=arguments: s(*a(i)),
                inputs.calls,
                capturable=name != "transformers",  # which reads what it drew
                warm=lambda i, s=step, a=arguments: s(*a(0)),
            )
        )
    return methods, unavailable
