"""Of the loop: positions, noise, what it hands to the kernels, and what it keeps."""

from .mutation import Mutation, mutations

DISTRIBUTIONS = "tests/loop/test_sampled_texts.py tests/loop/test_settings.py"
Q = "tests/loop/test_handed_over_q.py"
SETTINGS = "tests/loop/test_settings.py tests/loop/test_sampled_texts.py"
TABLE = "tests/sampling/test_token_table.py tests/loop/test_settings.py"
ADAPTIVE = "tests/drafters/test_draft_length.py"
ENDS = "tests/loop/test_ends.py"
FAULTS = "tests/serving/test_serving_faults.py tests/loop/test_decoder.py -k 'nan or fault'"
LOG_PROBS = "tests/loop/test_log_probs.py"
TEXT = "tests/loop/test_decoder.py -k 'eos or seeds'"

MUTATIONS: list[Mutation] = [
    *mutations(
        "python/specdec/drafters/drawing.py",
        DISTRIBUTIONS,
        {
            "loop-withdraws-unlikely-drafts": (
                'Drafts(column("tokens"), ',
                'Drafts(column("tokens").masked_fill(column("log_q") < -2.0, -1), ',
            ),
            "loop-keeps-q-in-bfloat16": (
                "logits=torch.stack(self.rows, 1),",
                "logits=torch.stack(self.rows, 1).bfloat16(),",
                Q,
            ),
            "loop-drafts-repeat-their-noise": (
                "offset=len(self.draws),\n            rule=g.rule,\n            table=step.table,\n            drafts=self._drafts,",
                "offset=0,\n            rule=g.rule,\n            table=step.table,\n            drafts=self._drafts[:, :0],",
            ),
            "loop-hands-over-statistics-of-the-first-draft": (
                'stats=(column("cutoff"), column("lse"))',
                'stats=(column("cutoff"), column("lse")[:, :1].repeat(1, len(self.draws)))',
                Q,
            ),
            "loop-drafts-without-the-table": ("table=step.table,", "table=None,", SETTINGS),
        },
    ),
    *mutations(
        "python/specdec/loop/step.py",
        DISTRIBUTIONS,
        {
            "loop-feeds-a-stale-token": (
                "step.last_two[:, 1:], drafts.clamp(",
                "step.last_two[:, :1], drafts.clamp(",
            ),
            "loop-processes-the-target-alone-without-drafts": (
                "g.processors(logits, step.processed, step.allowed, drafts.tokens)",
                "g.processors(logits, step.processed, [0] * len(step.allowed), drafts.tokens)",
            ),
            "loop-verifies-without-the-table": ("table=step.table,", "table=None,", SETTINGS),
            "loop-counts-columns-that-were-not-drafted": ("if columns < step.num_drafts:", "if False:", ADAPTIVE),
            "loop-does-not-advance": ("emitted = self.rows.advance(out)", "emitted = out.num_emitted.long()", TEXT),
        },
    ),
    *mutations(
        "python/specdec/loop/device_rows.py",
        DISTRIBUTIONS,
        {
            "loop-reuses-noise-in-every-step": ("position=self.known,", "position=torch.zeros_like(self.known),"),
            "loop-drafts-past-the-room": ("self.room - 1).clamp_(0, plan", "self.room).clamp_(0, plan", TEXT),
        },
    ),
    *mutations(
        "python/specdec/loop/step_report.py",
        TEXT,
        {
            "report-takes-drafts-for-statuses": (
                "numbers[2 * num_drafts + 1 :],",
                "numbers[2 * num_drafts :],",
                FAULTS,
            ),
            "report-counts-every-draft": (
                "0 <= token < vocab_size, drafts[:allowed])",
                "0 <= token < vocab_size, drafts)",
                "tests/loop/test_decoder.py tests/drafters/test_draft_length.py",
            ),
        },
    ),
    *mutations(
        "python/specdec/loop/token_log_probs.py",
        LOG_PROBS,
        {
            "scores-take-the-last-of-equal-tokens": ("(size - index).int()", "(index + 1).int()"),
            "scores-rank-equal-tokens-alike": (
                "before = (logits > own) | ((logits == own) & (index < tokens[:, None]))",
                "before = logits > own",
            ),
        },
    ),
    *mutations(
        "python/specdec/loop/step.py",
        LOG_PROBS,
        {
            "scores-of-processed-logits": (
                "self.score_tokens(plan, logits, out.tokens)",
                "self.score_tokens(plan, processed, out.tokens)",
            ),
        },
    ),
    *mutations(
        "python/specdec/loop/step_report.py",
        LOG_PROBS,
        {
            "scores-in-the-wrong-rows": ("index_copy(0, *scored)", "index_copy(0, scored.rows.flip(0), scored.scores)"),
            "report-keeps-raw-log-probs-of-processed-logits": (
                "raw = reals[:, :, 1].index_copy(0, scored.rows, scored.scores[:, :, 0])",
                "raw = reals[:, :, 1]",
            ),
        },
    ),
    *mutations(
        "python/specdec/loop/device_rows.py",
        LOG_PROBS,
        {
            "scores-of-rows-that-asked-before": (
                "if rows != self._scored:",
                "if len({*rows}) > len({*self._scored}):",
            ),
        },
    ),
    *mutations(
        "python/specdec/loop/sequence.py",
        TEXT,
        {
            "loop-log-probs-one-step-late": (
                "values = report.log_probs[:count]",
                "values = report.log_probs[-count:]",
                SETTINGS,
            ),
            "scores-of-a-prompt-one-token-early": (
                "self.text[position + 1 : position + 1 + len(logits)]",
                "self.text[position : position + len(logits)]",
                LOG_PROBS,
            ),
            "loop-keeps-text-after-a-stop": ("del self.text[len(self.text) - count + kept :]", "pass", ENDS),
            "loop-asks-a-stop-about-the-last-token": ("self.text, count), count)", "self.text, 1), 1)", ENDS),
        },
    ),
    *mutations(
        "python/specdec/drafters/model.py",
        ADAPTIVE,
        {
            "loop-stops-at-the-unsure-draft-itself": ("n <= offset for n in going", "n <= offset + 1 for n in going"),
            "loop-forgets-to-catch-up": ("known, begin, rows[0])", "known, [len(text) for text in known], rows[0])"),
        },
    ),
    *mutations(
        "python/specdec/sampling/token_table.py",
        TABLE,
        {
            "loop-counts-a-token-once": (
                'self._columns["count"][sequence, place] += 1',
                'self._columns["count"][sequence, place] = 1',
            ),
            "loop-forgets-prompts-in-min-new-tokens": (
                "prompt_length + min_new_tokens if delayed",
                "min_new_tokens if delayed",
            ),
            "loop-ends-of-the-row-before": ("self._ends[row] = 0, False, 0, -1", "_ = 0, False, 0, -1"),
            "loop-table-not-in-order": ("row[place + 1 : size + 1] = row[place:size]", "row[size] = row[place]"),
        },
    ),
    *mutations(
        "python/specdec/prompts.py",
        TEXT,
        {
            "loop-seeds-count-rows": (
                "given = [seed] * batch_size if",
                "given = list(range(seed, seed + batch_size)) if",
            )
        },
    ),
]
