"""Other ways to verify K drafts, as people write them today. Same distribution as ours; each says what it leaves out.

"+q" in a name: the draft's probabilities were kept from drafting ([B, K, V] float32) and are not computed here. "+p+q":
neither are the target's. FlashInfer, which need not be installed, compiles its kernels at their first call;
``python bench/peers.py`` does that and nothing else.
"""

from __future__ import annotations

import importlib
import inspect
import time
from collections.abc import Callable

import torch
from specdec.checks import refuse


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


if __name__ == "__main__":
    gpu = torch.device("cuda")
    tokens, noise = torch.zeros(1, 1, dtype=torch.int32, device=gpu), torch.zeros(1, dtype=torch.int64, device=gpu)
    logits = torch.randn(1, 2, 1024, device=gpu)
    print(flashinfer_step(0.8, {"top_k": 50, "top_p": 0.95})(logits, tokens, logits[:, :1], noise))
    torch.cuda.synchronize()
