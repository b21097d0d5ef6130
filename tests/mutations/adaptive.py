"""Of K that adapts: acceptance, step times, what is chosen, and what the batch tells of its steps."""

from .mutation import Mutation, mutations

ACCEPTANCE = "tests/drafters/test_acceptance.py"
TIMES = "tests/drafters/test_step_times.py"
CHOSEN = "tests/drafters/test_adaptive_lengths.py"
LOOP = "tests/drafters/test_draft_length.py"
GRAPHS = "tests/loop/test_graphs.py -k 'adapts or memory_for_graphs'"

MUTATIONS: list[Mutation] = [
    *mutations(
        "python/specdec/drafters/acceptance.py",
        ACCEPTANCE,
        {
            "adaptive-forgets-nothing": ("faint = 1 / max(float(self._tested[0]), 1.0)", "faint = 1.0"),
            "adaptive-counts-only-what-was-found": ("min(r.accepted + 1, r.asked)", "r.accepted"),
            "adaptive-guesses-anew-at-each-position": (
                "guess = (accepted + weight * guess)",
                "guess = (accepted + weight * FIRST_GUESS)",
            ),
            "adaptive-notices-no-change": ("if _unlike(*recent, self.common.by_position()):", "if False:"),
            "adaptive-takes-all-rows-for-alike": (
                "usual = ALONE_WEIGHT if len(self._tested) == 1 else ROW_WEIGHT",
                "return np.tile(common.cumprod(), (len(index), 1))",
            ),
            "adaptive-row-inherits-a-history": ("self._tested[row] = self._accepted[row] = 0", "pass"),
            "adaptive-takes-positions-for-independent": ("(tested + weight)).cumprod(1)", "(tested + weight))"),
        },
    ),
    *mutations(
        "python/specdec/drafters/step_times.py",
        TIMES,
        {
            "adaptive-times-the-first-step": ("if counted < 1:", "if counted < 0:"),
            "adaptive-follows-no-speed": ("self._speed += SPEED_RATE * error", "pass"),
            "adaptive-believes-an-interruption": ("min(self._samples[width])", "max(self._samples[width])"),
            "adaptive-times-fall": ("so_far = max(so_far, _on_line(points, k))", "so_far = _on_line(points, k)"),
            "adaptive-corrects-given-costs": ("if self.fixed:\n            plain", "if False:\n            plain"),
            "adaptive-learns-no-width-again": ("max(1 / (counted + 1), WIDTH_RATE) * error", "0.0 * error"),
            "adaptive-loads-times-over-its-own": ("and self._visits[k] == 0:", "and True:", LOOP),
        },
    ),
    *mutations(
        "python/specdec/drafters/adaptive_lengths.py",
        CHOSEN,
        {
            "adaptive-ignores-rows-that-wait": ("live + accepted.sum(0)", "len(drafting) + accepted.sum(0)"),
            "adaptive-drafts-where-it-does-not-pay": ("(emitted / times).argmax()", "emitted.argmax()"),
            "adaptive-waits-for-nobody": ("if remaining is None:", "if True:"),
            "adaptive-forgets-rows-without-drafts": ("if plain := [[left]", "if plain := [][:1] and [[left]"),
            "adaptive-forgets-sequences-that-wait": ("if remaining.waiting:", "if False:"),
            "adaptive-waiting-sequences-are-all-alike": ("% len(drafting)", "* 0"),
            "adaptive-believes-in-luck": ("times[0] /= 1 + (RETURN", "times[0] /= 1 + 0 * (RETURN"),
            "adaptive-never-chooses-again": ("            self._keep -= 1\n", ""),
            "adaptive-trials-of-one-step": ("False, True, TRIAL - 1, self", "False, True, 0, self"),
            "adaptive-times-the-first-step-after-a-pause": ("if num_drafts > 0 and self._cold:", "if False:"),
            "adaptive-takes-what-was-missed-for-a-prompt": ("if self._new > 0 and not self._cold:", "if self._new > 0:"),
            "adaptive-gives-a-result-to-the-next-sequence": ("        self._enter()\n        self.rows.begin", "        self.rows.begin"),
            "adaptive-leaps": ("while self.widths[best] > 2 * self._most:", "while False:"),
            "adaptive-never-tries-again": (
                "if self._paused and self.learned.balance < 0:",
                "if self._paused:",
            ),
            "adaptive-does-not-rest": ("        if self._rest > 0:\n            return 0\n", ""),
            "adaptive-tries-all-the-time": ("min(learned.balance + won, CREDIT)", "CREDIT"),
            "adaptive-tries-without-forgetting": ("        self.rows.forget()\n", ""),
            "adaptive-never-looks-around": ("if self._chosen % LOOK_AROUND == 0", "if False"),
            "adaptive-reads-for-nothing": ("times[1:] += self._texts.reading() / plain * emitted[1:]", "pass"),
            "adaptive-trials-read-for-nothing": ("self.learned.balance -= seconds / plain\n", "pass\n"),
            "adaptive-ignores-the-load": (
                "self.learned, self._keep = self._of_rows(rows), 0",
                "self._keep = 0",
                "tests/serving/test_rows_in_use.py -k follows",
            ),
            "adaptive-sequence-inherits-a-history": ("self._of_rows[row] = SharedLength(self._new(), 1)", "pass"),
            "adaptive-forgets-caps": (
                "reached[i, caps.get(row, self.widths[-1]) :] = 0",
                "pass",
                f"{CHOSEN} -k may_draft",
            ),
            "adaptive-waits-for-times-that-never-come": (
                "self.learned.times.missing_to(self._top)) is not None:",
                "self.learned.times.missing) is not None:",
                f"{CHOSEN} -k may_draft",
            ),
            "adaptive-graphs-of-every-k": ("sorted({*powers}) if few else range(most + 1)", "range(most + 1)"),
        },
    ),
    *mutations(
        "python/specdec/loop/batch.py",
        LOOP,
        {
            "adaptive-shows-what-it-has-not-read": (
                "if any(step.records[row] is self.rows[row] for step in self._pending for row in rows):",
                "if False:",
            ),
            "adaptive-counts-drafts-without-room": (
                "asked = min(step.wanted[row], record.room - 1)",
                "asked = step.wanted[row]",
            ),
            "adaptive-sampled-texts-depend-on-others": ("self._sampled is None or self.device_rows.greedy)", "True)"),
            "adaptive-greedy-texts-have-a-fixed-k": (
                "self._sampled is None or self.device_rows.greedy)",
                "self._sampled is None)",
            ),
            "adaptive-times-captures": ("counts=graphs is None or graphs.settled", "counts=True", GRAPHS),
            "adaptive-rows-draft-what-could-not-be-shown": (
                "n if r and r.live and r.drafts else 0",
                "n if r and r.live else 0",
                "tests/serving/test_serving_faults.py -k draft_prefill",
            ),
        },
    ),
    *mutations(
        "python/specdec/loop/unseen_tokens.py",
        LOOP,
        {
            "adaptive-shows-too-little": (
                "setdefault(row, max(len(record.text) - 2, 0))",
                "setdefault(row, len(record.text))",
            ),
            "adaptive-shows-no-prompts": ("self._seen[row] = 0", "pass"),
        },
    ),
    *mutations(
        "python/specdec/loop/cuda_graphs.py",
        GRAPHS,
        {"adaptive-waits-for-graphs-that-never-come": ("self._stopped and key in self._seen", "False")},
    ),
    *mutations(
        "python/specdec/loop/step.py",
        "tests/loop/test_sampled_texts.py -k 'has_the_distribution or past'",
        {
            "adaptive-k-depends-on-the-drawn-token": (
                "        if columns < step.num_drafts:",
                "        if columns:\n            allowed = allowed * (drafts.tokens[:, 0] % 2)\n"
                "        if columns < step.num_drafts:",
            ),
            "adaptive-k-depends-on-the-drawn-tokens-own-q": (
                "        if columns < step.num_drafts:",
                "        if columns and drafts.logits is not None:\n"
                "            own = drafts.logits[:, 0].softmax(-1).gather(1, drafts.tokens[:, :1].clamp(min=0))[:, 0]\n"
                "            allowed = allowed * (own > 0.3)\n        if columns < step.num_drafts:",
            ),
        },
    ),
    *mutations(
        "python/specdec/loop/saved_costs.py",
        LOOP,
        {
            "adaptive-saves-over-other-sizes": ('{**known, **{str(b): times', '{**{}, **{str(b): times'),
            "adaptive-takes-times-of-other-threads": ('"threads": torch.get_num_threads(),', '"threads": 1,'),
            "adaptive-overwrites-another-file": ("except (OSError, ValueError) as error:\n        _refuse(path, str(error))",
                                                 "except (OSError, ValueError):\n        return {}"),
        },
    ),
]  # fmt: skip
