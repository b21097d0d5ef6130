"""Drafters propose tokens: their protocol, and one file for each drafter."""

from .protocol import BatchState, Drafter, Drafts, DraftSession, Step
from .tree_growth import TreeGrowth

__all__ = ["BatchState", "DraftSession", "Drafter", "Drafts", "Step", "TreeGrowth"]
