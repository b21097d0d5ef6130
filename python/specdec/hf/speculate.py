"""Speculative decoding by ``model.generate(**inputs, custom_generate=specdec.speculate(draft_model))``."""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

import torch
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    StoppingCriteriaList,
)
from transformers.generation import EosTokenCriteria, GenerateDecoderOnlyOutput, GenerationMixin, MaxLengthCriteria
from transformers.generation.streamers import BaseStreamer

from specdec_kernels import Rule, Status

from ..checks import read_count, refuse, shown
from ..decoder import SpeculativeDecoder
from ..drafters.protocol import Drafter
from ..loop.draft_length import DEFAULT_DRAFTS, AdaptiveDrafts
from ..models.supported import refuse_unloaded
from ..result import GenerationResult
from ..stopping import StoppingCriteria, StopStrings
from .assistance import Assistance, read_assistance
from .convert_processors import read_arguments
from .criteria import AnyOf, TransformersCriteria
from .generation_config import FIELDS, check_fields
from .inputs import paddings_of, read_inputs

P = ParamSpec("P")
T = TypeVar("T")


def _called_first(function: Callable[P, T]) -> Callable[P, T]:
    """Refuses the call of ``generate``, whose callable is not the function but what it returns."""

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        if "logits_processor" in kwargs:
            name = f"specdec.{function.__name__}"
            refuse("custom_generate", f"{name} itself", f"what it returns: {name}(), or {name}(draft_model)")
        return function(*args, **kwargs)

    return called


@_called_first
def speculate(
    draft_model: PreTrainedModel | None = None,
    *,
    drafter: Drafter | None = None,
    num_drafts: int | AdaptiveDrafts | None = None,
    rule: str | None = None,
    seed: int | Sequence[int] | torch.Tensor | None = None,
    streamer: BaseStreamer | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    stop_strings: str | Sequence[str] | None = None,
    draft_tokenizer: PreTrainedTokenizerBase | None = None,
    confidence: float | None = None,
    d2t: torch.Tensor | Sequence[int] | None = None,
    backend: str = "auto",
    cache_dtype: torch.dtype | None = None,
    tree: int | None = None,
) -> Speculator:
    """Returns a callable for ``model.generate(**inputs, custom_generate=...)``. The text has the distribution that
    ``generate`` itself would sample from; a greedy text is the one that ``generate`` gives. Batches,
    ``num_return_sequences``, processors, criteria and nearly all of ``GenerationConfig`` work as they do there
    (docs/transformers.md).

    ``streamer``, ``tokenizer`` and the draft model with its tokenizer have to be given here: ``generate`` does not hand
    its own to a callable. It refuses an ``assistant_model``, and warns of a streamer.

    Args:
        draft_model: a smaller causal LM. Without it and without ``drafter``, ``generate`` can name a drafter
            (``prompt_lookup_num_tokens``, ``assistant_early_exit``); if it does not, a ``SuffixDrafter`` drafts, with
            rule ``coupled``. Plain decoding is ``num_drafts=0``.
        drafter: another drafter instead of a model, such as ``PromptLookupDrafter()``.
        num_drafts: K >= 0, or ``AdaptiveDrafts``; None: ``num_assistant_tokens`` where that was set, else as in
            :class:`SpeculativeDecoder`.
        rule, d2t, backend, cache_dtype, tree: as in :class:`SpeculativeDecoder` and its ``generate``.
        seed: of sampled texts. A signed 64-bit integer s gives text j of each prompt's ``num_return_sequences`` the
            seed s + j; a list or tensor has one for each row. None draws one for each row from torch's global
            generator, so ``torch.manual_seed`` decides.
        streamer: gets the prompt [1, P], then the tokens of each step [n] int64, then ``end()``, also after an error.
            For one sequence only. One that is given to ``generate`` gets the prompt and nothing else, not even an end;
            a RuntimeWarning says so.
        tokenizer: the target's. ``stop_strings`` and ``draft_tokenizer`` need it, and so does
            ``generate(stop_strings=...)``.
        stop_strings: one or several; a text ends with the token that completes one. Or give them to ``generate``.
        draft_tokenizer: the draft model's, where it is another than the target's.
        confidence: as in :class:`SpeculativeDecoder`; None: ``assistant_confidence_threshold`` where that was set,
            else 0.

    Raises:
        ValueError: names the argument, what was given and what is allowed. The callable raises it as well, for
            arguments of ``generate`` that it receives and cannot honour.

    Example:
        >>> import specdec
        >>> target, draft, tokenizer = specdec.load_embedded_pair()
        >>> inputs = tokenizer(["import os"], return_tensors="pt")
        >>> plain = target.generate(**inputs, max_new_tokens=16)
        >>> drafted = target.generate(**inputs, max_new_tokens=16, custom_generate=specdec.speculate(draft))
        >>> drafted.tolist() == plain.tolist()
        True
    """
    if rule is not None:
        Rule(rule)  # refuses others
    if tree is not None:
        read_count("tree", tree, 1)
    if draft_model is not None and drafter is not None:
        refuse("drafter", "one beside draft_model", "one of them")
    refuse_unloaded("draft_model", draft_model)
    if draft_model is not None and not isinstance(draft_model, torch.nn.Module | Drafter):
        refuse("draft_model", f"a {type(draft_model).__name__}", "a causal LM; other drafters are drafter=")
    if drafter is not None and not isinstance(drafter, Drafter):
        refuse("drafter", shown(drafter), "a drafter such as SuffixDrafter(); a model is draft_model")
    if num_drafts is not None and not isinstance(num_drafts, AdaptiveDrafts):
        read_count("num_drafts", num_drafts)
    if draft_tokenizer is not None:
        if draft_model is None or tokenizer is None:
            missing = "draft_model" if draft_model is None else "tokenizer"
            refuse(missing, "None with draft_tokenizer", "the draft model and the target's tokenizer beside it")
        from ..drafters.universal import UniversalDrafter

        drafter = UniversalDrafter(draft_model, draft_tokenizer, tokenizer)
    if stop_strings is not None and tokenizer is None:
        refuse("tokenizer", "None with stop_strings", "the target's tokenizer, in specdec.speculate as well")
    stop = None if stop_strings is None or tokenizer is None else StopStrings(tokenizer, stop_strings)
    assistance = Assistance(draft_model if drafter is None else drafter, num_drafts, confidence)
    of_decoder = {"d2t": d2t, "backend": backend, "cache_dtype": cache_dtype, "tree": tree}
    return Speculator(assistance, of_decoder, rule, seed, streamer, tokenizer, stop)


