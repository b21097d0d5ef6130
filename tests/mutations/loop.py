"""Of the loop: the step, the rows, the report, what counts as accepted, who hears of it, and the choice of K."""

from .mutation import Mutation, mutations

SAMPLED = "tests/loop/test_sampled_texts.py tests/loop/test_settings.py"
DECODER = "tests/loop/test_decoder.py"
ENDS = "tests/loop/test_ends.py tests/loop/test_decoder.py"
COUNTS = "tests/loop/test_decoder.py -k 'stats or always_accepted or bonus or any_drafter'"
GRAPHS = "tests/loop/test_graphs.py"
LOG_PROBS = "tests/loop/test_log_probs.py"
STATES = "tests/loop/test_states.py"
DRAFTS = "tests/serving/test_draft_settings.py"
TREES = "tests/loop/test_tree_step.py tests/loop/test_sampled_trees.py"
SERVING = "tests/serving/test_serving_ends.py tests/serving/test_serving_faults.py tests/serving/test_scheduler.py"
BUCKETS = "tests/serving/test_row_buckets.py"
PREFIXES = "tests/serving/test_prefix_reuse.py"
K = "tests/loop/test_draft_length.py"

MUTATIONS: list[Mutation] = [
    *mutations(
        "python/specdec/sampling/grammar_masks.py",
        "tests/loop/test_grammar_failures.py",
        {
            "grammar-state-after-drafts-is-kept": ("self._matcher = None  # it has followed drafts", "pass"),
        },
    ),
    *mutations(
        "python/specdec/loop/batch.py",
        "tests/loop/test_grammar_failures.py",
        {
            "grammar-fails-where-no-text-goes": (
                "len(report.tokens) > failure.after",
                "len(report.tokens) >= failure.after",
            )
        },
    ),
    *mutations(
        "python/specdec/loop/step.py",
        SAMPLED,
        {
            "step-verifies-copies-with-q-of-others": (
                "one_hot = drafts._replace(logits=None, stats=None, d2t=None, masked=0)",
                "one_hot = drafts._replace(one_hot=None)",
                "tests/drafters/test_composite.py -k targets_distribution",
            ),
            "step-feeds-a-stale-token": ("tokens = step.last_two[:, 1:]", "tokens = step.last_two[:, :1]"),
            "step-verifies-without-q": (
                "                drafts.logits,\n                params",
                "                None,\n                params",
            ),
            "step-does-not-advance": ("emitted = self.rows.advance(out)", "emitted = out.num_emitted.long()", DECODER),
            "step-processes-rows-that-do-not-count": (
                "& (self.rows.columns[: tokens.shape[1]] < allowed)",
                "",
            ),
            "step-keeps-nodes-below-those-that-are-none": ("return ~below & (", "return ~none & (", TREES),
            "step-lets-trees-grow-too-deep": (
                "(tree.depths[:, 1:] <= allowed)",
                "(tree.depths[:, 1:] <= allowed + 1)",
                TREES,
            ),
            "step-walks-down-sampled-trees": (
                "TreeRule.WALK if walks else self.rule",
                "TreeRule.WALK",
                "tests/loop/test_sampled_trees.py",
            ),
            "step-leaves-accepted-nodes-where-they-are": (
                "            state.target_cache.compact(out.path)\n",
                "",
                TREES,
            ),
            "step-scores-processed-logits": (
                "self.log_probs(step, logits, processed, out)",
                "self.log_probs(step, processed, processed, out)",
                LOG_PROBS,
            ),
        },
    ),
    *mutations(
        "python/specdec/loop/rows.py",
        SAMPLED,
        {
            "rows-reuse-noise-in-every-step": ("position=self.known,", "position=torch.zeros_like(self.known),"),
            "rows-begin-with-one-token-twice": (
                "last_two = [(text[-2:-1] or text)[0], text[-1]]",
                "last_two = [text[-1], text[-1]]",
                COUNTS,
            ),
            "rows-keep-the-filters-of-the-sequence-before": (
                "zip(self._numbers, parts, strict=True):",
                "zip(self._numbers[:1], parts[:1], strict=True):",
            ),
            "rows-replay-a-graph-of-fewer": ("return self.count, *(", "return 0, *(", f"{BUCKETS} -k graphs"),
            "rows-flap": ("self._spare > PATIENCE", "self._spare > 0", f"{BUCKETS} -k numbers"),
        },
    ),
    *mutations(
        "specdec_kernels/backends/reference_rows.py",
        "tests/kernels/test_row_state.py",
        {
            "rows-draft-past-the-room": ("torch.minimum(wanted, room - 1)", "torch.minimum(wanted, room)"),
            "rows-pad-into-slot-0": ("torch.where(counts, places, trash)", "torch.where(counts, places, 0)"),
            "rows-take-empty-slots-for-an-end": (".any(-1) & (index < count[:, None])", ".any(-1)"),
            "rows-keep-a-stale-last-token": (
                "text.gather(1, count[:, None] +",
                "text.gather(1, (count[:, None] - 1).clamp(0) +",
            ),
            "rows-count-steps-instead-of-tokens": ("room.sub_(count)", "room.sub_(1)"),
        },
    ),
    *mutations(
        "python/specdec/loop/report.py",
        COUNTS,
        {
            "report-counts-every-draft": ("statuses[:allowed]))", "statuses[:columns]))", DRAFTS),
            "report-counts-drafts-behind-a-rejection": ("tested = min(accepted + 1, drafted)", "tested = drafted"),
            "report-takes-drafts-for-statuses": (
                "statuses = statuses[columns : columns + allowed]",
                "statuses = statuses[:allowed]",
                "tests/serving/test_serving_faults.py tests/loop/test_decoder.py -k 'nan or fault'",
            ),
        },
    ),
    *mutations(
        "python/specdec/loop/sequence.py",
        ENDS,
        {
            "sequence-says-that-a-stop-was-an-end-token": ("at_eos = at_eos and kept == count", "at_eos = at_eos"),
            "sequence-takes-bonus-tokens-for-recovered": (
                "if report.tested > accepted else",
                "if report.tested >= accepted else",
                COUNTS,
            ),
            "sequence-blames-rows-behind-the-end": (
                "            status &= ~_TARGET_FAULTS  # faults in rows after the end do not matter\n",
                "            pass\n",
            ),
            "sequence-hides-the-output-from-processors": ("            self.seen += tokens\n", "            pass\n"),
            "sequence-ends-a-token-early": ("elif self.room == 0:", "elif self.room <= 1:"),
            "sequence-keeps-text-after-a-stop": ("del self.text[len(self.text) - count + kept :]", "pass"),
            "sequence-keeps-tokens-that-a-stop-failed-on": (
                "            del self.text[len(self.text) - count :]\n            raise",
                "            raise",
                "tests/serving/test_serving_faults.py",
            ),
            "sequence-counts-accepted-drafts-after-its-end": (
                "accepted, tested = min(accepted, len(tokens)), min(tested, len(tokens))",
                "tested = min(tested, len(tokens))",
            ),
            "sequence-scores-its-prompt-one-token-early": (
                "self.text[position + 1 : position + 1 + len(logits)]",
                "self.text[position : position + len(logits)]",
                LOG_PROBS,
            ),
        },
    ),
    *mutations(
        "python/specdec/loop/batch.py",
        SERVING,
        {
            "batch-counts-a-step-for-a-sequence-that-began-later": (
                "[s if s is not None and s.begun else None for s in self.sequences[:count]]",
                "self.sequences[:count]",
                "tests/serving/test_scheduler.py",
            ),
            "batch-runs-ahead-of-its-penalties": (
                "(state.processors or state.grammars or self.table.counts or",
                "(state.processors or state.grammars or",
            ),
            "batch-replays-a-graph-of-other-parameters": ("(*host.key, *rows.key)", "host.key", GRAPHS),
            "batch-tells-no-drafter-of-an-end": (
                "self.session.end(row, sequence.tokens)",
                "self.session.end(row, [])",
                "tests/drafters/test_suffix.py",
            ),
            "batch-penalties-miss-the-last-token": (
                "self.table.add(row, tokens)",
                "self.table.add(row, tokens[:-1])",
                SAMPLED,
            ),
        },
    ),
    *mutations(
        "python/specdec/loop/step_planner.py",
        SERVING,
        {
            "batch-shows-the-slots-of-a-step-before": (
                "longest + unread * (self._lengths.most + 1) + num_drafts",
                "longest + num_drafts",
                "tests/serving/test_scheduler.py",
            ),
            "batch-gives-sampled-texts-fewer-rows": (
                " if self._free else len(self.sequences))",
                ")",
                f"{BUCKETS} -k forwards",
            ),
        },
    ),
    *mutations(
        "python/specdec/loop/unseen.py",
        "tests/drafters/test_heads.py tests/drafters/test_head_formats.py",
        {
            "batch-hides-a-prompt-from-its-drafter": (
                "sequence.unseen = max(len(sequence.text) - 2, 0)",
                "sequence.unseen = len(sequence.text)",
            ),
        },
    ),
    *mutations(
        "python/specdec/drafters/protocol.py",
        SERVING,
        {
            "batch-hands-an-error-to-the-next-sequence": ("        self.processors.errors.pop(row, None)\n", ""),
            "batch-replays-a-graph-that-sees-less": (
                "self.num_drafts, self.visible, self.greedy",
                "self.num_drafts, self.greedy",
                GRAPHS,
            ),
        },
    ),
    *mutations(
        "python/specdec/loop/copied_length.py",
        "tests/loop/test_copied_length.py",
        {
            "copies-are-all-as-likely-as-their-first-token": (
                "self._chances[votes][first : first + count]",
                "self._chances[votes][first : first + 1]",
            ),
            "copies-learn-from-what-follows-a-wrong-one": (
                "            if guess != token:\n                return\n",
                "",
            ),
        },
    ),
    *mutations(
        "python/specdec/loop/draft_length.py",
        K,
        {
            "k-counts-drafts-after-a-rejection": (
                "failed[row.accepted] += row.accepted < row.asked",
                "failed[0] += row.accepted < row.asked",
            ),
            "k-does-not-know-that-plain-steps-emit": (
                "(live + reached) / (seconds[k] + reading)",
                "reached / (seconds[k] + reading)",
            ),
            "k-takes-the-time-of-a-step-for-that-of-what-was-asked": (
                "self.times(step.rows).took(step.num_drafts, step.width, step.seconds)",
                "self.times(step.rows).took(step.num_drafts, step.num_drafts, step.seconds)",
            ),
            "k-never-tries-again": (
                "            if self._pause > 0:\n                return 0\n",
                "            return 0\n",
            ),
            "k-is-chosen-where-texts-depend-on-it": (
                "return not text_depends",
                "return True",
                f"{BUCKETS} tests/serving/test_scheduler.py tests/loop/test_decoder.py",
            ),
        },
    ),
    *mutations(
        "python/specdec/loop/log_probs.py",
        LOG_PROBS,
        {
            "scores-take-the-last-of-equal-tokens": ("(size - index).int()", "(index + 1).int()"),
        },
    ),
    *mutations(
        "python/specdec/loop/typical.py",
        "tests/loop/test_typical.py",
        {
            "typical-ignores-the-entropy": ("(-torch.special.entr(p).sum(-1)).exp()", "1.0 + 0 * p.sum(-1)"),
            "typical-takes-the-first-path": ("depths[:, 1:] + 0.5 * of_path.exp()", "depths[:, 1:]"),
        },
    ),
    *mutations(
        "python/specdec/drafters/guard.py",
        "tests/drafters/test_drafter_faults.py tests/loop/test_tree_step.py",
        {
            "guard-asks-a-failed-drafter-again": (
                "self._session, self.error = None, error_text(error)",
                "self.error = error_text(error)",
            ),
            "guard-checks-no-shapes": (
                "values.dim() == 2 and values.shape[0] == batch and values.shape[1] <= most",
                "True",
            ),
        },
    ),
    *mutations(
        "python/specdec/loop/prefixes.py",
        PREFIXES,
        {
            "prefix-has-the-last-token": (
                "len(sequence.text) - 1, self._held(row))",
                "len(sequence.text), self._held(row))",
                f"{PREFIXES} -k last_token",
            ),
            "prefix-of-another-scope": (
                " or self._scopes[row] != sequence.request.scope",
                "",
                f"{PREFIXES} -k scopes",
            ),
            "prefix-with-generated-tokens": (
                "if self._reuse is not PrefixReuse.ROUNDING:",
                "if self._reuse is None:",
                f"{PREFIXES} -k warm_is_cold",
            ),
            "prefix-of-a-failed-text": (
                " and sequence.finish_reason is not FinishReason.FAILED",
                "",
                f"{PREFIXES} -k failed",
            ),
            "prefix-that-was-not-read": (
                "self._texts[row][: self._held(row)] if kept",
                "self._texts[row] if kept",
                f"{PREFIXES} -k cancelled",
            ),
            "prefix-is-not-scored": (
                " and sequence.request.prompt_log_probs is None",
                "",
                f"{PREFIXES} -k probabilities",
            ),
            "prefix-takes-a-long-texts-row": (
                " and 2 * count >= self._held(source)",
                "",
                f"{PREFIXES} -k short_beginning",
            ),
        },
    ),
    *mutations(
        "python/specdec/serving/server/plan.py",
        "tests/serving/server/test_prefix_scopes.py",
        {"server-ignores-salts": ("else owner, body.cache_salt)", "else owner, None)")},
    ),
    *mutations(
        "python/specdec/serving/scheduler.py",
        SERVING,
        {
            "scheduler-cancels-within-a-step": (
                "        if self._stepping:\n            self._to_cancel.append(number)\n        else:",
                "        if True:",
            ),
            "scheduler-reads-all-prompts-at-once": (
                "while read < self.prefill_chunk and (",
                "while (",
            ),
        },
    ),
]
