"""What a draft is worth: alpha and tau on texts that the target itself has written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from specdec_kernels import SamplingParams

from ..decoder import SpeculativeDecoder
from ..models.load.reduced_head import reduced_ids
from .reduced_vocabulary import columns_of

TEMPERATURES = (0.0, 1.0)
AT_ONCE = 16  # texts


@dataclass(frozen=True)
class Written:
    """The target's continuation of a prompt, and the log-probabilities at temperature 1 of its own tokens."""

    prompt: list[int]
    new: list[int]
    log_p: list[float]
    temperature: float


@dataclass(frozen=True)
class Worth:
    """Of a draft at one temperature, with K drafts a step.

    Attributes:
        alpha: accepted / tested.
        tau: emitted / steps.
    """

    temperature: float
    alpha: float
    tau: float


def write(
    target: PreTrainedModel, prompts: Sequence[Sequence[int]], new: int, seed: int, draft: PreTrainedModel | None = None
) -> list[Written]:
    """Continues the prompts greedily, and with the target's own distribution. The texts do not depend on ``draft``,
    which makes them sooner."""
    decoder, written = SpeculativeDecoder(target, draft, 4), []
    for temperature in TEMPERATURES:
        for first in range(0, len(prompts), AT_ONCE):
            some = [list(p) for p in prompts[first : first + AT_ONCE]]
            seeds = list(range(seed + first, seed + first + len(some)))
            params = SamplingParams(temperature=temperature)
            found = decoder.generate(some, None, new, params, seeds, rule="coupled", log_probs=True)
            assert found.raw_log_probs is not None
            for prompt, tokens, log_p in zip(some, found.tokens, found.raw_log_probs, strict=True):
                if tokens:
                    written.append(Written(prompt, tokens, log_p, temperature))
    return written


@torch.inference_mode()
def worth(draft: PreTrainedModel, written: Sequence[Written], num_drafts: int) -> list[Worth]:
    """Returns what ``draft`` is worth at each temperature, by one forward over the texts.

    A text's distribution is the target's, whatever drafts it was made with. Given the text, its token x was an accepted
    draft with probability min(1, q(x) / p(x)) wherever a draft was tested (rule ``token``; Leviathan et al., arXiv
    2211.17192): so the expected counts of a decoder follow from p and q at each token, and no drafts are drawn.
    """
    found = []
    for temperature in TEMPERATURES:
        steps = emitted = tested = accepted = 0.0
        for text in (w for w in written if w.temperature == temperature):
            chances = _chances(draft, text)
            s, t, a = expected_counts(chances, num_drafts)
            steps, tested, accepted, emitted = steps + s, tested + t, accepted + a, emitted + len(chances)
        found.append(Worth(temperature, accepted / tested if tested else 0.0, emitted / steps if steps else 1.0))
    return found


def _chances(draft: PreTrainedModel, text: Written) -> list[float]:
    """That a draft for each new token is accepted."""
    ids = torch.tensor([[*text.prompt, *text.new]], device=draft.device)
    logits = draft(input_ids=ids[:, :-1], use_cache=False).logits[0, len(text.prompt) - 1 :].float()
    new, drafted = columns_of(ids[0, len(text.prompt) :], reduced_ids(draft))
    if text.temperature == 0:
        return ((logits.argmax(-1) == new) & drafted).float().tolist()
    log_q = logits.log_softmax(-1).gather(-1, new[:, None])[:, 0]
    log_q = torch.where(drafted, log_q, -torch.inf).cpu()
    return (log_q - torch.tensor(text.log_p)).exp().clamp(max=1).tolist()


def expected_counts(chances: Sequence[float], num_drafts: int) -> tuple[float, float, float]:
    """Returns the expected steps, tested and accepted drafts of a decoder that emits a text with K drafts a step, the
    chances of which are given. The last token of a text is never drafted: the target gives it anyway."""
    n = len(chances)
    begins = [0.0] * (n + 1)  # the chance that a step begins at each token
    begins[0] = 1.0
    steps = tested = accepted = 0.0
    for i in range(n):
        steps += begins[i]
        reach, room = begins[i], min(num_drafts, n - i - 1)
        for j in range(i, i + room):
            tested += reach
            begins[j + 1] += reach * (1 - chances[j])
            reach *= chances[j]
            accepted += reach
        begins[i + room + 1] += reach
    return steps, tested, accepted


def beginnings(blocks: torch.Tensor, count: int, length: int, seed: int) -> list[list[int]]:
    """Beginnings of some of the held-out blocks [n, length of a block]."""
    chance = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(blocks), generator=chance)[:count]
    return blocks[chosen, :length].tolist()
