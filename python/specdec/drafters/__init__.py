"""Drafters propose tokens: their protocol, and one file for each drafter."""

from .protocol import Drafter, Drafts, DraftSession, Generation, Step

__all__ = ["DraftSession", "Drafter", "Drafts", "Generation", "Step"]
