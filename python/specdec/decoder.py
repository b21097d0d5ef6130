"""Speculative decoding: a draft proposes K tokens, the target reads them in one forward, one kernel accepts some."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from specdec_kernels import Rule

from .checks import read_count, refuse
from .drafters.composite import Composite
from .drafters.model import model_drafter
from .drafters.predicted import PredictedDrafter
from .drafters.protocol import Drafter
from .drafters.suffix import SuffixDrafter
from .generate import Decoded
from .generate import generate as _generate
from .loop.batch import Batch
from .loop.batch_config import BatchConfig
from .loop.batch_memory import BatchMemory
from .loop.copied_length import CopiedK
from .loop.draft_length import DEFAULT_DRAFTS, AdaptiveDrafts, AdaptiveK, DraftLength, FixedK, most_drafts
from .loop.first_drafts import FirstDrafts
from .loop.graphs import StepGraphs
from .loop.request import Request
from .loop.sequence import Output, SequenceState
from .loop.shared_length import SharedK
from .loop.step import AcceptRule
from .loop.warm_up import warm_up
from .models.cache_plan import CacheBudget
from .models.supported import cached_model, why_no_trees
from .prompts import check_room, read_eos
from .sampling.grammar import GrammarCompiler
from .sampling.grammar_masks import GrammarError


class SpeculativeDecoder:
    """Generates text with exactly the distribution of ``target``, with several tokens per target forward.

    Args:
        target: a decoder-only transformers causal LM in evaluation mode, quantised or not, or a ``peft`` model around
            one. The adapters that are active when ``generate`` is called are used.
        draft: a smaller causal LM with the same tokenizer, of any dtype, which drafts as far as its positions go; a
            :class:`~specdec.drafters.Drafter`, such as a head (:func:`~specdec.load_head`); or None: a
            ``SuffixDrafter``, which needs no model. A drafter that fails is dropped, with its error in the log, and
            decoding continues without drafts.
        num_drafts: K, drafted tokens a step, >= 0 (0 is plain decoding in the same loop), or :class:`AdaptiveDrafts` to
            choose it. By default it is chosen where no text depends on it (greedy, or rule ``coupled``), and 4
            elsewhere, so that a seed gives the same text every time.
        backend: the kernels' backend, as in ``specdec_kernels``: "auto", "reference", "cpu", "triton" or "cuda".
        d2t: for a draft model whose *output* covers only a part of the target's vocabulary (EAGLE-3, arXiv 2503.01840;
            FR-Spec, arXiv 2502.14856): the target's id of each column of the draft's logits, ascending. The draft's
            embedding must cover the whole vocabulary, since it is fed the target's tokens. Where target and draft pad
            the vocabulary of one tokenizer to different sizes, it is ``range(len(tokenizer))``, so that later columns
            are never drafted. That is found if both were loaded from folders, or names on the hub, with that tokenizer;
            of other models it has to be said.
        confidence: for a draft model, from 0 (off) to below 1. A sequence's drafting ends, in each step, with the first
            token to which the model gives a smaller probability. The token itself is still verified.
        draft_window: W >= 2, how many of the last known tokens a draft model sees, beside the first four and its own
            drafts; None: all. It bounds the draft's memory, and its time, in long texts (``docs/decoding.md``).
        graph_bytes: memory for CUDA graphs on an NVIDIA GPU; 0 turns them off. A step is captured when its shape
            occurs for the second time, and replayed from then on. Steps with penalties, bias, processors, confidence,
            ``draft_window``, a drafter that is neither a model nor a head (so a ``Composite``), or a target over
            several GPUs run without graphs.
        cache_dtype: keys and values of the target and of a draft model are rounded to this dtype if they are wider.
            The distribution is then that of the target with such a cache. None stores them in the dtype in which the
            model computes them; if that is narrower than the dtype of its hidden states (autocast), ``generate``
            raises.
        tree: N, the nodes of a tree of drafts that each step verifies, >= 1; None: chains. ``draft`` must be a drafter
            that proposes trees. ``num_drafts`` is then the most nodes of a path. For a target that cannot be fed a
            tree, a RuntimeWarning says why, and each step drafts the chain that the drafter likes best.

    Raises:
        ValueError: names the argument, what was given and what is allowed. A model that the loop cannot drive
            is refused by the name of its type (``specdec.models.supported``).

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
        tree: int | None = None,
        draft_window: int | None = None,
    ):
        if not isinstance(num_drafts, AdaptiveDrafts):
            read_count("num_drafts", num_drafts)
        self.num_drafts, self.backend = num_drafts, backend
        self.graph_bytes = read_count("graph_bytes", graph_bytes)
        self.target = cached_model(target, "target", cache_dtype)
        if not 0 <= confidence < 1:
            refuse("confidence", confidence, "a number from 0 (off) to below 1")
        for name, value in (("d2t", d2t), ("confidence", confidence or None), ("draft_window", draft_window)):
            if value is not None and (draft is None or isinstance(draft, Drafter)):
                refuse(name, f"a value with draft={type(draft).__name__}", "one with a model")
        # Whatever a suffix drafter proposes, ``coupled`` accepts as many of it as ``token``, and lets K adapt.
        self._default_rule = Rule.COUPLED if draft is None or tree is not None else Rule.TOKEN
        if draft is None and self.most_drafts > 0:
            draft = SuffixDrafter()
        self.drafter: Drafter | None
        if isinstance(draft, Composite):
            draft = draft.of_target(self.target)
        if draft is None or isinstance(draft, Drafter):
            self.drafter = draft
        else:
            self.drafter = model_drafter(draft, self.target, d2t, confidence, cache_dtype, draft_window)
        self._asked_for_trees = tree is not None
        self.nodes = 0 if tree is None else self._read_tree(tree)
        if self.drafter is not None:
            self.drafter.check(self.target, tree or 0, self.most_drafts)
        self._first_drafts = FirstDrafts(self.drafter)
        self._lengths: DraftLength
        if isinstance(num_drafts, AdaptiveDrafts):
            copying = self.drafter is not None and self.drafter.copying and not self.nodes
            if self.drafter is not None and self.drafter.shares:
                self._lengths = SharedK(num_drafts)
            else:
                self._lengths = CopiedK(num_drafts) if copying else AdaptiveK(num_drafts, few=self._on_graphs)
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
                why_not = f"tree: got {tree}, but a {name} of model type {model.config.model_type!r} {why}"
                warnings.warn(f"{why_not}; each step drafts one chain instead", RuntimeWarning, stacklevel=3)
                return 0
        return tree

    generate = _generate  # in a file of its own: arrays of prompts in, arrays of texts out, by ``decode``

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
            check_room([sequence.text], sequence.room, "target", self.target.max_length)
            self.check(sequence, accept_rule)
        longest = max((sequence.slots for sequence in sequences), default=1)  # a cache without rows has slots, too
        longest = self.target.with_room(len(sequences), longest)
        if sequences:
            self.plan_caches(len(sequences), longest, step=self.target.slot_step)
        config = self.batch_config(
            len(sequences),
            self.target.capacity(longest, self._memory.tree_slots),
            accept_rule,
            max_eos=max((len(sequence.eos) for sequence in sequences), default=0),
        )
        with torch.inference_mode():
            batch = Batch(replace(config, logits=output_logits))
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
        return Decoded(sequences, batch.stats_of(sequences), None if batch.session is None else batch.session.error)

    def warm_up(self) -> None:
        """Makes the first text as fast as later ones, for texts that are decoded alone: on a CPU, forwards of the
        target are recorded for each number of drafts that is verified, which otherwise happens in the first texts, and
        then takes as long as ten to twenty steps of a small model each. Elsewhere, and for trees, nothing is recorded.
        The models are run, and nothing else changes.

        Example:
            >>> from specdec import SpeculativeDecoder, load_embedded_pair
            >>> target, _, tokenizer = load_embedded_pair()
            >>> decoder = SpeculativeDecoder(target)
            >>> decoder.warm_up()
        """
        with torch.inference_mode():
            capacity = self.target.capacity(self.target.with_room(1, 1), self._memory.tree_slots)
            batch = Batch(self.batch_config(1, capacity, self.read_rule(None), max_eos=0))
            warm_up(batch)
            batch.release()

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

    def batch_config(self, size: int, capacity: int, rule: AcceptRule, max_eos: int) -> BatchConfig:
        """Returns the settings of a batch of ``size`` rows with ``capacity`` slots each, for this decoder's models,
        drafter, K and backend. What a batch may have beside these is off."""
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
            graphs=StepGraphs(self.graph_bytes) if self._on_graphs else None,
            first_drafts=self._first_drafts,
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
        """Plans the caches of target and draft, as ``specdec.loop.batch_memory`` does."""
        return self._memory.plan(rows, max_length, cache_tokens, cache_bytes, step)

    @property
    def _memory(self) -> BatchMemory:
        return BatchMemory(self.target, self.drafter, self.most_drafts, self.nodes)

    @property
    def max_length(self) -> int | None:
        """The most tokens of a prompt and its text: the positions of the target. None: it does not say how many it has.
        A draft model with fewer drafts as far as it can."""
        return self.target.max_length

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
        shares = self.drafter is not None and self.drafter.shares  # the host decides who drafts
        return on_cuda and self.graph_bytes > 0 and not self.target.is_sharded and not shares
