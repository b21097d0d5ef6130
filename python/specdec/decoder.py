"""Speculative decoding: a draft proposes K tokens, the target reads them in one forward, one kernel accepts some."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import torch
from transformers import LogitsProcessor, PreTrainedModel

from specdec_kernels import Rule, SamplingParams

from .checks import for_each, read_count, refuse
from .drafters.model import model_drafter
from .drafters.predicted import PredictedDrafter
from .drafters.protocol import Drafter
from .drafters.suffix import SuffixDrafter
from .loop.batch import Batch, BatchConfig
from .loop.copied_length import CopiedK
from .loop.draft_length import DEFAULT_DRAFTS, AdaptiveDrafts, AdaptiveK, FixedK, most_drafts
from .loop.graphs import StepGraphs
from .loop.prefixes import PrefixReuse
from .loop.sequence import Output, Request
from .loop.sequence import Sequence as SequenceState
from .loop.step import AcceptRule
from .models.cache_plan import CacheBudget, plan_caches
from .models.supported import cached_model, why_no_trees
from .prompts import TokenIds, check_room, join, read_eos, read_pad, read_prompts, read_seeds
from .result import FinishReason, GenerationResult
from .sampling.grammar import Grammar, GrammarCompiler
from .sampling.grammar_masks import GrammarError
from .sampling.params import split_params
from .stats import Stats
from .stopping import StoppingCriteria

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Decoded(NamedTuple):
    """What became of requests."""

    sequences: list[SequenceState]
    stats: Stats  # of all together
    drafter_error: str | None  # why the drafter was dropped; None: it was not dropped


class SpeculativeDecoder:
    """Generates text with exactly the distribution of ``target``, with several tokens per target forward.

    Args:
        target: a decoder-only transformers causal LM in evaluation mode, quantised or not, or a ``peft`` model around
            one. The adapters that are active when ``generate`` is called are used.
        draft: a smaller causal LM with the same vocabulary, of any dtype; a :class:`~specdec.drafters.Drafter`, such
            as a head (:func:`~specdec.load_head`); or None: a ``SuffixDrafter``, which needs no model. A drafter that
            fails is dropped, with its error in the log, and decoding continues without drafts.
        num_drafts: K, drafted tokens a step, >= 0 (0 is plain decoding in the same loop), or :class:`AdaptiveDrafts` to
            choose it. By default it is chosen where no text depends on it (greedy, or rule ``coupled``), and 4
            elsewhere, so that a seed gives the same text every time.
        backend: the kernels' backend, as in ``specdec_kernels``: "auto", "reference", "cpu", "triton" or "cuda".
        d2t: for a draft model whose *output* covers only a part of the target's vocabulary (EAGLE-3, arXiv 2503.01840;
            FR-Spec, arXiv 2502.14856): the target's id of each column of the draft's logits, ascending. The draft's
            embedding must cover the whole vocabulary, since it is fed the target's tokens. Where target and draft pad
            the vocabulary of one tokenizer to different sizes, pass ``range(len(tokenizer))``: later columns are then
            never drafted.
        confidence: for a draft model, from 0 (off) to below 1. A sequence's drafting ends, in each step, with the first
            token to which the model gives a smaller probability. The token itself is still verified.
        graph_bytes: memory for CUDA graphs on an NVIDIA GPU; 0 turns them off. A step is captured when its shape
            occurs for the second time, and replayed from then on. Steps with penalties, bias, processors, confidence,
            a drafter that is neither a model nor a head, or a target over several GPUs run without graphs.
        cache_dtype: keys and values of the target and of a draft model are rounded to this dtype if they are wider.
            The distribution is then that of the target with such a cache. None stores them in the dtype in which the
            model computes them; if that is narrower than the dtype of its hidden states (autocast), ``generate``
            raises.
        tree: N, the nodes of a tree of drafts that each step verifies, >= 1; None: chains. ``draft`` must be a drafter
            that proposes trees. ``num_drafts`` is then the most nodes of a path. For a target that cannot be fed a
            tree, a RuntimeWarning says why, and each step drafts the chain that the drafter likes best.
        compile: whether decoding forwards of the target, and of a draft model or a drafter's model, go through
            ``torch.compile``, as one graph for all lengths, on a GPU. The first forwards can then take minutes.

    Raises:
        ValueError: names the argument, what was given and what is allowed. A model that the loop cannot drive
            is refused by the name of its type (``specdec.models.supported``). With ``compile``, the first forward of a
            model that torch.compile cannot take as one graph raises; the model never runs uncompiled instead.

    Example:
        >>> from specdec import PromptLookupDrafter, SpeculativeDecoder, load_embedded_pair
        >>> target, draft, tokenizer = load_embedded_pair()
        >>> prompt = tokenizer("import os").input_ids
        >>> plain = SpeculativeDecoder(target, num_drafts=0).generate([prompt], max_new_tokens=32)
        >>> for drafter in (draft, PromptLookupDrafter()):
        ...     result = SpeculativeDecoder(target, drafter, num_drafts=4).generate([prompt], max_new_tokens=32)
        ...     assert result.tokens == plain.tokens and result.stats.steps <= plain.stats.steps
    """

    def __init__(
        self,
        target: PreTrainedModel,
        draft: PreTrainedModel | Drafter | None = None,
        num_drafts: int | AdaptiveDrafts = DEFAULT_DRAFTS,
        backend: str = "auto",
        d2t: torch.Tensor | Sequence[int] | None = None,
        confidence: float = 0.0,
        graph_bytes: int = 2 << 30,
        cache_dtype: torch.dtype | None = None,
        compile: bool = False,
        tree: int | None = None,
    ):
        if not isinstance(num_drafts, AdaptiveDrafts):
            read_count("num_drafts", num_drafts)
        self.num_drafts, self.backend = num_drafts, backend
        self.graph_bytes = read_count("graph_bytes", graph_bytes)
        self.target = cached_model(target, "target", cache_dtype, compile)
        if not 0 <= confidence < 1:
            refuse("confidence", confidence, "a number from 0 (off) to below 1")
        for name, value in (("d2t", d2t), ("confidence", confidence or None)):
            if value is not None and (draft is None or isinstance(draft, Drafter)):
                refuse(name, f"a value with draft={type(draft).__name__}", "one with a model")
        # Whatever a suffix drafter proposes, ``coupled`` accepts as many of it as ``token``, and lets K adapt.
        self._default_rule = Rule.COUPLED if draft is None or tree is not None else Rule.TOKEN
        if draft is None and self.most_drafts > 0:
            draft = SuffixDrafter()
        self.drafter: Drafter | None
        if draft is None or isinstance(draft, Drafter):
            self.drafter = draft.compiled() if compile and draft is not None else draft
        else:
            self.drafter = model_drafter(draft, self.target, d2t, confidence, cache_dtype, compile)
        self._max_lengths = {"target": self.target.max_length}
        if self.drafter is not None:
            self._max_lengths["draft"] = self.drafter.max_length
        self._asked_for_trees = tree is not None
        self.nodes = 0 if tree is None else self._read_tree(tree)
        if self.drafter is not None:
            self.drafter.check(self.target, tree or 0, self.most_drafts)
        self._lengths: FixedK
        if isinstance(num_drafts, AdaptiveDrafts):
            copies = self.drafter is not None and self.drafter.copies and not self.nodes
            self._lengths = CopiedK(num_drafts) if copies else AdaptiveK(num_drafts, few=self._on_graphs)
        else:
            self._lengths = FixedK(num_drafts)

    def _read_tree(self, tree: int) -> int:
        """Returns how many nodes a step verifies; 0 if the target takes no trees."""
        read_count("tree", tree, 1)
        if self.drafter is None or not self.drafter.trees:
            given = "None" if self.drafter is None else self.drafter.name
            refuse("tree", f"{tree} with draft={given}", "None, or a drafter that proposes trees")
        for name, model in (("target", self.target), ("draft", self.drafter.model)):
            if model is not None and (why := why_no_trees(model, grown=name == "draft")) is not None:
                told = f"tree: got {tree}, but a {name} of model type {model.config.model_type!r} {why}"
                warnings.warn(f"{told}; each step drafts one chain instead", RuntimeWarning, stacklevel=3)
                return 0
        return tree

    def generate(
        self,
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
        prompts = read_prompts(input_ids, attention_mask, self.target.vocab_size)
        read_count("max_new_tokens", max_new_tokens)
        eos = read_eos(eos_token_id, self.target.model)
        pad = read_pad(pad_token_id, eos, self.target.model)
        copies = read_count("num_return_sequences", num_return_sequences, 1)
        size, no_processors = len(prompts), logits_processor is None or len(logits_processor) == 0
        one_list = no_processors or not all(isinstance(own, Sequence) for own in logits_processor or ())
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
        requests = []
        for row in zip(*columns.values(), strict=True):
            own = dict(zip(columns, row, strict=True))
            for copy in range(copies):
                request = Request(
                    **{**own, "seed": next_seed(own["seed"], copy)},
                    max_new_tokens=max_new_tokens,
                    eos_token_id=list(eos),
                    stop=stop,
                    log_probs=log_probs,
                    top_log_probs=top_log_probs,
                    prompt_log_probs=prompt_log_probs,
                )
                requests.append(request)
        decoded = self.decode(requests, rule, on_emit, output_logits=output_logits)
        if isinstance(input_ids, torch.Tensor):
            input_ids = input_ids.repeat_interleave(copies, 0)
        prompts, device = [p for p in prompts for _ in range(copies)], self.target.device
        whole = join(input_ids, prompts, [s.tokens for s in decoded.sequences], pad, device)
        return self._result(decoded, whole, output_logits)

    def decode(
        self,
        requests: Sequence[Request],
        rule: str | AcceptRule | None = None,
        on_emit: Callable[[Output], None] | None = None,
        *,
        output_logits: bool = False,
    ) -> Decoded:
        """Decodes all requests in one batch, as ``generate`` does, which explains the other arguments. Requests may
        differ in every setting.

        Raises:
            ValueError: as ``generate``. Any exception that ended a sequence is raised again, but for a
                :class:`~specdec.sampling.grammar_masks.GrammarError`, which ends the sequence of that grammar alone.
        """
        sequences = [SequenceState.of(i, r, self.target, self.most_drafts) for i, r in enumerate(requests)]
        accept_rule = self.read_rule(rule)
        for sequence in sequences:
            for name, max_length in self._max_lengths.items():
                check_room([sequence.text], sequence.room, name, max_length)
            self.check(sequence, accept_rule)
        longest = max((sequence.slots for sequence in sequences), default=1)  # a cache without rows has slots, too
        if sequences:
            self.plan_caches(len(sequences), longest, step=self.target.slot_step)
        config = self.batch_config(
            len(sequences),
            self.target.capacity(longest, self._tree_slots),
            accept_rule,
            max_eos=max((len(sequence.eos) for sequence in sequences), default=0),
            logits=output_logits,
        )
        with torch.inference_mode():
            batch = Batch(config)
            if any(s.room > 0 or s.request.prompt_log_probs is not None for s in sequences):
                batch.add(dict(enumerate(sequences)))
                batch.prefill()
            while batch.live:
                for output in batch.step():
                    if on_emit is not None:
                        on_emit(output)
                errors = (s.exception for s in sequences)
                if (error := next((e for e in errors if e and not isinstance(e, GrammarError)), None)) is not None:
                    raise error
            batch.release()
        stats = Stats.total((s.stats for s in sequences), self.most_drafts)
        stats.target_forwards, stats.draft_forwards = batch.steps, batch.draft_forwards
        stats.seconds = batch.timer.with_total()
        return Decoded(sequences, stats, None if batch.session is None else batch.session.error)

    def check(self, sequence: SequenceState, rule: AcceptRule) -> None:
        """Raises ValueError for a sequence with settings that the rule, or trees, cannot have."""
        rule.check(sequence)
        if sequence.request.grammar is not None and self.nodes:
            refuse("grammar", f"one with tree={self.nodes}", "None, or a decoder without a tree")

    def grammar_compiler(self, tokenizer: PreTrainedTokenizerBase) -> GrammarCompiler:
        """Returns what compiles grammars for the target, which is worth keeping.

        Args:
            tokenizer: the target's.

        Raises:
            ValueError: names the argument, or the package that is missing: ``specdec-kernels[grammar]``.
        """
        return GrammarCompiler(tokenizer, self.target.vocab_size, read_eos(None, self.target.model))

    def _result(self, decoded: Decoded, whole: torch.Tensor, output_logits: bool) -> GenerationResult:
        sequences = decoded.sequences
        none = torch.empty(0, self.target.vocab_size, device=self.target.device)

        def given(values: list) -> list | None:
            return None if any(value is None for value in values) else values

        return GenerationResult(
            whole,
            tokens=[s.tokens for s in sequences],
            produced_by=[s.produced_by for s in sequences],
            status=[s.status for s in sequences],
            # With no new tokens wanted, none has begun.
            finish_reason=[s.finish_reason or FinishReason.LENGTH for s in sequences],
            errors=[s.error for s in sequences],
            stats=decoded.stats,
            sequence_stats=[s.stats for s in sequences],
            log_probs=given([s.log_probs for s in sequences]),
            raw_log_probs=given([s.raw_log_probs for s in sequences]),
            top_log_probs=given([s.top_log_probs for s in sequences]),
            prompt_log_probs=given([s.prompt_log_probs for s in sequences]),
            logits=[torch.stack(s.logits) if s.logits else none for s in sequences] if output_logits else None,
            drafter_error=decoded.drafter_error,
            step_costs=self.costs_of(len(sequences)),
        )

    def batch_config(
        self,
        size: int,
        capacity: int,
        rule: AcceptRule,
        max_eos: int,
        *,
        logits: bool = False,
        async_scheduling: bool = False,
        prefill_chunk: int | None = None,
        prefix_reuse: PrefixReuse = PrefixReuse.OFF,
    ) -> BatchConfig:
        """Returns the settings of a batch of ``size`` rows with ``capacity`` slots each, for this decoder's models,
        drafter, K and backend. The other arguments are those of ``BatchConfig``."""
        return BatchConfig(
            target=self.target,
            drafter=self.drafter,
            num_drafts=self._lengths,
            rule=rule,
            size=size,
            capacity=capacity,
            max_eos=max_eos,
            backend=self.backend,
            nodes=self.nodes,
            logits=logits,
            async_scheduling=async_scheduling,
            graphs=StepGraphs(self.graph_bytes) if self._on_graphs else None,
            prefill_chunk=prefill_chunk,
            prefix_reuse=prefix_reuse,
        )

    def read_rule(self, rule: str | AcceptRule | None) -> AcceptRule:
        """Returns the rule of a batch: by default ``coupled`` with trees, since every drafter that proposes them can do
        that, and without a draft; ``token`` otherwise.

        Raises:
            ValueError: it is unknown, or cannot be combined with trees of this drafter, or with chains.
        """
        if isinstance(rule, AcceptRule):
            read = rule
        else:
            read = AcceptRule(Rule(rule or self._default_rule))
        if read.trees_only and not self.nodes:
            refuse("rule", f"{rule!r} without a tree", "'token', 'block' or 'coupled'")
        drafter = self.drafter
        if self._asked_for_trees and read.rule != Rule.COUPLED and drafter is not None and not drafter.samples_trees:
            given = f"{str(read.rule)!r} with a tree of {type(drafter).__name__}"
            refuse("rule", given, "'coupled', or a drafter that samples trees")
        return read

    @property
    def predicts(self) -> bool:
        """Whether requests may have predictions."""
        return isinstance(self.drafter, PredictedDrafter)

    def plan_caches(
        self,
        rows: int | None,
        max_length: int | None,
        cache_tokens: int | None = None,
        cache_bytes: int | None = None,
        step: int = 1,
    ) -> CacheBudget:
        """Plans the caches of target and draft within a budget and the free memory, without allocating them. The
        arguments are those of ``specdec.models.cache_plan.plan_caches``.

        Raises:
            ValueError: names the argument, what was given, and the numbers that are allowed.
        """
        costs, window = {"target": self.target.slot_bytes()}, max(self.most_drafts, self.nodes) + 1
        row_bytes = self.target.row_bytes(window)
        if self.most_drafts > 0 and self.drafter is not None:
            # A drafter that fails here will also fail when its session starts, and is dropped there.
            with suppress(Exception):
                costs["draft"] = self.drafter.cache_bytes()
                row_bytes += self.drafter.row_bytes(self.most_drafts)
        return plan_caches(
            rows,
            max_length,
            cache_tokens,
            cache_bytes,
            slot_bytes={name: cost for name, cost in costs.items() if cost},
            positions=self._max_lengths,
            free_memory=self.target.free_memory,
            step=step,
            nodes=self._tree_slots,
            row_bytes=row_bytes,
            beside=functools.partial(self.target.bytes_beside_caches, tokens=window),
        )

    @property
    def _tree_slots(self) -> int:
        """How many slots after a text the caches need for a tree: a drafter may look at more nodes than it proposes."""
        if not self.nodes or self.drafter is None:
            return 0
        return max(self.nodes, self.drafter.tree_slots(self.nodes, self.most_drafts))

    @property
    def max_length(self) -> int | None:
        """The most tokens of a prompt and its text: the positions of target or draft model, whichever has fewer. None:
        neither says how many it has."""
        return min((length for length in self._max_lengths.values() if length is not None), default=None)

    @property
    def most_drafts(self) -> int:
        """The largest K."""
        return most_drafts(self.num_drafts)

    def costs_of(self, batch_size: int) -> list[float] | None:
        """Returns the step times T(0), T(1), ... of batches of this size, in units of T(0), rounded to hundredths; None
        if they are not known yet, or K is fixed."""
        return self._lengths.costs(batch_size)

    @property
    def _on_graphs(self) -> bool:
        on_cuda = self.target.device.type == "cuda" and torch.version.cuda is not None
        return on_cuda and self.graph_bytes > 0 and not self.target.is_sharded


def next_seed(seed: int, further: int) -> int:
    """The seed of a further text of a prompt; after the largest comes the smallest."""
    return (seed + further + 2**63) % 2**64 - 2**63
