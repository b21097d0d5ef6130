"""The mathematics of the kernels, function by function as in csrc/core. docs/numerics.md states the same rules.

Penalties, softmax of blocks of 1024 logits, filters as cutoffs, accept rules; random.py has noise and races. All
functions take values in registers; rows.py loads and stores.
"""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
BLOCK = tl.constexpr(1024)  # consecutive vocabulary entries that race as one; the same in all backends

# Indices in specdec_kernels.ops.RULES.
TOKEN_RULE = tl.constexpr(0)
BLOCK_RULE = tl.constexpr(1)
COUPLED_RULE = tl.constexpr(2)

# Indices in specdec_kernels.ops.TREE_RULES.
TREE_WALK = tl.constexpr(0)
TREE_TOKEN = tl.constexpr(1)
TREE_BLOCK = tl.constexpr(2)

# specdec_kernels.Status
TARGET_NAN = tl.constexpr(1)
TARGET_POSITIVE_INFINITY = tl.constexpr(2)
TARGET_EMPTY = tl.constexpr(4)
DRAFT_FLAG_FACTOR = tl.constexpr(8)  # TARGET_X * 8 == DRAFT_X
DRAFT_ZERO_PROBABILITY = tl.constexpr(64)
DRAFT_OUT_OF_RANGE = tl.constexpr(128)

INFINITY = tl.constexpr(float("inf"))
LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-2139095041)  # ordered_key(-inf)


# ---- The distribution of a row (core/distribution.h, core/softmax.h) -----------------------------------------


@triton.jit
def rounded_product(a, b):
    """a * b, rounded: compilers would contract a product and a sum to an operation that rounds once."""
    return tl.fma(a, b, 0.0)


@triton.jit
def adjust(logit, bias, in_prompt, count, repetition, presence, frequency):
    """The logit of a token after its bias and penalties; ``count`` is how often it was generated. Repetition penalty:
    Keskar et al., arXiv 1909.05858. Every operation rounds as in all backends, so that ties are ties in all of them."""
    x = logit + bias
    repeated = tl.where(x < 0.0, rounded_product(x, repetition), tl.div_rn(x, repetition))
    x = tl.where((in_prompt != 0) | (count > 0), repeated, x)
    return tl.where(count > 0, x - presence - rounded_product(frequency, count.to(tl.float32)), x)


@triton.jit
def weight(logit, reference, inverse_temperature):
    """exp((l - reference) / T), the weight relative to another logit. If the reference is -inf, all weights are 0."""
    difference = logit - tl.where(reference == -INFINITY, 0.0, reference)
    return tl.exp2(difference * (inverse_temperature * LOG2E))


@triton.jit
def log_probability(logit, inverse_temperature, lse, cutoff):
    """log p(v) = l / T - lse. l / T is rounded as in lse: where it is so large that rounding is worth whole nats, the
    largest logit would have any probability otherwise. ``cutoff``: None where nothing filters."""
    log_p = rounded_product(logit, inverse_temperature) - lse
    return log_p if cutoff is None else tl.where(logit >= cutoff, log_p, -INFINITY)


@triton.jit
def probability(logit, inverse_temperature, lse, cutoff):
    return tl.exp2(log_probability(logit, inverse_temperature, lse, cutoff) * LOG2E)


@triton.jit
def inverse(temperature):
    """1 / T; 1 at temperature 0, where weights are not used."""
    return 1.0 / tl.where(temperature == 0.0, 1.0, temperature)


