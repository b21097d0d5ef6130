"""At home in transformers: ``model.generate(**inputs, custom_generate=specdec.speculate(draft_model))``."""

from __future__ import annotations

import inspect
import threading
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation import EosTokenCriteria, GenerateDecoderOnlyOutput, MaxLengthCriteria

from specdec_kernels import Rule, Status

from ..checks import read_count, refuse
from ..decoder import SpeculativeDecoder
from ..drafters.draft_length import AdaptiveDrafts
from ..drafters.protocol import Drafter
from ..result import Emission, GenerationResult
from ..stopping import Stopping, StopStrings
from .assistance import Assistance, read_assistance
from .convert_processors import read_arguments
from .criteria import AnyStopping, CriteriaStopping
from .generate_call import generate_call
from .generation_config import check_fields

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase
    from transformers.generation.streamers import BaseStreamer


def speculate(
    draft_model: PreTrainedModel | None = None,
    *,
    drafter: Drafter | None = None,
    num_drafts: int | AdaptiveDrafts | None = None,
    rule: str = "token",
    seed: int | Sequence[int] | torch.Tensor | None = None,
    streamer: BaseStreamer | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    stop_strings: str | Sequence[str] | None = None,
    draft_tokenizer: PreTrainedTokenizerBase | None = None,
    confidence: float | None = None,
    d2t: torch.Tensor | Sequence[int] | None = None,
    compact_q: int = 0,
    backend: str = "auto",
) -> Speculator:
    """A callable for ``model.generate(**inputs, custom_generate=...)``: the text has the distribution that ``generate``
    itself would sample from, and is its text where that is greedy. Batches, ``num_return_sequences``, processors,
    criteria and nearly all of ``GenerationConfig`` work as they do there (docs/transformers.md).

    Args:
        draft_model: a smaller causal LM. With no drafter at all the configuration can name one
            (``prompt_lookup_num_tokens``, ``assistant_early_exit``); else decoding is plain.
        drafter: another drafter in its place, such as ``PromptLookupDrafter()``.
        num_drafts: K >= 0, or ``AdaptiveDrafts``; None: ``num_assistant_tokens`` where that was set, else 4.
        rule, d2t, compact_q, backend: as in :class:`SpeculativeDecoder`.
        seed: when sampling, a 64-bit integer s: text j of a prompt's ``num_return_sequences`` has s + j; or one for
            each row. None: each row's is drawn from torch's global generator, so ``torch.manual_seed`` decides.
        streamer: gets the prompt [1, P], then the tokens of each step [n] int64, then ``end()``, also after an error.
            For one sequence only. One that ``generate`` is given itself would see the prompt alone, so it is refused.
        tokenizer: the target's, for ``stop_strings`` and ``draft_tokenizer``.
        stop_strings: as ``generate``'s, which does not hand its own on.
        draft_tokenizer: the draft model's, where it is another than the target's.
        confidence: after a token that the draft model holds less likely no more are drafted; None:
            ``assistant_confidence_threshold`` where that was set, else 0 (never).

    Raises:
        ValueError: names the argument, what was given and what is allowed; from ``generate`` also for each of its
            arguments that this cannot honour.
    """
    Rule(rule)  # refuses others
    if draft_model is not None and drafter is not None:
        refuse("drafter", "one beside draft_model", "one of them")
    if num_drafts is not None and not isinstance(num_drafts, AdaptiveDrafts):
        read_count("num_drafts", num_drafts)
    if draft_tokenizer is not None:
        for name, value in (("draft_model", draft_model), ("tokenizer", tokenizer)):
            if value is None:
                refuse(name, "None with draft_tokenizer", "the draft model and the target's tokenizer beside it")
        from ..drafters.universal import UniversalDrafter

        draft_model, drafter = None, UniversalDrafter(draft_model, draft_tokenizer, tokenizer)
    stop = None if stop_strings is None else StopStrings(tokenizer, stop_strings)  # which refuses None
    assistance = Assistance(draft_model if drafter is None else drafter, num_drafts, confidence)
    return Speculator(assistance, rule, seed, streamer, stop, d2t, compact_q, backend)


