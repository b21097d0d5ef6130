"""Of settings, stops, and the tests that judge distributions."""

from .mutation import Mutation, mutations

MUTATIONS: list[Mutation] = [
    *mutations(
        "python/specdec/sampling/token_table.py",
        "tests/sampling/test_token_table.py tests/loop/test_settings.py",
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
        "python/specdec/stopping.py",
        "tests/test_stopping.py",
        {
            "stop-is-found-where-it-comes-last": ("for n in range(1, new + 1) if", "for n in range(new, 0, -1) if"),
            "stop-is-found-in-the-prompt-again": ("max(same - len(string) + 1, 0)", "0"),
            "cut-misses-what-began-in-the-prompt": (
                "whole.find(string, max(len(prompt) - len(string) + 1, 0))",
                "whole.find(string, len(prompt))",
            ),
        },
    ),
    *mutations(
        "python/specdec/prompts.py",
        "tests/loop/test_decoder.py -k 'eos or seeds'",
        {
            "loop-seeds-count-rows": (
                "given = [seed] * batch_size if",
                "given = list(range(seed, seed + batch_size)) if",
            ),
        },
    ),
    *mutations(
        "python/specdec/hf/convert_processors.py",
        "tests/hf/test_convert_processors.py",
        {
            "hf-filters-in-any-order": ("in _WARPERS[:rank] and", "in _WARPERS and"),
        },
    ),
    *mutations(
        "python/specdec/evaluation/verify/chi_square.py",
        "tests/evaluation/test_pearson.py",
        {
            "verify-has-a-degree-too-many": ("degrees = max(len(cells) - totals, 0)", "degrees = len(cells)"),
            "verify-forgives-more-than-rounding": ("error = draws * tolerance**2", "error = draws * tolerance"),
        },
    ),
    *mutations(
        "python/specdec/evaluation/near_ties.py",
        "tests/evaluation/test_near_ties.py",
        {
            "near-tie-is-what-ends-early": (
                "near_tie = gap is not None and gap <= bound",
                "near_tie = gap is None or gap <= bound",
            ),
        },
    ),
]
