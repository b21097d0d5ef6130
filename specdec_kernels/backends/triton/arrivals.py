"""The last of a sequence's programs to arrive decides for all of them, so that no further launch is needed.

Programs run in any order, and some after others have ended; none waits. Each stores its part, then counts itself; who
counts last knows that every part is there. The launch before sets the counters to 0: a launch starts after all stores
of the one before it.
"""

import triton
import triton.language as tl


@triton.jit
def expect_arrivals(arrivals_ptr, b):
    """Nobody has arrived yet, for the programs of the next launch."""
    tl.store(arrivals_ptr + b, 0)


@triton.jit
def arrives_last(arrivals_ptr, b, expected):
    """Whether this program is the last of the ``expected`` ones of sequence b, each of which calls this once: then it
    sees what all of them stored before. Releasing makes its own stores visible to who counts later, and acquiring those
    of who counted before; one thread counts, so barriers tie the other threads to it."""
    tl.debug_barrier()  # every thread has stored before it counts
    before = tl.atomic_add(arrivals_ptr + b, 1, sem="acq_rel", scope="gpu")
    tl.debug_barrier()  # no thread loads before it has counted
    return before == expected - 1
