"""Of what is measured: conversations in which a method hears itself."""

from .mutation import Mutation, mutations

SUITES = "tests/evaluation/test_suites.py"

MUTATIONS: list[Mutation] = [
    *mutations(
        "python/specdec/evaluation/bench/talks.py",
        SUITES,
        {"suite-answers-are-not-heard": ("answers = [turn.answer for turn in turns]", 'answers = [""] * len(turns)')},
    ),
]
