"""Speculative decoding: a draft proposes K tokens, the target scores them in one forward, one kernel accepts some."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from transformers import LogitsProcessor, PreTrainedModel

from specdec_kernels import Rule, SamplingParams

from .checks import read_count, refuse
from .drafters.adaptive_lengths import Learned, learned
from .drafters.draft_length import DEFAULT_DRAFTS, AdaptiveDrafts, most_drafts
from .drafters.heads import HeadDrafter
from .drafters.model import ModelDrafter, model_drafter
from .drafters.protocol import Drafter
from .drafters.step_times import StepTimes
from .loop import saved_costs
from .loop.arguments import read_entries
from .loop.batch import Batch, BatchConfig
from .loop.collect import collect
from .loop.cuda_graphs import StepGraphs
from .loop.sequence import Entry
from .loop.token_log_probs import read_asked
from .loop.typical import TYPICAL, Typical
from .models.cache_plan import CacheBudget, plan_caches
from .models.cached_model import CachedModel
from .models.free_memory import free_memory
from .models.supported import cached_model, why_no_trees
from .prompts import TokenIds, check_room, join, read_eos, read_pad, read_prompts, repeated
from .result import Emission, GenerationResult
from .sampling.params import read_rule
from .stopping import Stopping


class SpeculativeDecoder:
    """Generates text with exactly the distribution of ``target``, with several tokens per target forward.

    Args:
        target: a decoder-only transformers causal LM in evaluation mode, quantised or not, or a ``peft`` model around
            one. The adapters that are active when ``generate`` is called are used.
        draft: a smaller causal LM with the same vocabulary, of any dtype; a :class:`~specdec.drafters.Drafter`, such
            as a head (:func:`~specdec.load_head`); or None for plain decoding with the same loop. A drafter that fails
            is dropped with a RuntimeWarning, and decoding continues without drafts.
        num_drafts: K, drafted tokens a step, >= 0 (0 is plain decoding), or :class:`AdaptiveDrafts` to choose it. By
            default it is chosen where no text depends on it (greedy, or rule ``coupled``), and 4 elsewhere, so that a
            seed gives the same text every time.
        backend: the kernels' backend, as in ``specdec_kernels``: "auto", "reference", "cpu", "triton" or "cuda".
        d2t: for a draft model whose *output* covers only a part of the target's vocabulary (EAGLE-3, arXiv 2503.01840;
            FR-Spec, arXiv 2502.14856): the target's id of each column of the draft's logits, ascending. The draft's
            embedding must cover the whole vocabulary, since it is fed the target's tokens. Where target and draft pad
            the vocabulary of one tokenizer to different sizes, pass ``range(len(tokenizer))``: later columns are then
            never drafted.
        confidence: for a draft model: a token to which it gives a smaller probability than this is the last draft of
            its sequence in that step. The token itself is still verified. From 0 (off) to below 1.
        graph_bytes: memory for CUDA graphs on an NVIDIA GPU; 0 turns them off. A step is captured when its shape
            occurs for the second time, and replayed from then on. Steps with penalties, bias, processors, confidence,
            or a drafter that is neither a model nor a head run without graphs.
        cache_dtype: keys and values of the target and of a draft model are rounded to this dtype if they are wider.
            The distribution is then that of the target with such a cache. None stores them in the dtype in which the
            model computes them; if that is narrower than the dtype of its hidden states (autocast), ``generate``
            raises.
        tree: N, the nodes of a tree of drafts that each step verifies, >= 1; None: chains. ``draft`` must be a drafter
            that proposes trees. ``num_drafts`` is then the most nodes of a path. For a target that cannot be fed a
            tree, a RuntimeWarning says why, and each step drafts the chain that the drafter likes best.
        compile: whether decoding forwards of the target, and of a draft model or a drafter's model, go through
            ``torch.compile``, as one graph for all lengths. The first forwards can then take minutes.

    Raises:
        ValueError: names the argument, what was given and what is allowed. A model that the loop cannot drive
            is refused by the name of its type (``specdec.models.supported``). With ``compile``, the first forward of a
            model that torch.compile cannot take as one graph raises; the model never runs uncompiled instead.
    """

    def __init__(
        self,
        target: PreTrainedModel,
        draft: PreTrainedModel | Drafter | None,
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
        self._max_lengths = {"target": self.target.max_length}
        self._learned: dict[int, Learned] = {}  # by the number of rows of a step
        if not 0 <= confidence < 1:
            refuse("confidence", confidence, "a number from 0 (off) to below 1")
        for name, value in (("d2t", d2t), ("confidence", confidence or None)):
            if value is not None and (draft is None or isinstance(draft, Drafter)):
                refuse(name, f"a value with draft={type(draft).__name__}", "one with a model")
        self.drafter: Drafter | None
        if draft is None or isinstance(draft, Drafter):
            self.drafter = draft
            if compile and isinstance(model := getattr(draft, "model", None), CachedModel):
                compiled: Any = copy.copy(draft)  # the caller's drafter stays uncompiled
                compiled.model, self.drafter = model.compiled(), compiled
        else:
            self.drafter = model_drafter(draft, self.target, d2t, confidence, cache_dtype, compile)
        if isinstance(self.drafter, HeadDrafter):
            self.drafter.check_target(self.target)
        if isinstance(self.drafter, ModelDrafter):
            self._max_lengths["draft"] = self.drafter.model.max_length
        self._takes_trees = tree is not None
        self.nodes = 0 if tree is None else self._read_tree(tree)

    def _read_tree(self, tree: int) -> int:
        """Returns how many nodes a step verifies; 0 if the target takes no trees."""
        read_count("tree", tree, 1)
        if not getattr(self.drafter, "proposes_trees", False):
            kind = self.drafter.model.kind if isinstance(self.drafter, HeadDrafter) else type(self.drafter).__name__
            refuse("tree", f"{tree} with draft={kind}", "None, or a drafter that proposes trees")
        if confidence := getattr(self.drafter, "confidence", 0.0):
            refuse("confidence", f"{confidence} with tree={tree}", "0")
        if isinstance(self.drafter, HeadDrafter):
            self.drafter.check_tree(tree, self.most_drafts)
        models = {"target": self.target, "draft": getattr(self.drafter, "model", None)}
        for name, model in models.items():
            if isinstance(model, CachedModel) and (why := why_no_trees(model)) is not None:
                kind = model.config.model_type
                told = f"tree: got {tree}, but a {name} of model type {kind!r} {why}"
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
        on_emit: Callable[[Emission], None] | None = None,
        *,
        rule: str | Typical | None = None,
        logit_bias: Mapping[int, float] | Sequence[Mapping[int, float] | None] | None = None,
        banned_tokens: Sequence[int] | Sequence[Sequence[int]] | None = None,
        min_new_tokens: int | Sequence[int] | torch.Tensor = 0,
        logits_processor: Sequence[LogitsProcessor] | Sequence[Sequence[LogitsProcessor]] | None = None,
        log_probs: bool = False,
        output_logits: bool = False,
        compact_q: int = 0,
        num_return_sequences: int = 1,
        stop: Stopping | None = None,
        processor_prompts: Sequence[Sequence[int]] | None = None,
        top_log_probs: int | None = None,
        prompt_log_probs: int | None = None,
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
            pad_token_id: fills ``result.sequences`` after a sequence's end; None takes that of the target's
                configuration.
            on_emit: called for every live sequence after each step with the tokens that it emitted.
            rule: "token", "block" or "coupled" (``specdec_kernels.Rule``); None: "token", and "coupled" for trees. The
                other two need a drafter that samples its trees. With "coupled" the text depends only on the target and
                the seed: it is the text of K = 0, whatever the draft. "typical", for trees only, or a
                :class:`~specdec.loop.typical.Typical`, is **lossy**: sampled texts do not have the target's
                distribution.
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
            compact_q: k' > 0 restricts the draft to its k' most likely tokens, and stores q as their ids and
                log-probabilities: [B, K, k'] numbers instead of the draft's logits. Not with trees.
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

        Returns:
            GenerationResult. A sequence whose target logits define no distribution ends there, with its status.

        Raises:
            ValueError: names the argument, what was given and what is allowed. Raised before anything is allocated if
                a prompt with ``max_new_tokens`` does not fit the positions of target or draft, or if the caches do not
                fit the free memory.
        """
        device, vocab_size = self.target.device, self.target.vocab_size
        prompts = read_prompts(input_ids, attention_mask, vocab_size)
        read_count("max_new_tokens", max_new_tokens)
        for name, max_length in self._max_lengths.items():
            check_room(prompts, max_new_tokens, name, max_length)
        eos = read_eos(eos_token_id, self.target.model)
        pad = read_pad(pad_token_id, eos, self.target.model)
        asked = read_asked(log_probs, top_log_probs, prompt_log_probs)
        entries = read_entries(
            self.target,
            prompts,
            max_new_tokens,
            params,
            seed,
            eos,
            stop,
            logit_bias=logit_bias,
            banned_tokens=banned_tokens,
            min_new_tokens=min_new_tokens,
            logits_processor=logits_processor,
            most_drafts=self.most_drafts,
            processor_prompts=processor_prompts,
            copies=num_return_sequences,
            asked=asked,
        )
        records, accept_rule = [entry.record for entry in entries], self.read_rule(rule, compact_q)
        for entry in entries:
            self.check_entry(entry, accept_rule)
        longest = max(map(len, prompts), default=0) + max_new_tokens
        if entries:
            self.plan_caches(len(entries), longest, step=self.target.slot_step)
        config = self.batch_config(
            len(entries),
            self.target.capacity(longest, self._tree_slots),
            accept_rule,
            compact_q,
            max_eos=len(eos),
            logits=output_logits,
        )
        with torch.inference_mode():
            # Captured steps all have the same shape.
            batch = Batch(dataclasses.replace(config, steady=config.graphs is not None))
            scores_prompts = asked.prompt is not None
            if entries and (max_new_tokens > 0 or scores_prompts):
                self.target.prefill(
                    batch.generation.target_cache,
                    [record.text[:-1] for record in records],
                    (lambda i, *fed: records[i].score_prompt(*fed)) if scores_prompts else None,
                )
                batch.stopwatch.lap("prefill")
            if entries and max_new_tokens > 0:
                batch.admit(dict(enumerate(entries)))
            while batch.live:
                for emission in batch.step():
                    if on_emit is not None:
                        on_emit(emission)
                if (error := next((r.error for r in records if r.error), None)) is not None:
                    raise error
            for row, record in enumerate(batch.rows):
                if record is not None:
                    batch.release(row)
        if isinstance(input_ids, torch.Tensor):
            input_ids = input_ids.repeat_interleave(num_return_sequences, 0)
        prompts = repeated(prompts, num_return_sequences)
        sequences = join(input_ids, prompts, [r.tokens for r in records], pad, device)
        return collect(batch, records, sequences, asked, self.costs_of(len(entries)))

    def batch_config(
        self,
        size: int,
        capacity: int,
        rule: Rule | Typical,
        compact_q: int,
        max_eos: int,
        *,
        logits: bool = False,
    ) -> BatchConfig:
        """Returns the configuration of a batch of ``size`` rows with ``capacity`` slots each, for this decoder's
        models, drafter, K and backend.

        Args:
            max_eos: the largest number of end-of-sequence tokens of one sequence.
        """
        return BatchConfig(
            target=self.target,
            drafter=self.drafter,
            num_drafts=self.num_drafts,
            size=size,
            capacity=capacity,
            rule=Rule.COUPLED if isinstance(rule, Typical) else rule,
            compact_q=compact_q,
            backend=self.backend,
            max_eos=max_eos,
            learned=self._learned_of if isinstance(self.num_drafts, AdaptiveDrafts) else None,
            logits=logits,
            graphs=StepGraphs(self.graph_bytes) if self._on_graphs else None,
            nodes=self.nodes,
            typical=rule if isinstance(rule, Typical) else None,
        )

    def read_rule(self, rule: str | Typical | None, compact_q: int) -> Rule | Typical:
        """Returns the rule of a batch: by default ``coupled`` with trees, since every drafter that proposes them can do
        that, and ``token`` otherwise.

        Raises:
            ValueError: it is unknown, or cannot be combined with ``compact_q``, or with trees of this drafter.
        """
        if rule == TYPICAL or isinstance(rule, Typical):
            if not self.nodes:
                refuse("rule", f"{rule!r} without a tree", "'token', 'block' or 'coupled'")
            read_rule(Rule.COUPLED, compact_q)
            return rule if isinstance(rule, Typical) else Typical()
        known = read_rule(rule or (Rule.COUPLED if self._takes_trees else Rule.TOKEN), compact_q)
        if self._takes_trees and compact_q:
            refuse("compact_q", f"{compact_q} with a tree", "0")
        if self._takes_trees and known != Rule.COUPLED and not getattr(self.drafter, "samples_trees", False):
            given = f"{rule!r} with a tree of {type(self.drafter).__name__}"
            refuse("rule", given, "'coupled', or a drafter that samples trees")
        return known

    def check_entry(self, entry: Entry, rule: Rule | Typical) -> None:
        """Raises ValueError for a sequence with settings that this rule does not know."""
        penalised = any(entry.params[name] != SamplingParams.neutral(name) for name in SamplingParams.PENALTIES)
        if isinstance(rule, Typical) and (penalised or entry.bias or entry.min_new_tokens):
            refuse("rule", "'typical' with penalties, bias, bans or min_new_tokens", "none of these, or an exact rule")

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
        costs = {"target": self.target.slot_bytes()}
        draft_cost = getattr(self.drafter, "slot_bytes", None)
        if self.most_drafts > 0 and draft_cost is not None:
            # A drafter that fails here will also fail when its session starts, and is dropped there.
            with suppress(Exception):
                costs["draft"] = draft_cost()
        return plan_caches(
            rows,
            max_length,
            cache_tokens,
            cache_bytes,
            slot_bytes={name: cost for name, cost in costs.items() if cost},
            positions=self._max_lengths,
            free_memory=lambda: free_memory(self.target.device),
            step=step,
            nodes=self._tree_slots,
        )

    @property
    def _tree_slots(self) -> int:
        """How many slots after a text the caches need for a tree: a drafter may look at more nodes than it proposes."""
        own = getattr(self.drafter, "tree_slots", None)
        return max(self.nodes, own(self.nodes, self.most_drafts)) if self.nodes and own is not None else self.nodes

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
        if isinstance(self.num_drafts, AdaptiveDrafts) and self.num_drafts.costs is not None:
            return list(self.num_drafts.costs)
        known = self._learned.get(batch_size)
        if known is None or known.times.missing is not None:
            return None
        return [round(known.times.of(k), 2) for k in range(self.most_drafts + 1)]

    def save_costs(self, path: str | Path, seconds: Mapping[int, Mapping[int, float]] | None = None) -> None:
        """Writes step times to a file, which may hold those of other models and machines as well.

        Args:
            path: of the file.
            seconds: of steps, by the number of rows and by K; None: what this decoder has learned.

        Raises:
            ValueError: there is a file that this method did not write.
            OSError: it cannot be written.
        """
        if seconds is None:
            seconds = {size: known.times.seconds for size, known in self._learned.items()}
        saved_costs.save(path, self._described(), {size: times for size, times in seconds.items() if times})

    def load_costs(self, path: str | Path, *, sampled: bool = False) -> bool:
        """Takes over step times from a file that ``save_costs`` wrote, if it has any of the same models, drafter,
        device, dtypes, threads and version of torch, or else any of these models on any CPU. They are corrected by the
        steps that follow.

        Args:
            path: of the file.
            sampled: whether the times of one sequence, as they are in the file, also become ``sampled`` of
                :class:`AdaptiveDrafts`: where a text depends on K, each sequence then has its own K, a function of the
                file and of its drafts. So a seeded text is the same in every process, and in any company.

        Returns:
            Whether it had any. A file that does not exist has none.

        Raises:
            ValueError: K is fixed or has given ``costs``, or the file is not one that ``save_costs`` wrote.
        """
        if not isinstance(self.num_drafts, AdaptiveDrafts) or self.num_drafts.costs is not None:
            refuse("load_costs", f"num_drafts={self.num_drafts}", "AdaptiveDrafts() without costs")
        anywhere = saved_costs.described_anywhere(self.target, self.drafter, self.nodes)
        found = saved_costs.load(path, self._described(), anywhere)
        for size, seconds in found.items():
            self._learned_of(size).times.take(seconds)
        if sampled and 1 in found:
            times = StepTimes(range(self.most_drafts + 1))
            times.take(found[1])
            if times.missing is None:
                costs = tuple(round(cost, 3) for cost in times.relative)
                self.num_drafts = dataclasses.replace(self.num_drafts, sampled=costs)
        return bool(found)

    def _described(self) -> dict[str, object]:
        return saved_costs.described(self.target, self.drafter, self.backend, self.nodes)

    def _learned_of(self, size: int) -> Learned:
        assert isinstance(self.num_drafts, AdaptiveDrafts)
        return self._learned.setdefault(size, learned(self.num_drafts, few=self._on_graphs))

    @property
    def _on_graphs(self) -> bool:
        return self.target.device.type == "cuda" and torch.version.cuda is not None and self.graph_bytes > 0
