"""Drafters propose tokens: their protocol, and one file for each drafter."""

from .protocol import Drafter, Drafts, DraftSession, DraftTree, Generation, Step
from .tree_growth import TreeGrowth

__all__ = ["DraftSession", "DraftTree", "Drafter", "Drafts", "Generation", "Step", "TreeGrowth"]
