"""Speculative decoding: the draft proposes K tokens, the target scores them in one forward, one kernel decides."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from transformers import LogitsProcessor, PreTrainedModel

from specdec_kernels import SamplingParams
from specdec_kernels.validation import refuse

from .batch import Batch
from .compatibility import cached_model
from .drafters import Drafter, Generation
from .drafters.model import ModelDrafter
from .processors import Processors
from .prompts import TokenIds, check_room, join, read_count, read_eos, read_pad, read_prompts, read_seeds
from .result import Emission, GenerationResult
from .sampling import read_bias, read_d2t, read_min_new_tokens, read_params, read_rule
from .stats import Stopwatch
from .token_table import HostTable


class SpeculativeDecoder:
    """Decodes from ``target`` exactly as it would alone, several tokens a forward.

    Args:
        target: a decoder-only transformers causal LM in evaluation mode.
        draft: a smaller one with the same vocabulary, a :class:`~specdec.drafters.Drafter`, or None with
            ``num_drafts=0``.
        num_drafts: K, drafted tokens a step, >= 0. With 0 the same loop decodes plainly.
        backend: of the kernels, as in ``specdec_kernels``: "auto", "reference", "cpu", "triton" or
            "cuda".
        d2t: for a draft whose *output* covers a part of the target's vocabulary (EAGLE-3, arXiv 2503.01840; FR-Spec,
            arXiv 2502.14856): [columns of its logits] ids of the target, ascending. Its embedding must cover the whole
            vocabulary, since it is fed the target's tokens.

    Raises:
        ValueError: names the argument, what was given and what is allowed; a model that the loop cannot drive
            is refused by the name of its type (``specdec.compatibility``).
    """

    def __init__(
        self,
        target: PreTrainedModel,
        draft: PreTrainedModel | Drafter | None,
        num_drafts: int = 4,
        backend: str = "auto",
        d2t: torch.Tensor | Sequence[int] | None = None,
    ):
        self.num_drafts = read_count("num_drafts", num_drafts)
        self.backend = backend
        self.target = cached_model(target, "target")
        self._max_lengths = {"target": self.target.max_length}
        if d2t is not None and not isinstance(draft, PreTrainedModel):
            refuse("d2t", f"a map with draft={type(draft).__name__}", "a map with a model")
        if draft is None:
            if num_drafts > 0:
                raise ValueError(f"draft: got None with num_drafts={num_drafts}, allowed: None with num_drafts=0")
            self.drafter = None
        elif isinstance(draft, Drafter):
            self.drafter = draft
        else:
            model = cached_model(draft, "draft")
            if d2t is not None:
                d2t = read_d2t(d2t, model, self.target)
            elif model.vocab_size != self.target.vocab_size:
                raise ValueError(
                    f"draft: its vocabulary has {model.vocab_size} tokens, "
                    f"allowed: {self.target.vocab_size}, the target's"
                )
            if model.device != self.target.device:
                raise ValueError(f"draft: is on {model.device}, allowed: {self.target.device}, the target's device")
            self._max_lengths["draft"] = model.max_length
            self.drafter = ModelDrafter(model, d2t)

    def generate(
        self,
        input_ids: TokenIds,
        attention_mask: torch.Tensor | None = None,
        max_new_tokens: int = 128,
        params: SamplingParams | None = None,
        seed: int | Sequence[int] | torch.Tensor = 0,
        eos_token_id: int | Sequence[int] | None = None,
        pad_token_id: int | None = None,
        on_emit: Callable[[Emission], None] | None = None,
        *,
        rule: str = "token",
        logit_bias: Mapping[int, float] | Sequence[Mapping[int, float] | None] | None = None,
        banned_tokens: Sequence[int] | Sequence[Sequence[int]] | None = None,
        min_new_tokens: int | Sequence[int] | torch.Tensor = 0,
        logits_processor: Sequence[LogitsProcessor] | None = None,
        log_probs: bool = False,
        compact_q: int = 0,
    ) -> GenerationResult:
        """Continues every prompt until an end-of-sequence token or ``max_new_tokens``.

        The law of the text is that of plain sampling from the target. Logits become probabilities in transformers'
        order: ``logits_processor``, bias and bans, penalties, ends before ``min_new_tokens``, temperature, filters.

        Args:
            input_ids: [B, P] int64 or int32, or a list of B prompts of any lengths (1-D tensors or lists of
                ids). B may be 0; every prompt has at least one token.
            attention_mask: [B, P] of 0 and 1 beside a padded tensor (on the left or the right).
            max_new_tokens: >= 0; exact, unless a sequence ends before.
            params: temperature, filters and penalties, numbers or [B]; None is greedy. Greedy and sampled
                sequences mix. The repetition penalty counts prompt and output, as in transformers.
            seed: a signed 64-bit integer *for every sequence*: a text does not depend on its row in the
                batch, so equal prompts get equal texts. For different samples of one prompt pass B seeds, a
                list or a [B] tensor.
            eos_token_id: an id, several, or [] for none; None asks the target's configuration.
            pad_token_id: fills ``result.sequences`` behind a sequence's end; None asks the target's
                configuration.
            on_emit: called for every live sequence after each step with what it emitted.
            rule: "token", "block" or "coupled" (``specdec_kernels.Rule``). With "coupled" the text depends on
                target and seed alone: it is the one that K = 0 gives, whatever the draft.
            logit_bias: token -> what is added to its logit (-inf bans it), for all sequences or one for each.
            banned_tokens: ids that never come, for all sequences or for each.
            min_new_tokens: a number or [B]: no end-of-sequence token comes before so many others.
            logits_processor: transformers' ``LogitsProcessorList``, or a list of processors, for what the parameters
                above cannot say. Each is called for one sequence and one row at a time, with its text ([1, n] ids, no
                padding) and its logits ([1, V] float32): slow. It must be a function of these two alone: rows are
                visited more than once, out of order, and by the draft as well.
            log_probs: also return the log-probabilities of the new tokens.
            compact_q: k' > 0: the draft draws from its k' most likely tokens, and ids and log-probabilities are
                all that is kept of q: [B, K, k'] numbers instead of the draft's logits.

        Returns:
            GenerationResult. A sequence whose target logits have no distribution ends there, with its status.

        Raises:
            ValueError: names the argument, what was given and what is allowed. A prompt that with
                ``max_new_tokens`` does not fit the positions of target or draft is refused before anything
                runs.
        """
        device = self.target.device
        prompts = read_prompts(input_ids, attention_mask, self.target.vocab_size)
        read_count("max_new_tokens", max_new_tokens)
        for name, max_length in self._max_lengths.items():
            check_room(prompts, max_new_tokens, name, max_length)
        eos = read_eos(eos_token_id, self.target.model)
        pad = read_pad(pad_token_id, eos, self.target.model)
        size = len(prompts)
        params = read_params(params, size, device)
        bias = read_bias(logit_bias, banned_tokens, size, self.target.vocab_size)
        shortest = read_min_new_tokens(min_new_tokens, size, max_new_tokens)
        generation = Generation(
            prompts=prompts,
            capacity=max(map(len, prompts), default=0) + max_new_tokens + 1,
            params=params,
            seed=read_seeds(seed, size, device),
            greedy=not params.temperature.any(),
            rule=read_rule(rule, compact_q),
            compact_q=compact_q,
            processors=None if logits_processor is None else Processors(logits_processor, self.target.vocab_size),
            backend=self.backend,
            stopwatch=Stopwatch(),
        )
        ends = [i for i in sorted(eos) if 0 <= i < self.target.vocab_size]
        table = HostTable.needed(prompts, params, bias, ends, shortest, device)
        batch = Batch(generation, max_new_tokens, self.num_drafts, eos, table, log_probs, on_emit)
        with torch.inference_mode():
            batch.run(self.target, self.drafter)
        return batch.result(join(input_ids, prompts, batch.tokens, pad, device))