@triton.jit
def larger(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def largest_of(x, axis: tl.constexpr):
    """The largest number along an axis; NaN if any is NaN."""
    if INTERPRETED:  # which takes long for a reduction of one's own
        return tl.where(
            tl.max((x != x).to(tl.int32), axis) > 0, float("nan"), tl.max(tl.where(x != x, -INFINITY, x), axis)
        )
    else:
        return tl.reduce(x, axis, larger)


@triton.jit
def add_pairs(x, NEAR: tl.constexpr):
    """Halves the last axis of x [N, M] by adding neighbours, or the second half to the first."""
    N: tl.constexpr = x.shape[0]
    M: tl.constexpr = x.shape[1]
    if NEAR:
        return tl.sum(tl.reshape(x, [N, M // 2, 2]), 2)
    else:
        return tl.sum(tl.reshape(x, [N, 2, M // 2]), 1)


@triton.jit
def sums_of_blocks(x, THREAD_FIRST: tl.constexpr):
    """[N] sums of x [N, 1024], with the same bits in any layout and thus for any alignment and number of warps: a sum
    of two numbers is the same in either order. With THREAD_FIRST, quarters of a block are added early, which is fast
    where a thread has numbers of all of them."""
    if THREAD_FIRST:
        x = add_pairs(add_pairs(x, False), False)
    for _level in tl.static_range(3):
        x = add_pairs(x, True)
    for _level in tl.static_range(4 if THREAD_FIRST else 6):
        x = add_pairs(x, True)
    return tl.sum(x, 1)


@triton.jit
def blocks_stats(x, temperature):
    """Of every row of x [N, 1024], a block: (its largest logit, NaN if any is NaN; the sum of the weights relative to
    it). A weight takes one product and sum, fma(x, scale, -offset), that is rounded once; what ``offset`` lost to its
    rounding is made good in the sum. The limit of ``scale`` changes no weight: at 2^30, the next float below the
    largest logit weighs 2^-64 of it."""
    largest = largest_of(x, 1)
    reference = tl.where(largest == -INFINITY, 0.0, largest)
    scale = tl.where(temperature == 0.0, 0.0, LOG2E / temperature)
    scale = tl.minimum(scale, 1073741824.0 / tl.abs(reference))
    offset = reference * scale
    lost = tl.fma(reference, scale, -offset)
    total = sums_of_blocks(tl.exp2(tl.fma(x, scale[:, None], -offset[:, None])), True) * tl.exp2(-lost)
    return largest, tl.where(temperature == 0.0, 0.0, total)


@triton.jit
def sum_of_masses(mass):
    """The sums along the last axis of masses relative to a row's largest logit, with the same bits in any layout and
    thus in all kernels: of pairs, and then as integers, which may be added in any order."""
    mass = tl.where(mass == mass, mass, 0.0)  # NaN: the row's largest logit tells
    axis: tl.constexpr = len(mass.shape) - 1
    for _pairs in tl.static_range(2):
        if axis == 0:
            mass = tl.sum(tl.reshape(mass, [mass.shape[0] // 2, 2]), 1)
        else:
            mass = tl.sum(tl.reshape(mass, [mass.shape[0], mass.shape[1] // 2, 2]), 2)
    return tl.sum((mass * 1099511627776.0).to(tl.int64), axis).to(tl.float32) * 9.094947017729282e-13  # 2^40, 2^-40


@triton.jit
def merge(block_max, block_sum, temperature, axis: tl.constexpr):
    """Of the blocks along an axis: (a row's largest logit, NaN if any is NaN; its lse, at temperature 0 the largest
    logit; the masses of its blocks relative to the largest logit)."""
    largest = largest_of(block_max, axis)
    mass = block_sum * weight(block_max, tl.expand_dims(largest, axis), inverse(temperature))
    lse = rounded_product(largest, inverse(temperature)) + tl.log(sum_of_masses(mass))
    return largest, tl.where(temperature == 0.0, largest, lse), mass


@triton.jit
def ordered_key(x):
    """int32 keys in the order of the floats. Both zeros have the same key, since they compare equal to a cutoff."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def from_ordered_key(key):
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def min_p_cutoff(largest, temperature, min_p):
    """min-p (Nguyen et al., arXiv 2407.01082) as a logit: p(v) >= min_p p_max. min_p = 0 gives -inf."""
    return largest + temperature * tl.log(min_p)


# ---- Decisions (core/accept.h) -------------------------------------------------------------------------------


@triton.jit
def row_fault(largest):
    """The target flag of a row with this largest l / T, at temperature 0 its largest logit; 0 if the row has a
    distribution."""
    fault = tl.where(largest == INFINITY, TARGET_POSITIVE_INFINITY, 0)
    fault = tl.where(largest == -INFINITY, TARGET_EMPTY, fault)
    return tl.where(largest != largest, TARGET_NAN, fault)


@triton.jit
def accept(u, log_p, log_q):
    """u q(x) < p(x). A draft with p(x) = q(x) is always accepted, one with p(x) = 0 never."""
    return u < tl.exp(log_p - log_q)


@triton.jit
def joint_ratio(w, log_p, log_q):
    """Rule `block` (Sun et al., arXiv 2403.10444, Algorithm 2): the joint ratio of a prefix with joint ratio ``w`` and
    one more draft."""
    longer = tl.where(w > 0.0, w * tl.exp(log_p - log_q), 0.0)  # 0 stays 0, even if the ratio is infinite
    return tl.where(longer < 1.0, longer, 1.0)


@triton.jit
def keep_probability(w, mass):
    """The probability of keeping a prefix of joint ratio ``w``, given that no longer one is kept. ``mass`` is that of
    the residual of the row after it, sum max(0, w p - q). If p = q at w = 1 there is none, and the prefix is kept."""
    either = mass + (1.0 - w)
    return tl.where(either > 0.0, mass / tl.where(either > 0.0, either, 1.0), 1.0)


@triton.jit
def residual(w, p, q):
    """max(0, w p - q); 0 if q is NaN. Rounded once wherever it is compiled, so that a block whose sum has a mass has a
    token with one."""
    return tl.maximum(tl.fma(w, p, -q), 0.0)


# ---- Rejected siblings in a tree (core/tree.h) ---------------------------------------------------------------
# After rejections, p is max(0, p - t q) of the row's own p and q, divided by its ``mass``, and q is that without the
# rejected children, divided by what is ``left`` of it. ``scale`` is 1 / t, infinite before the first rejection, and
# ``h`` the joint ratio of the path to the row, always 1 in rule `token`.


@triton.jit
def child_ratio(h, scale, mass, left, log_p, log_q):
    """h p(x) / q(x) for the next child x, with p and q as they are after the rejections."""
    beyond = tl.exp(log_p - log_q) - 1.0 / scale
    return tl.where(beyond > 0.0, h * beyond * left / mass, 0.0)


@triton.jit
def next_scale(h, scale, mass, left):
    """The scale after another rejection. The first one's is h, as in a chain."""
    of_child = h * left
    return of_child / (of_child / scale + mass)


@triton.jit
def ratio_after_rejection(h, mass, new_scale, weight):
    """Rule `block`: h after another rejection, of which ``weight`` = sum max(0, new_scale p - q) is left."""
    return keep_probability(h, weight * (h / (new_scale * mass)))