class _Prepared(NamedTuple):
    """The decoder of a model as it was when it was built."""

    model: PreTrainedModel
    key: tuple
    decoder: SpeculativeDecoder


class _AskedFor:
    """A callable's signature, for which ``generate`` asks while its arguments can still be seen."""

    def __get__(self, speculator: Speculator | None, owner: type) -> inspect.Signature:
        if speculator is None:
            raise AttributeError("__signature__")
        return speculator._signature()


class Speculator:
    """What :func:`speculate` returns. It keeps the decoder of the model that it was last used with.

    Attributes:
        last_result: :class:`GenerationResult` of the last call, with statistics; None before.
    """

    def __init__(
        self,
        assistance: Assistance,
        rule: str,
        seed: int | Sequence[int] | torch.Tensor | None,
        streamer: BaseStreamer | None,
        stop: Stopping | None,
        d2t: torch.Tensor | Sequence[int] | None,
        compact_q: int,
        backend: str,
    ):
        self._assistance, self._rule, self._seed, self._streamer = assistance, rule, seed, streamer
        self._stop, self._d2t, self._compact_q, self._backend = stop, d2t, compact_q, backend
        self._prepared: _Prepared | None = None
        self._calls = threading.local()
        self.last_result: GenerationResult | None = None

    __signature__ = _AskedFor()

    def _signature(self) -> inspect.Signature:
        call = generate_call()
        if call is not None:
            self._calls.given = call.given
            try:
                call.refuse_misplaced()
            except ValueError:
                for streamer in (self._streamer, call.misplaced.get("streamer")):
                    if streamer is not None:
                        streamer.end()
                raise
        return inspect.signature(self.__call__)

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: torch.LongTensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        **model_kwargs: Any,
    ) -> torch.LongTensor | GenerateDecoderOnlyOutput:
        """As ``GenerationMixin.generate`` calls it, with what it has prepared.

        Returns:
            [B, P + new] int64, or ``GenerateDecoderOnlyOutput`` with it where ``return_dict_in_generate`` asks.
        """
        try:
            given = self._calls.__dict__.pop("given", None)
            return self._generate(
                model, input_ids, logits_processor, stopping_criteria, generation_config, model_kwargs, given
            )
        finally:
            if self._streamer is not None:
                self._streamer.end()

    def _generate(
        self,
        model: PreTrainedModel,
        input_ids: torch.LongTensor,
        processors: LogitsProcessorList,
        criteria: StoppingCriteriaList,
        config: GenerationConfig,
        model_kwargs: dict[str, Any],
        given: dict[str, Any] | None,
    ) -> torch.LongTensor | GenerateDecoderOnlyOutput:
        check_fields(config)
        size, length = input_ids.shape
        mask = _read_inputs(input_ids, model_kwargs)
        if self._streamer is not None:
            if size != 1:
                refuse("streamer", f"a batch of {size} sequences", "one sequence")
            self._streamer.put(input_ids.cpu())
        assistance = read_assistance(self._assistance, config, given)
        decoder = self._decoder(model, assistance)
        rows = input_ids.tolist()
        eos = frozenset(i for c in criteria if isinstance(c, EosTokenCriteria) for i in c.eos_token_id.tolist())
        # transformers looks after a token: with no room at all there is still one.
        most = min((c.max_length for c in criteria if isinstance(c, MaxLengthCriteria)), default=None)
        if most is None:
            refuse("stopping_criteria", "no length", "a MaxLengthCriteria among them")
        most = max(most - length, 1)
        arguments = read_arguments(processors, rows, bool(config.do_sample), eos, most, decoder.target.vocab_size)
        stops = [] if self._stop is None else [self._stop]
        if others := [c for c in criteria if not isinstance(c, (EosTokenCriteria, MaxLengthCriteria))]:
            paddings = [row[:n] for row, n in zip(rows, _paddings(mask, size), strict=True)]
            stops.append(CriteriaStopping(others, size, paddings, input_ids.device))
        wants = {name: config.return_dict_in_generate and getattr(config, name) for name in _RECORDED}
        pad = config._pad_token_tensor
        result = decoder.generate(
            input_ids,
            mask,
            most,
            seed=self._seeds(config, size),
            eos_token_id=sorted(eos),
            pad_token_id=0 if pad is None else int(pad),
            on_emit=None if self._streamer is None else self._put,
            rule=self._rule,
            compact_q=self._compact_q,
            output_logits=any(wants.values()),
            stop=AnyStopping(stops) if stops else None,
            **vars(arguments),
        )
        self.last_result = result
        if faults := {b: s & Status.TARGET_FAULTS for b, s in enumerate(result.status) if s & Status.TARGET_FAULTS}:
            names = ", ".join(f"{b}: {status.name}" for b, status in faults.items())
            warnings.warn(f"sequences ended where their logits are no distribution ({names})", RuntimeWarning, 2)
        if not config.return_dict_in_generate:
            return result.sequences
        return _output(result, processors, length, wants["output_scores"], wants["output_logits"])

    def _decoder(self, model: PreTrainedModel, assistance: Assistance) -> SpeculativeDecoder:
        """Made once for a model, as long as nothing about it or the drafts has changed."""
        draft = assistance.draft
        models = [model, draft] if isinstance(draft, PreTrainedModel) else [model]
        state = [(m.device, m.dtype, m.training, m.config._attn_implementation) for m in models]
        key = (assistance, *state)
        if self._prepared is None or self._prepared.model is not model or self._prepared.key != key:
            self._prepared = None  # so that an error leaves nothing behind
            num_drafts, confidence = assistance.num_drafts, assistance.confidence
            arguments = (model, assistance.drafter_for(model), num_drafts, self._backend, self._d2t, confidence)
            self._prepared = _Prepared(model, key, SpeculativeDecoder(*arguments))
        return self._prepared.decoder

    def _seeds(self, config: GenerationConfig, size: int) -> int | list[int] | torch.Tensor | Sequence[int]:
        if not config.do_sample:
            return 0
        if self._seed is None:
            return torch.randint(-(2**63), 2**63 - 1, (size,))
        if isinstance(self._seed, int):  # transformers has repeated the prompts already
            return [self._seed + row % (config.num_return_sequences or 1) for row in range(size)]
        return self._seed

    def _put(self, emission: Emission) -> None:
        self._streamer.put(torch.tensor(emission.tokens))