class _Prepared(NamedTuple):
    """The decoder of a model as it was when it was built."""

    model: PreTrainedModel
    key: tuple
    decoder: SpeculativeDecoder


@dataclass(eq=False, repr=False)
class Speculator:
    """What :func:`speculate` returns. It keeps the decoder of the model that it was last used with.

    Attributes:
        of_decoder: further arguments of the decoder.
        stop: the stop strings.
        last_result: :class:`GenerationResult` of the last call, with statistics; None before.
    """

    assistance: Assistance
    of_decoder: dict[str, Any]
    rule: str | None
    seed: int | Sequence[int] | torch.Tensor | None
    streamer: BaseStreamer | None
    tokenizer: PreTrainedTokenizerBase | None
    stop: StoppingCriteria | None
    last_result: GenerationResult | None = field(default=None, init=False)
    _prepared: _Prepared | None = field(default=None, init=False)

    def __repr__(self) -> str:
        draft, num_drafts = self.assistance.draft, self.assistance.num_drafts
        drafts = "whatever generate names" if draft is None else f"a {type(draft).__name__}"
        return f"<specdec.speculate: {drafts} drafts, num_drafts={num_drafts}, rule={self.rule}>"

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: torch.LongTensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        stop_strings: str | Sequence[str] | None = None,
        token_healing: bool | None = None,
        num_assistant_tokens: int | None = None,
        assistant_confidence_threshold: float | None = None,
        prompt_lookup_num_tokens: int | None = None,
        max_matching_ngram_size: int | None = None,
        assistant_early_exit: int | None = None,
        **model_kwargs: Any,
    ) -> torch.Tensor | GenerateDecoderOnlyOutput:
        """As ``GenerationMixin.generate`` calls it, with what it has prepared.

        Keyword arguments of ``generate`` that this signature names come here as they were given, and not into
        ``generation_config``: that is how ``generate`` treats every callable.

        Returns:
            [B, P + new] int64, or ``GenerateDecoderOnlyOutput`` with it where ``return_dict_in_generate`` asks.
        """
        given = {
            "num_assistant_tokens": num_assistant_tokens,
            "assistant_confidence_threshold": assistant_confidence_threshold,
            "prompt_lookup_num_tokens": prompt_lookup_num_tokens,
            "max_matching_ngram_size": max_matching_ngram_size,
            "assistant_early_exit": assistant_early_exit,
        }
        _check_withheld()
        try:
            if token_healing:
                refuse("token_healing", True, FIELDS["token_healing"].allowed)
            assistance = read_assistance(self.assistance, generation_config, given, model.generation_config)
            stops = self._stops(stop_strings)
            prepared = (model, input_ids, logits_processor, stopping_criteria, generation_config)
            return self._generate(*prepared, model_kwargs, assistance, stops)
        finally:
            if self.streamer is not None:
                self.streamer.end()

    def _generate(
        self,
        model: PreTrainedModel,
        input_ids: torch.LongTensor,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        config: GenerationConfig,
        model_kwargs: dict[str, Any],
        assistance: Assistance,
        stops: list[StoppingCriteria],
    ) -> torch.Tensor | GenerateDecoderOnlyOutput:
        check_fields(config, model.generation_config)
        size, length = input_ids.shape
        mask = read_inputs(input_ids, model_kwargs)
        if (streamer := self.streamer) is not None:
            if size != 1:
                refuse("streamer", f"a batch of {size} sequences", "one sequence")
            streamer.put(input_ids.cpu())
        decoder = self._decoder(model, assistance)
        rows = input_ids.tolist()
        eos = frozenset(i for c in criteria if isinstance(c, EosTokenCriteria) for i in c.eos_token_id.tolist())
        # transformers looks after a token: with no room at all there is still one.
        most = min((c.max_length for c in criteria if isinstance(c, MaxLengthCriteria)), default=None)
        if most is None:
            refuse("stopping_criteria", "no length", "a MaxLengthCriteria among them")
        most = max(most - length, 1)
        arguments = read_arguments(processors, rows, bool(config.do_sample), eos, most, decoder.target.vocab_size)
        if others := [c for c in criteria if not isinstance(c, (EosTokenCriteria, MaxLengthCriteria))]:
            padding = [row[:n] for row, n in zip(rows, paddings_of(mask, size), strict=True)]
            stops.append(TransformersCriteria(others, size, padding, input_ids.device))
        wants = {name: config.return_dict_in_generate and getattr(config, name) for name in _RECORDED}
        pad = config._pad_token_tensor
        result = decoder.generate(
            input_ids,
            mask,
            most,
            seed=self._seeds(config, size),
            eos_token_id=sorted(eos),
            pad_token_id=0 if pad is None else int(pad),
            on_emit=None if streamer is None else lambda output: streamer.put(torch.tensor(output.tokens)),
            rule=self.rule,
            output_logits=any(wants.values()),
            stop=AnyOf(stops) if stops else None,
            **vars(arguments),
        )
        self.last_result = result
        if faults := {b: s & Status.TARGET_FAULTS for b, s in enumerate(result.status) if s & Status.TARGET_FAULTS}:
            names = ", ".join(f"{b}: {status.name}" for b, status in faults.items())
            warnings.warn(f"sequences ended where their logits are no distribution ({names})", RuntimeWarning, 2)
        if errors := {b: error for b, error in enumerate(result.errors) if error is not None}:
            warnings.warn(f"sequences ended where their grammars failed ({errors})", RuntimeWarning, 2)
        if not config.return_dict_in_generate:
            return result.sequences
        return _output(result, processors, length, wants["output_scores"], wants["output_logits"])

    def _stops(self, stop_strings: str | Sequence[str] | None) -> list[StoppingCriteria]:
        """The ends that this was made with, or that ``generate`` was given."""
        if stop_strings is None:
            return [] if self.stop is None else [self.stop]
        if self.tokenizer is None:
            given = f"{stop_strings!r} in generate(), which hands its tokenizer to no callable"
            refuse("stop_strings", given, "strings where specdec.speculate(tokenizer=...) has the tokenizer")
        if self.stop is not None:
            refuse("stop_strings", f"{stop_strings!r} in generate()", "None beside those of specdec.speculate")
        return [StopStrings(self.tokenizer, stop_strings)]

    def _decoder(self, model: PreTrainedModel, assistance: Assistance) -> SpeculativeDecoder:
        """Made once for a model, as long as nothing about it or the drafts has changed."""
        draft = assistance.draft
        models = [model, draft] if isinstance(draft, PreTrainedModel) else [model]
        state = [(m.device, m.dtype, m.training, m.config._attn_implementation) for m in models]
        key = (assistance, *state)
        if self._prepared is None or self._prepared.model is not model or self._prepared.key != key:
            self._prepared = None  # so that an error leaves nothing behind
            num_drafts = DEFAULT_DRAFTS if assistance.num_drafts is None else assistance.num_drafts
            own = {"confidence": assistance.confidence or 0.0, **self.of_decoder}
            decoder = SpeculativeDecoder(model, assistance.drafter_for(model), num_drafts, **own)
            self._prepared = _Prepared(model, key, decoder)
        return self._prepared.decoder

    def _seeds(self, config: GenerationConfig, size: int) -> int | list[int] | torch.Tensor | Sequence[int]:
        if not config.do_sample:
            return 0
        if self.seed is None:
            return torch.randint(-(2**63), 2**63 - 1, (size,))
        if isinstance(self.seed, int):  # transformers has repeated the prompts already
            return [self.seed + row % (config.num_return_sequences or 1) for row in range(size)]
        return self.seed


