"""Tools for testing samplers and verifiers: inputs, exact distributions, near-tie-aware comparison.

For tests, benchmarks and projects that build on specdec; neither package imports it."""

from .distributions import (
    Distribution,
    Model,
    block_distribution,
    chen_distribution,
    completed,
    coupled_distribution,
    expected_accepted,
    leviathan_distribution,
    penalised,
    probabilities,
    shared_race,
    text_distribution,
    total_variation,
)
from .drafts import assert_same_draft, reference_draft
from .inputs import (
    KINDS,
    NEAR_TIE,
    TOLERANCES,
    StepInputs,
    assert_same_step,
    assert_statistics_close,
    bits_of,
    device_of,
    pair_of_rows,
    random_step,
)
from .tree_distributions import multi_round_distribution, traversal_distribution, walk_distribution
from .trees import TreeInputs, assert_same_children, assert_same_tree_step, path_of, random_tree_step

__all__ = [
    "KINDS",
    "NEAR_TIE",
    "TOLERANCES",
    "Distribution",
    "Model",
    "StepInputs",
    "TreeInputs",
    "assert_same_children",
    "assert_same_draft",
    "assert_same_step",
    "assert_same_tree_step",
    "assert_statistics_close",
    "bits_of",
    "block_distribution",
    "chen_distribution",
    "completed",
    "coupled_distribution",
    "device_of",
    "expected_accepted",
    "leviathan_distribution",
    "multi_round_distribution",
    "pair_of_rows",
    "path_of",
    "penalised",
    "probabilities",
    "random_step",
    "random_tree_step",
    "reference_draft",
    "shared_race",
    "text_distribution",
    "total_variation",
    "traversal_distribution",
    "walk_distribution",
]
