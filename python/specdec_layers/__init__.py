"""Operations of models' layers for the few tokens of a step of decoding. Knows nothing of sampling.

Products (:func:`linear`), attention over a static cache (:func:`store_and_attend`), norms and rotations, recurrent
layers whose rows can be rolled back, and programs, which run such operations without Python between them.
"""

from .attend_api import attend, bytes_beside_caches, has_fused_attention, store_and_attend
from .build import build_info
from .elementwise_api import add_rms_norm, gated, rms_norm, rope_angles, rotate
from .int8_rows import pack_int8, unpack_int8
from .linear_api import add_linear, linear, linears, norm_linear, stored_rows
from .ops import MOST_ATTENDING
from .packing import Packing, dequantise, interleave, quantise
from .program_api import Program, native_form
from .recurrent_api import DeltaState, Feed, SsdState, conv_window, delta_step, ssd_step
from .threads import native_threads

__all__ = [
    "MOST_ATTENDING",
    "DeltaState",
    "Feed",
    "Packing",
    "Program",
    "SsdState",
    "add_linear",
    "add_rms_norm",
    "attend",
    "build_info",
    "bytes_beside_caches",
    "conv_window",
    "delta_step",
    "dequantise",
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
    "ssd_step",
    "store_and_attend",
    "stored_rows",
    "unpack_int8",
]
