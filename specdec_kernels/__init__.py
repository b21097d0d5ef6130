"""Fused sampling and verification for speculative decoding, on raw logits. Knows nothing of models."""

from .api import check_drafts, draft_step, speculative_step
from .build import build_info
from .types import Backend, DraftStep, Rule, SamplingParams, SpeculativeStep, Status, TokenTable

__all__ = [
    "Backend",
    "DraftStep",
    "Rule",
    "SamplingParams",
    "SpeculativeStep",
    "Status",
    "TokenTable",
    "build_info",
    "check_drafts",
    "draft_step",
    "speculative_step",
]
__version__ = "0.1.0"
