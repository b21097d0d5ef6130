"""Triton kernels for NVIDIA and AMD GPUs; with TRITON_INTERPRET=1 they run on a CPU, slowly, for tests.

Imported on first use, since Triton takes long to import and is not installed everywhere.
"""

from . import draft_children, draft_step, row_state, speculative_step, verify_tree

__all__ = ["draft_children", "draft_step", "row_state", "speculative_step", "verify_tree"]
