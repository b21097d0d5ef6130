"""``SpeculativeDecoder.generate``: reads prompts as one array with settings for all or each of them, decodes a
``Request`` for every text, and returns the texts as one array."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from transformers import LogitsProcessor

from specdec_kernels import SamplingParams

from .checks import for_each, read_count
from .loop.request import Request
from .loop.sequence import Output, SequenceState
from .loop.step import AcceptRule
from .models.forward.cached_model import CachedModel
from .prompts import TokenIds, join, read_eos, read_pad, read_prompts, read_seeds
from .result import FinishReason, GenerationResult
from .sampling.grammar import Grammar
from .sampling.params import split_params
from .stats import Stats
from .stopping import StoppingCriteria


class Decoded(NamedTuple):
    """What became of requests."""

    sequences: list[SequenceState]
    stats: Stats  # of all together
    drafter_error: str | None  # why the drafter was dropped; None: it was not dropped


class Decoder(Protocol):
    """The part of a ``SpeculativeDecoder`` that ``generate`` uses."""

    target: CachedModel

    def decode(
        self,
        requests: Sequence[Request],
        rule: str | AcceptRule | None = None,
        on_emit: Callable[[Output], None] | None = None,
        *,
        output_logits: bool = False,
    ) -> Decoded: ...

    def costs_of(self, batch_size: int) -> list[float] | None: ...


def generate(
    self: Decoder,
    input_ids: TokenIds,
    attention_mask: torch.Tensor | None = None,
    max_new_tokens: int = 128,
    params: SamplingParams | None = None,
    seed: int | Sequence[int] | torch.Tensor = 0,
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
    on_emit: Callable[[Output], None] | None = None,
    *,
    rule: str | AcceptRule | None = None,
    logit_bias: Mapping[int, float] | Sequence[Mapping[int, float] | None] | None = None,
    banned_tokens: Sequence[int] | Sequence[Sequence[int]] | None = None,
    min_new_tokens: int | Sequence[int] | torch.Tensor = 0,
    logits_processor: Sequence[LogitsProcessor] | Sequence[Sequence[LogitsProcessor]] | None = None,
    log_probs: bool = False,
    output_logits: bool = False,
    num_return_sequences: int = 1,
    stop: StoppingCriteria | None = None,
    processor_prompts: Sequence[Sequence[int]] | None = None,
    top_log_probs: int | None = None,
    prompt_log_probs: int | None = None,
    grammar: Grammar | None | Sequence[Grammar | None] = None,
) -> GenerationResult:
    """Continues every prompt until an end-of-sequence token, an end found by ``stop``, or ``max_new_tokens``.

    The distribution of the text is that of plain sampling from the target. Logits become probabilities in
    transformers' order: ``logits_processor``, bias and bans, penalties, ``min_new_tokens`` (which bans
    end-of-sequence tokens), temperature, filters.

    Args:
        input_ids: [B, P] int64 or int32, or a list of B prompts of any lengths (1-D tensors or lists of
            ids). B may be 0; every prompt has at least one token.
        attention_mask: [B, P] of 0 and 1, for a tensor with padding on the left or the right.
        max_new_tokens: new tokens of every sequence that does not end earlier, >= 0.
        params: temperature, filters and penalties, as numbers or [B] tensors; None is greedy. Greedy and sampled
            sequences may be mixed. The repetition penalty counts prompt and output, as in transformers.
        seed: a signed 64-bit integer *for every sequence*: a text does not depend on its row in the
            batch, so equal prompts get equal texts. For different samples of one prompt pass B seeds, as a
            list or a [B] tensor.
        eos_token_id: one id, several, or [] for none; None takes those of the target's configuration.
        pad_token_id: fills ``GenerationResult.sequences`` after a sequence's end; None takes that of the target's
            configuration.
        on_emit: called after each step for every sequence that emitted tokens in it, or ended.
        rule: "token", "block" or "coupled" (``specdec_kernels.Rule``); None: "token", and "coupled" for trees and
            where the decoder was given no draft. The other two need a drafter that samples its trees. With
            "coupled" the text depends only on the target and the seed: it is the text of K = 0, whatever the draft.
            An :class:`~specdec.loop.step.AcceptRule` may be another rule, such as the **lossy**
            :class:`~specdec.loop.typical.Typical` for trees.
        logit_bias: maps a token to a number that is added to its logit (-inf bans it); one mapping for all
            sequences, or one for each.
        banned_tokens: ids that are never emitted; one list for all sequences, or one for each.
        min_new_tokens: a number or [B]: a sequence emits at least this many tokens before its end-of-sequence.
        logits_processor: transformers' ``LogitsProcessorList`` or a list of processors, for all sequences or one
            such list for each. Slow, so meant for effects that the parameters above do not offer: each processor
            is called for one sequence and one row at a time, with its text ([1, n] ids, no padding) and its logits
            ([1, V] float32). It must be a function of these two alone, because rows are visited more than once,
            out of order, and by the draft as well.
        log_probs: also return the log-probabilities of the new tokens: under the distribution that they were drawn
            from, and under the softmax of the model's own logits ("raw").
        output_logits: also return the model's own logits at every new token.
        num_return_sequences: n >= 1 texts for each prompt, in neighbouring rows, as transformers returns them.
            Text j of a prompt has the prompt's seed + j. Arguments "for each sequence" are then for each prompt.
        stop: ends a sequence because of its text; for example ``specdec.stopping.StopStrings``.
        processor_prompts: the prompts as processors and penalties see them, where these differ from the prompts:
            transformers shows them the padding, too.
        top_log_probs: n from 0 to 20: also return what ``log_probs`` does, and of every new token its rank and the
            n most likely tokens of its position with their log-probabilities. These are raw, whatever the settings:
            OpenAI's ``top_logprobs``, and vLLM's ``logprobs`` with ``logprobs_mode="raw_logprobs"``, its default.
        prompt_log_probs: n from 0 to 20: also return the same of every token of the prompt but the first, given
            those before it. With ``max_new_tokens=0`` nothing else is computed. The prompt is then read in chunks
            of at most 1024 tokens, whose logits [1024, V] are the largest scratch.
        grammar: what the texts have to be, made by ``grammar_compiler``; one for all sequences, or one or None for
            each. A token that it does not allow has probability 0, so the text has the distribution of plain
            sampling from what is left of the target's at every token. Chains only. A text whose grammar fails in
            the middle (a bound of the library, say) ends there, alone, with ``GenerationResult.errors``.

    Returns:
        GenerationResult. A sequence whose target logits define no distribution ends there, with its status.

    Raises:
        ValueError: names the argument, what was given and what is allowed. Raised before anything is allocated if
            a prompt with ``max_new_tokens`` does not fit the positions of target or draft, or if the caches do not
            fit the free memory.

    Example:
        >>> from specdec import SamplingParams, SpeculativeDecoder, load_embedded_pair
        >>> target, draft, tokenizer = load_embedded_pair()
        >>> prompts = tokenizer(["def read(self):", "import os"]).input_ids
        >>> params = SamplingParams(temperature=0.8, top_p=0.95)
        >>> decoder = SpeculativeDecoder(target, draft)
        >>> result = decoder.generate(prompts, max_new_tokens=16, params=params, seed=[0, 1])
        >>> len(result.tokens), result.stats.emitted == sum(map(len, result.tokens)), result.stats.tau >= 1
        (2, True, True)
    """
    target = self.target
    prompts = read_prompts(input_ids, attention_mask, target.vocab_size)
    read_count("max_new_tokens", max_new_tokens)
    eos = read_eos(eos_token_id, target.model)
    pad = read_pad(pad_token_id, eos, target.model)
    texts = read_count("num_return_sequences", num_return_sequences, 1)
    size, no_processors = len(prompts), logits_processor is None or len(logits_processor) == 0
    one_list = no_processors or not all(isinstance(each, Sequence) for each in logits_processor or ())
    banned = () if banned_tokens is None else banned_tokens
    one_banned = isinstance(banned, Sequence) and all(isinstance(token, int) for token in banned)
    one_bias = logit_bias is None or isinstance(logit_bias, Mapping)
    columns = {
        "prompt": prompts,
        "params": split_params(params, size),
        "seed": read_seeds(seed, size, torch.device("cpu")).tolist(),
        "logit_bias": for_each("logit_bias", logit_bias, size, one_bias),
        "banned_tokens": for_each("banned_tokens", banned, size, one_banned),
        "min_new_tokens": for_each("min_new_tokens", min_new_tokens, size, isinstance(min_new_tokens, int)),
        "logits_processor": for_each("logits_processor", logits_processor, size, one_list),
        "processor_prompt": for_each("processor_prompts", processor_prompts, size, processor_prompts is None),
        "grammar": for_each("grammar", grammar, size, grammar is None or isinstance(grammar, Grammar)),
    }
    same: dict[str, Any] = {"max_new_tokens": max_new_tokens, "eos_token_id": list(eos), "stop": stop}
    same |= {"log_probs": log_probs, "top_log_probs": top_log_probs, "prompt_log_probs": prompt_log_probs}
    requests = []
    for row in zip(*columns.values(), strict=True):
        settings = same | dict(zip(columns, row, strict=True))
        seeds = [next_seed(settings["seed"], text) for text in range(texts)]
        requests += [Request(**{**settings, "seed": seed}) for seed in seeds]
    decoded = self.decode(requests, rule, on_emit, output_logits=output_logits)
    if isinstance(input_ids, torch.Tensor):
        input_ids = input_ids.repeat_interleave(texts, 0)
    prompts = [prompt for prompt in prompts for _ in range(texts)]
    whole = join(input_ids, prompts, [s.tokens for s in decoded.sequences], pad, target.device)
    none = torch.empty(0, target.vocab_size, device=target.device) if output_logits else None
    return _result(decoded, whole, none, self.costs_of(len(requests)))


def _result(
    decoded: Decoded, whole: torch.Tensor, no_logits: torch.Tensor | None, step_costs: list[float] | None
) -> GenerationResult:
    """
    Args:
        no_logits: [0, V], of a sequence without tokens; None: logits were not asked for.
    """
    sequences = decoded.sequences

    def of_each(name: str) -> Any:
        """None: it was not asked for."""
        values = [getattr(s, name) for s in sequences]
        return None if any(value is None for value in values) else values

    named = ("tokens", "produced_by", "status", "log_probs", "raw_log_probs", "top_log_probs", "prompt_log_probs")
    return GenerationResult(
        whole,
        **{name: of_each(name) for name in named},
        # With no new tokens wanted, none has begun.
        finish_reason=[s.finish_reason or FinishReason.LENGTH for s in sequences],
        errors=[s.error for s in sequences],
        stats=decoded.stats,
        sequence_stats=[s.stats for s in sequences],
        logits=None if no_logits is None else [torch.stack(s.logits) if s.logits else no_logits for s in sequences],
        drafter_error=decoded.drafter_error,
        step_costs=step_costs,
    )


def next_seed(seed: int, further: int) -> int:
    """The seed of a further text of a prompt; after the largest comes the smallest."""
    return (seed + further + 2**63) % 2**64 - 2**63
