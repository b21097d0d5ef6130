"""Helpers that tests of several rooms share."""

from pathlib import Path

BACKENDS = ("reference", "cpu", "triton", "cuda")
FAST_BACKENDS = BACKENDS[1:]  # those that are compared with the reference
TREE_BACKENDS = BACKENDS[:3]  # those that have trees, and recurrent layers
ROOT = Path(__file__).resolve().parents[2]