_RECORDED = ("output_scores", "output_logits")
_HANDLED = {
    "attention_mask",
    "position_ids",
    "past_key_values",
    "use_cache",  # a field of the configuration as well
    "logits_to_keep",
    "return_dict",
}


def _read_inputs(input_ids: torch.LongTensor, model_kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The mask, None where there is no padding. Refuses by name what else the model would be fed."""
    for name, value in model_kwargs.items():
        if name not in _HANDLED and value is not None and value is not False:
            refuse(name, f"a {type(value).__name__}", "None: specdec feeds input_ids and attention_mask alone")
    cache = model_kwargs.get("past_key_values")
    if cache is not None and (cache.get_seq_length() or getattr(cache, "_is_user_defined", False)):
        refuse("past_key_values", f"a {type(cache).__name__}", "None: specdec has its own static cache")
    mask = model_kwargs.get("attention_mask")
    if mask is not None and mask.all():
        mask = None
    if mask is not None and not mask[:, -1].all():
        refuse("attention_mask", "padding on the right", "padding on the left: tokenizer.padding_side='left'")
    positions = model_kwargs.get("position_ids")
    if positions is not None:
        ones = torch.ones_like(input_ids) if mask is None else mask.long()
        expected = ones.cumsum(-1) - 1
        if positions.shape[-1] != expected.shape[-1] or ((positions != expected) & (ones != 0)).any():
            refuse("position_ids", "others than the mask's", "None, or 0, 1, ... from the first token")
    return mask


def _paddings(mask: torch.Tensor | None, size: int) -> list[int]:
    return [0] * size if mask is None else (mask == 0).sum(1).tolist()


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
            row = processors(sequences[:, : length + i], raw[i].clone())
            ended = torch.tensor([n <= i for n in lengths], device=row.device)
            processed += (row.masked_fill(ended[:, None], 0.0),)
    return GenerateDecoderOnlyOutput(
        sequences=sequences, scores=processed if scores else None, logits=raw if logits else None
    )
