"""Other ways to verify K drafts, as people write them today. Same distribution as ours; each says what it leaves out.

"+q" in a name: the draft's probabilities were kept from drafting ([B, K, V] float32) and are not computed here. "+p+q":
neither are the target's. FlashInfer, which need not be installed, compiles its kernels at their first call;
``python bench/peers.py`` does that and nothing else.
"""

from __future__ import annotations

import importlib
import inspect
import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from measure import Method, first_line
from specdec.checks import refuse

if TYPE_CHECKING:
    from cases import StepInputs

WITHOUT_FLASHINFER = "SPECDEC_BENCH_WITHOUT_FLASHINFER"  # set it where its kernels cannot be compiled
WITH_FILTERS = ("transformers", "flashinfer", "flashinfer+q")


def probabilities(logits: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    """softmax(logits / T) in float32."""
    if temperature == 1.0:
        return torch.softmax(logits, -1, dtype=torch.float32)
    return torch.softmax(logits.float() / temperature, -1)


def eager_step(p: torch.Tensor, tokens: torch.Tensor, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Leviathan et al. 2023, Algorithm 1, batched and without a host synchronisation.

    Args: probabilities p [B, K+1, V], drafts [B, K], K >= 1, and probabilities q [B, K, V].
    Returns tokens [B, K+1] (accepted drafts, one recovered or bonus token, then -1) and num_accepted [B].
    """
    num_drafts = tokens.shape[1]
    p_x, q_x = (d.gather(2, tokens[..., None])[..., 0] for d in (p[:, :-1], q))
    accepted = torch.rand_like(p_x) * q_x < p_x
    n = accepted.long().cumprod(1).sum(1)
    batch = torch.arange(len(n), device=n.device)
    p_n, q_n = p[batch, n], q[batch, n.clamp(max=num_drafts - 1)]
    residual = torch.where((n < num_drafts)[:, None], (p_n - q_n).clamp(min=0), p_n)
    # p == q up to rounding leaves no mass: then p itself, never an arbitrary token.
    residual = torch.where(residual.sum(1, keepdim=True) > 0, residual, p_n)
    # A race needs no normaliser, and no synchronisation as torch.multinomial does.
    drawn = (residual / torch.empty_like(residual).exponential_()).argmax(1)
    column = torch.arange(num_drafts + 1, device=n.device)
    emitted = torch.nn.functional.pad(tokens, (0, 1), value=-1).masked_fill(column > n[:, None], -1)
    return torch.where(column == n[:, None], drawn[:, None], emitted), n


def eager(temperature: float, has_q: bool = False) -> Callable:
    """step(target [B, K+1, V], tokens [B, K], draft [B, K, V]) from raw logits; ``has_q``: draft are probabilities."""

    def step(target, tokens, draft):
        q = draft if has_q else probabilities(draft, temperature)
        return eager_step(probabilities(target, temperature), tokens, q)

    return step


class Compiler:
    """``torch.compile(dynamic=False)`` compiles each shape anew; past ``seconds`` in all, no more shapes."""

    def __init__(self, seconds: float):
        self.allowed, self.spent = seconds, 0.0

    def compiled(self, function: Callable, *arguments: object) -> Callable:
        """``function``, compiled for these arguments.

        Raises:
            RuntimeError: the time for compiling is used up.
        """
        if self.spent >= self.allowed:
            raise RuntimeError(f"the {self.allowed:g} s for compiling (--compile-seconds) are used up")
        torch.compiler.reset()  # past its limit on recompilations it would run eagerly and not say so
        start = time.perf_counter()
        try:
            compiled = torch.compile(function, dynamic=False, fullgraph=True)
            compiled(*arguments)
        finally:
            self.spent += time.perf_counter() - start
        return compiled


def transformers_step(temperature: float, filters: dict[str, float] | None = None) -> Callable:
    """transformers' ``_speculative_sampling``: step(target, tokens, draft in float32).

    As in its assisted generation, the target's logits are cast to float32 here (no copy where they are), and both
    softmaxes are inside. It takes one sequence, so a batch is a loop. The generation's second copy is left out, and its
    logits processors but for ``filters`` (top_k, top_p, min_p), which work on every row of the target. The draft's rows
    get them while drafting, which is not timed: pass ``draft`` as ``filtered`` makes it.
    """
    from transformers.generation.utils import _speculative_sampling

    # 5.17 also asks whether the candidates ended the text; 5.23 does not.
    asks = "is_done_candidate" in inspect.signature(_speculative_sampling).parameters
    more = {"is_done_candidate": False} if asks else {}

    def step(target, tokens, draft):
        emitted = []
        for b in range(len(tokens)):
            p_logits, q_logits = target[b : b + 1].float(), draft[b : b + 1]
            if temperature != 1.0:
                p_logits, q_logits = p_logits / temperature, q_logits / temperature
            if filters:
                p_logits = filtered(p_logits, filters)
            emitted.append(_speculative_sampling(tokens[b : b + 1], q_logits, tokens.shape[1], p_logits, **more)[0])
        return emitted

    return step


def filtered(logits: torch.Tensor, filters: dict[str, float]) -> torch.Tensor:
    """A copy of [B, N, V] logits after transformers' processors, row by row as assisted generation does it."""
    from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    makers = {"top_k": lambda k: TopKLogitsWarper(int(k)), "top_p": TopPLogitsWarper, "min_p": MinPLogitsWarper}
    processors = [make(filters[name]) for name, make in makers.items() if name in filters]
    logits = logits.clone()
    for j in range(logits.shape[1]):
        for processor in processors:
            logits[:, j] = processor(None, logits[:, j])
    return logits


def flashinfer_step(temperature: float, filters: dict[str, float] | None = None, given: str = "") -> Callable:
    """step(target, tokens int32, draft, noise [1] int64): softmax, filters, ``chain_speculative_sampling``. The noise's
    offset is in a tensor, so that it asks the host for nothing and a CUDA graph can hold it.

    Args:
        given: "q": ``draft`` are probabilities, kept from drafting; "pq": ``target`` are probabilities, too.

    Raises:
        ImportError: FlashInfer is not installed.
        ValueError: FlashInfer has no such filter on probabilities.
    """
    module = importlib.import_module("flashinfer.sampling")
    if unknown := set(filters or {}) - {"top_k", "top_p"}:
        refuse("filters", ", ".join(sorted(unknown)), "top_k, top_p")
    sample = module.chain_speculative_sampling
    seeded = {"seed", "offset"} <= inspect.signature(sample).parameters.keys()

    def distribution(logits: torch.Tensor) -> torch.Tensor:
        rows = module.softmax(logits.reshape(-1, logits.shape[-1]), temperature=temperature)
        if filters and "top_k" in filters:
            rows = module.top_k_renorm_probs(rows, int(filters["top_k"]))
        if filters and "top_p" in filters:
            rows = module.top_p_renorm_probs(rows, float(filters["top_p"]))
        return rows.view(logits.shape)

    def step(target, tokens, draft, noise):
        q = draft if "q" in given else distribution(draft)
        p = target if "p" in given else distribution(target)
        return sample(q, tokens, p, **({"seed": noise, "offset": noise} if seeded else {}))

    return step


def peer_methods(
    inputs: StepInputs, compiler: Compiler, wanted: Sequence[str] | None = None
) -> tuple[list[Method], dict[str, str]]:
    """The wanted peers (None: all) that can run on these inputs, and why the others cannot."""
    t, filters = inputs.temperature, inputs.filters
    logits, int32 = ("target", "tokens", "draft"), "tokens_int32"
    makers: dict[str, tuple[Callable[[], Callable], tuple[str, ...]]] = {  # how to make the step, and what it gets
        "eager": (lambda: eager(t), logits),
        "eager+q": (lambda: eager(t, has_q=True), ("target", "tokens", "draft_probs")),
        "compile": (lambda: compiler.compiled(eager(t), *inputs.arguments(*logits)(0)), logits),
        "transformers": (lambda: transformers_step(t, filters), ("target", "tokens", "draft_float32")),
        "flashinfer": (lambda: flashinfer_step(t, filters), ("target", int32, "draft", "noise")),
        "flashinfer+q": (lambda: flashinfer_step(t, filters, "q"), ("target", int32, "draft_probs", "noise")),
        "flashinfer+p+q": (lambda: flashinfer_step(t, given="pq"), ("target_probs", int32, "draft_probs", "noise")),
    }
    methods, unavailable = [], {}
    for name, (make, tensors) in makers.items():
        if wanted is not None and name not in wanted:
            continue
        try:
            if name.startswith("flashinfer") and WITHOUT_FLASHINFER in os.environ:
                raise RuntimeError(f"left out by {WITHOUT_FLASHINFER}")
            if name.startswith("flashinfer") and not inputs.target.is_cuda:
                raise RuntimeError("it runs on NVIDIA GPUs")
            if filters and name not in WITH_FILTERS:
                raise RuntimeError(f"it has no filters here ({', '.join(filters)})")
            step = make()  # before its tensors, which may be large
            arguments = inputs.arguments(*tensors)
            arguments(0)
        except Exception as error:  # why a peer cannot run is a result
            unavailable[name] = first_line(error)
            continue
        run, warm = (lambda i, s=step, a=arguments: s(*a(i))), (lambda i, s=step, a=arguments: s(*a(0)))
        capturable = name != "transformers"  # which reads what it drew
        methods.append(Method(name, run, inputs.calls, capturable=capturable, warm=warm))
    return methods, unavailable


if __name__ == "__main__":
    gpu = torch.device("cuda")
    tokens, noise = torch.zeros(1, 1, dtype=torch.int32, device=gpu), torch.zeros(1, dtype=torch.int64, device=gpu)
    logits = torch.randn(1, 2, 1024, device=gpu)
    print(flashinfer_step(0.8, {"top_k": 50, "top_p": 0.95})(logits, tokens, logits[:, :1], noise))
    torch.cuda.synchronize()
