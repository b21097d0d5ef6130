"""Lets the last program of a sequence to finish its part decide for the sequence, which saves one launch.

Programs run in any order, some only after others have ended, so none may wait for another. Each stores its part, then
increments the sequence's counter; the one that counts last knows that all parts are stored. The preceding launch sets
the counters to 0: all its stores are visible when the next launch starts.
"""

import triton
import triton.language as tl


@triton.jit
def expect_arrivals(arrivals_ptr, b):
    """Sets the counter of sequence b to 0 for the programs of the next launch."""
    tl.store(arrivals_ptr + b, 0)


@triton.jit
def arrives_last(arrivals_ptr, b, expected):
    """Whether this program is the last of the ``expected`` ones of sequence b, each of which calls this once. The last
    one sees all that the others stored before their calls: release makes a program's stores visible to those that count
    later, and acquire makes those of earlier programs visible here. A single thread counts, so barriers order the
    program's other threads around it."""
    tl.debug_barrier()  # every thread has stored before it counts
    before = tl.atomic_add(arrivals_ptr + b, 1, sem="acq_rel", scope="gpu")
    tl.debug_barrier()  # no thread loads before it has counted
    return before == expected - 1
