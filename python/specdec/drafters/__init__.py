"""Drafters propose tokens: their protocol, and one file for each drafter."""

from .protocol import Drafter, Drafts, DraftSession, DraftTree, Generation, Step

__all__ = ["DraftSession", "DraftTree", "Drafter", "Drafts", "Generation", "Step"]
