"""Drafters propose tokens: their protocol, and one file for each drafter."""

from .protocol import BatchState, Copies, Drafter, Drafts, DraftSession, Step, Votes
from .tree_growth import TreeGrowth

__all__ = ["BatchState", "Copies", "DraftSession", "Drafter", "Drafts", "Step", "TreeGrowth", "Votes"]
