"""Of ``specdec verify``: bugs with which it would certify what is wrong, or find fault with what is right."""

from .mutation import Mutation, mutations

VERIFY = "tests/evaluation/test_verify.py"
PEARSON = "tests/evaluation/test_pearson.py"
NEAR_TIES = "tests/evaluation/test_near_ties.py"

MUTATIONS: list[Mutation] = [
    *mutations(
        "python/specdec/evaluation/verify/chi_square.py",
        PEARSON,
        {
            "verify-has-a-degree-too-many": ("degrees = max(len(cells) - 1, 0)", "degrees = len(cells)"),
            "verify-passes-what-cannot-be-drawn": (
                "if n and distribution.get(k, 0.0) == 0]",
                "if n and distribution.get(k, 0.0) < 0]",
            ),
            "verify-drops-rare-outcomes": ("    if rare_expected >= least:\n", "    if False:\n"),
            "verify-forgives-more-than-rounding": ("error = draws * tolerance**2", "error = draws * tolerance"),
        },
    ),
    *mutations(
        "python/specdec/evaluation/verify/__init__.py",
        VERIFY,
        {
            "verify-passes-a-drafter-that-failed": ("any(result.bugs or result.error for", "any(result.bugs for"),
            "verify-gives-each-cell-the-whole-level": (
                "settings.level / max(tests_planned, 1)",
                "settings.level",
            ),
            "verify-counts-what-was-never-accepted": ("and not accepted[name]]", "and accepted[name]]"),
        },
    ),
    *mutations(
        "python/specdec/evaluation/verify/distributions.py",
        VERIFY,
        {
            "verify-draws-the-same-texts-again": (
                "for i in range(start, min(start + SAMPLED_AT_ONCE, s.samples))]",
                "for i in range(min(SAMPLED_AT_ONCE, s.samples - start))]",
            ),
            "verify-expects-the-distribution-a-token-later": (
                "log_p[0, -1].exp().tolist()",
                "log_p[0, 0].exp().tolist()",
            ),
            "verify-expects-temperature-one": ("logits.double() / self._temperature", "logits.double()"),
        },
    ),
    *mutations(
        "python/specdec/evaluation/verify/race_noise.py",
        f"{VERIFY} -k noise",
        {
            "verify-noise-has-nine-rounds": ("for _ in range(10):", "for _ in range(9):"),
            "verify-noise-is-of-another-stream": ("_RACE = 5", "_RACE = 4"),
            "verify-noise-has-seeds-of-32-bits": ("key >> 32 & 0xFFFFFFFF]", "0]"),
        },
    ),
    *mutations(
        "python/specdec/evaluation/verify/texts.py",
        VERIFY,
        {
            "verify-seeds-count-rows-of-a-batch": (
                "for i in range(start, start + len(batch))]",
                "for i in range(len(batch))]",
                f"{VERIFY}::test_a_coupled_text_has_its_prompts_seed_in_every_batch",
            ),
            "verify-stops-at-the-first-near-tie": (
                'if first is not None and first.verdict == "near-tie":',
                "if False:",
                f"{VERIFY}::test_what_follows_a_near_tie_is_judged_as_well",
            ),
            "verify-judges-a-text-once-for-all-prompts": ("key = (cell.check, i, *text)", "key = (cell.check, i)"),
        },
    ),
    *mutations(
        "python/specdec/evaluation/near_ties.py",
        NEAR_TIES,
        {
            "near-tie-is-what-ends-early": (
                "near_tie = gap is not None and gap <= bound",
                "near_tie = gap is None or gap <= bound",
            ),
            "near-tie-has-one-good-token": (
                "max((wide.max() - wide[t]).item() for t",
                "min((wide.max() - wide[t]).item() for t",
            ),
            "near-tie-of-two-bad-tokens": (
                "max((wide.max() - wide[t]).item() for t in tokens if t is not None)",
                "abs(wide[tokens[0]] - wide[tokens[1]]).item()",
            ),
            "near-tie-sees-no-early-end": (
                "next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second)))",
                "next((i for i, (a, b) in enumerate(pairs) if a != b), None)",
            ),
        },
    ),
]
