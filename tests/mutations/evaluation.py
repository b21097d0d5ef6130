"""Of what is measured: conversations in which a method hears itself, and what a table makes of them."""

from .mutation import Mutation, mutations

SUITES = "tests/evaluation/test_suites.py"

MUTATIONS: list[Mutation] = [
    *mutations(
        "python/specdec/evaluation/bench/talks.py",
        SUITES,
        {"suite-answers-are-not-heard": ("answers = [turn.answer for turn in turns]", 'answers = [""] * len(turns)')},
    ),
    *mutations(
        "python/specdec/evaluation/bench/suite_table.py",
        SUITES,
        {"suite-speeds-pooled": ("statistics.mean(answers.choices", "statistics.harmonic_mean(answers.choices")},
    ),
]