def _check_withheld() -> None:
    """Looks for what ``generate`` was given and hands to no callable: only its frame still has it. It warns of a
    streamer, without which the text is right, and refuses a draft model that would not draft."""
    code = inspect.unwrap(GenerationMixin.generate).__code__
    frame = sys._getframe(1)
    while (frame := frame.f_back) is not None:  # type: ignore[assignment]
        if frame.f_code is code:
            if (assistant := frame.f_locals.get("assistant_model")) is not None:
                given = f"a {type(assistant).__name__} in generate() beside custom_generate"
                refuse("assistant_model", given, "None there: pass it as specdec.speculate(draft_model)")
            if frame.f_locals.get("streamer") is not None:
                told = "streamer: got one in generate(), which gives it no tokens beside custom_generate"
                warnings.warn(f"{told}; pass it to specdec.speculate(streamer=...)", RuntimeWarning, 3)
            return


_RECORDED = ("output_scores", "output_logits")


def _output(
    result: GenerationResult, processors: LogitsProcessorList, length: int, scores: bool, logits: bool
) -> GenerateDecoderOnlyOutput:
    """What ``return_dict_in_generate`` asks for: a tuple of [B, V] float32 for each new token; rows after a
    sequence's end are 0."""
    sequences = result.sequences
    raw: tuple[torch.Tensor, ...] = ()
    processed: tuple[torch.Tensor, ...] = ()
    if result.logits is not None:
        lengths = [len(own) for own in result.logits]
        padded = torch.nn.utils.rnn.pad_sequence([own.float() for own in result.logits]).to(sequences.device)
        raw = padded.unbind()
        for i in range(len(raw) if scores else 0):
            text = cast(torch.LongTensor, sequences[:, : length + i])
            row = processors(text, cast(torch.FloatTensor, raw[i].clone()))
            ended = torch.tensor([n <= i for n in lengths], device=row.device)
            processed += (row.masked_fill(ended[:, None], 0.0),)
    fields: dict[str, Any] = {"scores": processed if scores else None, "logits": raw if logits else None}
    return GenerateDecoderOnlyOutput(sequences=cast(torch.LongTensor, sequences), **fields)
