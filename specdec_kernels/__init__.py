"""Fused sampling and verification for speculative decoding, on raw logits. Knows nothing of models."""

from .api import draft_step, speculative_step
from .build import build_info
from .ops import SamplingTensors
from .row_state import advance_rows, place_rows
from .tree_api import draft_children, verify_tree
from .types import (
    Backend,
    DraftChildren,
    DraftStep,
    Rule,
    SamplingParams,
    SpeculativeStep,
    Status,
    TokenTable,
    TreeRule,
    TreeStep,
)

__all__ = [
    "Backend",
    "DraftChildren",
    "DraftStep",
    "Rule",
    "SamplingParams",
    "SamplingTensors",
    "SpeculativeStep",
    "Status",
    "TokenTable",
    "TreeRule",
    "TreeStep",
    "advance_rows",
    "build_info",
    "draft_children",
    "draft_step",
    "place_rows",
    "speculative_step",
    "verify_tree",
]
__version__ = "0.1.0"
