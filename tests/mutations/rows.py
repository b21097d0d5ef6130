"""Of a batch's rows: their state on the device, the host's record of each, reports, and steps that are graphs."""

from .mutation import Mutation, mutations

GRAPHS = (
    "tests/loop/test_graphs.py::test_replays_give_the_same_texts tests/loop/test_graphs.py::test_ends_within_a_replay"
)
BUDGET = "tests/loop/test_graphs.py -k 'memory or budget or waits'"
GREEDY = "tests/loop/test_decoder.py -k 'plain_one_by_one or plain_in_batches'"
ENDS = "tests/loop/test_decoder.py -k 'eos or max_new_tokens'"
COUNTS = "tests/loop/test_decoder.py -k 'stats or always_accepted or bonus or acceptance'"
FAULTS = "tests/serving/test_serving_faults.py tests/loop/test_decoder.py -k 'nan or fault'"
STOPS = "tests/loop/test_ends.py"
IN_USE = "tests/serving/test_rows_in_use.py"
SCHEDULED = "tests/serving/test_serving_ends.py tests/serving/test_scheduler.py"

MUTATIONS: list[Mutation] = [
    *mutations(
        "python/specdec/loop/device_rows.py",
        ENDS,
        {
            "rows-begin-with-one-token-twice": (
                "(text[-2:-1] or text)[0], text[-1], *eos]",
                "text[-1], text[-1], *eos]",
                COUNTS,
            ),
            "rows-begin-again-in-every-step": ("        self._edits.clear()\n", ""),
            "rows-take-empty-slots-for-an-end": (
                ".any(-1) & (index < count[:, None])",
                ".any(-1)",
                "tests/serving/test_scheduler.py -k beside",
            ),
            "rows-keep-a-stale-last-token": (
                "count[:, None] + self._columns[:2] + 2",
                "count[:, None] + self._columns[:2] + 1",
                GREEDY,
            ),
            "rows-count-steps-in-the-place-of-tokens": ("self.room.sub_(count)", "self.room.sub_(1)", ENDS),
            "rows-pad-into-slot-0": (
                "torch.where(counts, places, self._trash)",
                "torch.where(counts, places, 0)",
                "tests/loop/test_decoder.py -k 'batches or eos' tests/drafters/test_draft_length.py",
            ),
            "rows-read-the-parameters-of-the-first": (
                "for params in self._in_rows.values() for name in names)",
                "for params in list(self._in_rows.values())[:1] for name in names)",
                "tests/loop/test_settings.py tests/loop/test_graphs.py::test_replays_give_the_same_texts",
            ),
            "rows-keep-the-filters-of-the-sequence-before": (
                "zip(self._numbers, parts, strict=True):",
                "zip(self._numbers[:1], parts[:1], strict=True):",
                "tests/loop/test_settings.py",
            ),
            "rows-move-their-filters-away-from-a-graph": (
                "filters = others[0] if used(",
                "filters = others[0].clone() if used(",
                GRAPHS,
            ),
            "rows-wait-for-their-settings": (
                "tensor.pin_memory().to(device, non_blocking=True)",
                "tensor.pin_memory().to(device)",
                "tests/loop/test_on_a_gpu.py",
            ),
            "rows-replay-a-graph-of-fewer": (
                "return self.count, tuple(",
                "return None, tuple(",
                "tests/serving/test_rows_in_use.py -k model-graphs",
            ),
            "rows-draft-where-there-is-no-token": (
                "(columns < allowed[:, None]) & (places >= 0) & live[:, None]",
                "(columns < allowed[:, None]) & live[:, None]",
                "tests/loop/test_decoder.py::test_prompts_of_one_token_are_drafted_for_as_any_other",
            ),
        },
    ),
    *mutations(
        "python/specdec/loop/batch.py",
        SCHEDULED,
        {
            "batch-hands-an-error-to-the-next-sequence": (
                "        self.generation.processors.errors.pop(row, None)\n",
                "",
                "tests/serving/test_serving_faults.py",
            ),
            "batch-steps-without-the-highest-row": (
                "next(highest + 1 if self._chooses",
                "next(max(highest, 1) if self._chooses",
                f"{IN_USE} -k model-ahead",
            ),
            "batch-sampled-texts-depend-on-the-rows-in-use": (
                "if self._chooses else size)",
                ")",
                f"{IN_USE} -k forwards",
            ),
            "batch-takes-all-drafters-for-aware-of-rows": (
                "not self.session.takes_fewer_rows):",
                "False):",
                f"{IN_USE} -k other_drafters",
            ),
            "batch-tells-no-drafter-of-an-end": (
                "self.session.release(row, record.tokens)",
                "self.session.release(row, [])",
                "tests/drafters/test_suffix.py",
            ),
            "batch-runs-ahead-of-its-penalties": (
                "(self.generation.processors or self.table.counts or config.logits)",
                "(self.generation.processors or config.logits)",
                "tests/loop/test_graphs.py::test_what_needs_the_host_runs_without_a_graph tests/serving/test_scheduler.py",
            ),
            "batch-shows-the-slots-of-a-step-before": (
                "longest + len(self._pending) * (self.config.most_drafts + 1) + num_drafts",
                "longest + num_drafts",
                "tests/serving/test_scheduler.py::test_a_step_that_is_launched_ahead_sees_what_the_one_before_wrote",
            ),
            "batch-shows-no-slots-for-drafts": (
                "* (self.config.most_drafts + 1) + num_drafts, capacity)",
                "* (self.config.most_drafts + 1), capacity)",
                GREEDY,
            ),
            "batch-replays-a-graph-that-sees-less": (
                "shape = (plan.num_drafts, plan.visible, plan",
                "shape = (plan.num_drafts, plan",
                "tests/loop/test_graphs.py::test_a_text_outgrows_what_its_first_graph_sees",
            ),
            "batch-replays-a-graph-of-other-parameters": (
                "(*shape, *self.device_rows.signature)",
                "shape",
                "tests/loop/test_graphs.py::test_a_filter_that_comes_after_a_capture",
            ),
            "batch-reports-to-those-who-have-ended": (
                "if record is None or not record.live:\n                continue",
                "if record is None:\n                continue",
            ),
            "batch-penalties-miss-the-first-token-of-a-step": (
                "self.table.add(row, tokens)",
                "self.table.add(row, report.tokens[1:])",
                "tests/loop/test_sampled_texts.py::test_greedy_text_equals_transformers",
            ),
        },
    ),
    *mutations(
        "python/specdec/loop/rows_in_use.py",
        f"{IN_USE} -k numbers",
        {"rows-in-use-flap": ("self._spare > PATIENCE", "self._spare > 0")},
    ),
    *mutations(
        "python/specdec/models/kv_cache.py",
        f"{IN_USE} -k tree-coupled",
        {"rows-move-the-nodes-of-all": ("first = slice(len(path))", "first = slice(None)")},
    ),
    *mutations(
        "python/specdec/loop/sequence.py",
        COUNTS,
        {
            "record-says-that-a-stop-was-an-end-token": (
                "at_eos = at_eos and kept == count",
                "at_eos = at_eos",
                "tests/loop/test_ends.py::test_a_stop_before_the_end_token_of_the_same_step_is_what_ends_it",
            ),
            "record-takes-bonus-tokens-for-recovered": (
                "Producer.RECOVERED if report.tested > accepted",
                "Producer.RECOVERED if report.tested >= accepted",
            ),
            "record-blames-rows-behind-the-end": (
                "            status &= ~_TARGET_FAULTS  # faults in rows after the end do not matter\n",
                "            pass\n",
                "tests/loop/test_ends.py::test_a_fault_behind_the_end_is_none",
            ),
            "record-hides-the-output-from-processors": (
                "            self.processed += tokens\n",
                "            pass\n",
                STOPS,
            ),
            "record-ends-a-token-early": ("elif self.room == 0:", "elif self.room <= 1:", ENDS),
            "record-keeps-tokens-that-a-stop-failed-on": (
                "            del self.text[len(self.text) - count :]\n            raise",
                "            raise",
                "tests/loop/test_ends.py tests/serving/test_serving_faults.py",
            ),
        },
    ),
    *mutations(
        "python/specdec/loop/step_report.py",
        COUNTS,
        {
            "record-counts-drafts-that-are-no-tokens": (
                "list(takewhile(lambda token: 0 <= token < vocab_size, drafts[:allowed]))",
                "drafts[:allowed]",
                "tests/loop/test_decoder.py::test_any_drafter_gives_the_same_text tests/drafters/test_drafter_faults.py",
            ),
            "record-counts-drafts-behind-a-rejection": (
                "tested, counts = min(num_accepted + 1, drafted), (drafted, drafted)",
                "tested, counts = drafted, (drafted, drafted)",
            ),
        },
    ),
    *mutations(
        "python/specdec/loop/step_report.py",
        GRAPHS,
        {
            "report-is-overwritten-by-the-next-replay": ("self._copy = report.clone()", "self._copy = report"),
            "report-is-read-before-its-copy": (
                "            self._event.synchronize()\n",
                "            pass\n",
                "tests/loop/test_on_a_gpu.py",
            ),
        },
    ),
    *mutations(
        "python/specdec/loop/cuda_graphs.py",
        GRAPHS,
        {
            "graphs-have-no-budget": ("if self.bytes >= self.budget:", "if False:", BUDGET),
            "graphs-try-again-without-memory": ("        self._stopped = True\n", "", BUDGET),
            "graphs-leave-a-drafter-unguarded": (
                "        finally:\n            if session is not None:\n                session.raising = False",
                "        finally:\n            if session is not None:\n                session.raising = True",
                "tests/loop/test_graphs.py::test_errors_of_drafters_are_raised_only_while_a_step_is_captured",
            ),
        },
    ),
    *mutations(
        "python/specdec/loop/arguments.py",
        STOPS,
        {
            "copies-of-a-prompt-share-a-seed": (
                "(seeds[:, None] + torch.arange(copies)).view(-1)",
                "seeds.repeat_interleave(copies)",
            ),
            "processors-are-not-shown-the-padding": (
                "text if seen is None else list(seen[b])",
                "text if seen is None else list(prompt)",
            ),
        },
    ),
    *mutations(
        "python/specdec/decoder.py",
        STOPS,
        {
            "decoder-captures-without-cuda": (
                "and torch.version.cuda is not None and",
                "and",
                "tests/loop/test_on_a_gpu.py",
            ),
            "decoder-has-no-room-for-new-tokens": (
                "longest = max(map(len, prompts), default=0) + max_new_tokens",
                "longest = max(map(len, prompts), default=0) + 1",
                GREEDY,
            ),
            "decoder-forgets-the-positions-of-the-draft": (
                'self._max_lengths["draft"] = self.drafter.model.max_length',
                "pass",
                "tests/loop/test_decoder_limits.py",
            ),
            "decoder-swallows-the-error-of-a-stop": (
                "if (error := next((r.error for r in records if r.error), None)) is not None:",
                "if (error := None) is not None:",
            ),
            "decoder-shuffles-copies-of-prompts": (
                "input_ids.repeat_interleave(num_return_sequences, 0)",
                "input_ids.repeat(num_return_sequences, 1)",
            ),
            "decoder-prefills-one-token-too-few": (
                "[record.text[:-1] for record in records]",
                "[record.text[:-2] for record in records]",
                GREEDY,
            ),
        },
    ),
    *mutations(
        "python/specdec/loop/collect.py",
        COUNTS,
        {
            "decoder-counts-a-shared-forward-for-each-row": (
                "    stats.target_forwards, stats.draft_forwards = batch.steps, batch.draft_forwards\n",
                "",
            ),
        },
    ),
    *mutations(
        "python/specdec/prompts.py",
        "tests/loop/test_decoder_limits.py",
        {
            "prompts-may-not-reach-the-last-position": (
                "longest + max_new_tokens <= max_length",
                "longest + max_new_tokens < max_length",
            ),
        },
    ),
]
