"""Tools for testing samplers and verifiers: inputs, exact laws, chi-square with its power, near-tie-aware
comparison.

For tests, benchmarks and projects that build on specdec; of the package only ``specdec verify`` imports it."""

from .chi_square import ChiSquare, chi_square, detectable_bias
from .drafts import assert_same_draft, reference_draft
from .inputs import (
    KINDS,
    NEAR_TIE,
    TOLERANCES,
    StepInputs,
    assert_same_step,
    assert_statistics_close,
    device_of,
    pair_of_rows,
    random_step,
)
from .laws import (
    Law,
    Model,
    block_law,
    chen_law,
    completed,
    coupled_law,
    expected_accepted,
    leviathan_law,
    penalised,
    probabilities,
    shared_race,
    text_law,
    total_variation,
    truncated,
)

__all__ = [
    "KINDS",
    "NEAR_TIE",
    "TOLERANCES",
    "ChiSquare",
    "Law",
    "Model",
    "StepInputs",
    "assert_same_draft",
    "assert_same_step",
    "assert_statistics_close",
    "block_law",
    "chen_law",
    "chi_square",
    "completed",
    "coupled_law",
    "detectable_bias",
    "device_of",
    "expected_accepted",
    "leviathan_law",
    "pair_of_rows",
    "penalised",
    "probabilities",
    "random_step",
    "reference_draft",
    "shared_race",
    "text_law",
    "total_variation",
    "truncated",
]
