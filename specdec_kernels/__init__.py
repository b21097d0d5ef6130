"""Fused sampling and verification for speculative decoding, on raw logits, and the layers that need operations of their
own. Knows nothing of models."""

from .api import draft_step, speculative_step
from .attend_api import attend, bytes_beside_caches, has_fused_attention, store_and_attend
from .build import build_info
from .elementwise_api import add_rms_norm, gated, rms_norm, rope_angles, rotate
from .int8_rows import pack_int8, unpack_int8
from .linear_api import add_linear, linear, linears, norm_linear
from .ops import SamplingTensors
from .packing import dequantise, interleave, quantise, rows_of_blocks
from .program_api import Program, native_form
from .recurrent_api import DeltaState, Feed, SsdState, conv_window, delta_step, ssd_step
from .threads import native_threads
from .tree_api import draft_children, verify_tree
from .types import (
    MOST_ATTENDING,
    Backend,
    DraftChildren,
    DraftStep,
    Packing,
    Rule,
    SamplingParams,
    SpeculativeStep,
    Status,
    TokenTable,
    TreeRule,
    TreeStep,
)

__all__ = [
    "MOST_ATTENDING",
    "Backend",
    "DeltaState",
    "DraftChildren",
    "DraftStep",
    "Feed",
    "Packing",
    "Program",
    "Rule",
    "SamplingParams",
    "SamplingTensors",
    "SpeculativeStep",
    "SsdState",
    "Status",
    "TokenTable",
    "TreeRule",
    "TreeStep",
    "add_linear",
    "add_rms_norm",
    "attend",
    "build_info",
    "bytes_beside_caches",
    "conv_window",
    "delta_step",
    "dequantise",
    "draft_children",
    "draft_step",
    "gated",
    "has_fused_attention",
    "interleave",
    "linear",
    "linears",
    "native_form",
    "native_threads",
    "norm_linear",
    "pack_int8",
    "quantise",
    "rms_norm",
    "rope_angles",
    "rotate",
    "rows_of_blocks",
    "speculative_step",
    "ssd_step",
    "store_and_attend",
    "unpack_int8",
    "verify_tree",
]
__version__ = "0.1.0"
