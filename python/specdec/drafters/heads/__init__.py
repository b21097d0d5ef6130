"""Heads: small networks that propose tokens from the target's own hidden states. One interface, and a file for each
format."""

from .drafter import HeadDrafter
from .load import load_embedded_head, load_head

__all__ = ["HeadDrafter", "load_embedded_head", "load_head"]
