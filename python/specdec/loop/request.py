"""What is asked of one sequence."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specdec_kernels import SamplingParams

from ..checks import read_count, refuse, shown
from ..sampling.grammar import Grammar
from ..sampling.params import read_bias
from .log_probs import check_log_probs

if TYPE_CHECKING:
    from transformers import LogitsProcessor

    from ..stopping import StoppingCriteria

_SEEDS = range(-(2**63), 2**63)


@dataclass(frozen=True)
class Request:
    """What is asked of one sequence. Its fields mean the same as the arguments of ``SpeculativeDecoder.generate``.

    Args:
        prompt: at least one token id.
        params: with numbers, not tensors; None: greedy.
        seed: a signed 64-bit integer. The text depends on seed, prompt and settings, but not on the time, the row or
            the other requests of the batch.
        eos_token_id: one id, up to 8 ids (or as many as the target's configuration has), or [] for none; None takes
            those of the target's configuration.
        stop: must not be shared with other requests, unless it keeps no state.
        processor_prompt: the prompt as processors and penalties see it; None: as it is.
        id: any object of the caller's.
        num_drafts: the most tokens that a step drafts for this request, from 0 (it is decoded plainly) to the
            scheduler's largest K; with a tree, the most nodes of its paths. None: that K. Greedy texts and those of
            ``coupled`` do not depend on it. Sampled texts of ``token`` and ``block`` are other draws from the same
            distribution.
        report_drafts: whether each ``Output`` says what its step drafted for this request. Not of trees.
        prediction: token ids that the output is likely to have (OpenAI's Predicted Outputs), for a decoder whose
            drafter is a :class:`~specdec.drafters.predicted.PredictedDrafter`. It changes a text as little as other
            drafts do.
        owner: whose earlier texts may serve this request, and whom this one may serve later: the memory of a
            ``SuffixDrafter`` with ``SuffixMemories``. Any hashable value; None: nobody's, and no memory is used.
        scope: whose prompts a scheduler's ``prefix_reuse`` may take beginnings from: those with an equal value. A hit
            can be told by the time to the first token, so what must not know of each other needs different ones.
        grammar: what the text has to be, from its first token on (``SpeculativeDecoder.grammar_compiler``). Not
            together with ``min_new_tokens``, and not of trees. Each token is drawn from the target's distribution over
            those that the grammar allows. The error that there was instead of a grammar makes the request one that is
            refused, as others are that are not right.

    Example:
        >>> from specdec import Request, SamplingParams, Scheduler, SpeculativeDecoder, load_embedded_pair
        >>> target, draft, tokenizer = load_embedded_pair()
        >>> prompt = tokenizer("import os").input_ids
        >>> request = Request(prompt, max_new_tokens=8, params=SamplingParams(temperature=0.8), seed=1, id="mine")
        >>> (sequence,) = Scheduler(SpeculativeDecoder(target, draft), rows=1).run([request])
        >>> sequence.request.id, len(sequence.tokens), str(sequence.finish_reason)
        ('mine', 8, 'length')
    """

    prompt: Sequence[int]
    max_new_tokens: int = 128
    params: SamplingParams | None = None
    seed: int = 0
    eos_token_id: int | Sequence[int] | None = None
    stop: StoppingCriteria | None = None
    logit_bias: Mapping[int, float] | None = None
    banned_tokens: Sequence[int] = ()
    min_new_tokens: int = 0
    logits_processor: Sequence[LogitsProcessor] | None = None
    processor_prompt: Sequence[int] | None = None
    id: object = None
    log_probs: bool = False
    top_log_probs: int | None = None
    prompt_log_probs: int | None = None
    num_drafts: int | None = None
    report_drafts: bool = False
    prediction: Sequence[int] | None = None
    owner: Hashable = None
    scope: Hashable = None
    grammar: Grammar | ValueError | None = None

    def check(self, vocab_size: int | None, has_grammar: bool) -> None:
        """Checks all that needs no model: with it ``SequenceState.of`` begins, and it is how a file of requests is
        checked before models are loaded.

        Args:
            vocab_size: V of the target; None: ids are not checked.
            has_grammar: whether it will have one, which may not be compiled yet.

        Raises:
            ValueError: names the argument, what was given and what is allowed.
        """
        read_count("max_new_tokens", self.max_new_tokens)
        if read_count("min_new_tokens", self.min_new_tokens) > self.max_new_tokens:
            allowed = f"an integer from 0 to max_new_tokens = {self.max_new_tokens}"
            refuse("min_new_tokens", self.min_new_tokens, allowed)
        if has_grammar and self.min_new_tokens:
            refuse("min_new_tokens", f"{self.min_new_tokens} with a grammar", "0: the grammar says where texts may end")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or self.seed not in _SEEDS:
            refuse("seed", shown(self.seed), "a signed 64-bit integer")
        if self.stop is not None and not callable(getattr(self.stop, "first_end", None)):
            refuse("stop", type(self.stop).__name__, "StoppingCriteria, such as StopStrings")
        check_log_probs(self.log_probs, self.top_log_probs, self.prompt_log_probs)
        if not isinstance(self.report_drafts, bool):
            refuse("report_drafts", repr(self.report_drafts), "True or False")
        for name, value in (("owner", self.owner), ("scope", self.scope)):
            try:
                hash(value)
            except TypeError:
                refuse(name, f"a {type(value).__name__}", "None, or a hashable value")
        if vocab_size is not None:
            read_bias(self.logit_bias, self.banned_tokens, vocab_size)
