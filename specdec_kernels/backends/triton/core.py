"""The mathematics on the device: csrc/core name by name. docs/numerics.md states the same rules.

Blocks of 1024 consecutive logits, exponential races over Philox noise, the accept rule. Every function takes values in
registers; operations load and store.
"""

import triton
import triton.language as tl

BLOCK = tl.constexpr(1024)  # consecutive vocabulary entries that race as one; a constant of the contract

# Streams: the last word of the counter. No two kinds of decision share noise.
DRAFT_BLOCK = tl.constexpr(0)
DRAFT_TOKEN = tl.constexpr(1)
ACCEPT = tl.constexpr(2)
RECOVER_BLOCK = tl.constexpr(3)
RECOVER_TOKEN = tl.constexpr(4)

# specdec_kernels.Status
TARGET_NAN = tl.constexpr(1)
TARGET_POSITIVE_INFINITY = tl.constexpr(2)
TARGET_EMPTY = tl.constexpr(4)
DRAFT_FLAG_FACTOR = tl.constexpr(8)  # TARGET_X * 8 == DRAFT_X
DRAFT_ZERO_PROBABILITY = tl.constexpr(64)
DRAFT_OUT_OF_RANGE = tl.constexpr(128)

INFINITY = tl.constexpr(float("inf"))
LOG2E = tl.constexpr(1.4426950408889634)


# ---- Random numbers (core/random.h) --------------------------------------------------------------------------


@triton.jit
def uniform(bits):
    """u in the open interval (0, 1). Small u keep their resolution: down to 2^-33, not 2^-24."""
    u = (bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 2^-32
    return tl.minimum(u, 0.99999994)  # 1 - 2^-24


@triton.jit
def exponential(u):
    """-log1p(-u): an Exp(1) variate. 1 - u = 2^k (1 + f) with f exact, so that small results, which win races, have
    full relative precision."""
    k = ((1.0 - u).to(tl.int32, bitcast=True) - 0x3F400000) >> 23  # bits of 0.75
    scale = (0x3F800000 - (k << 23)).to(tl.float32, bitcast=True)  # 2^-k
    f = (scale - 1.0) - u * scale
    r = -0.045074712 * f + 0.1046302
    r = r * f - 0.13161199
    r = r * f + 0.14478397
    r = r * f - 0.16647312
    r = r * f + 0.19990861
    r = r * f - 0.25000095
    r = r * f + 0.3333345
    r = r * f - 0.5
    return -(k.to(tl.float32) * 0.69314718 + (r * f * f + f))


@triton.jit
def random_bits(first, N: tl.constexpr, seed, position, offset, stream: tl.constexpr):
    """[N] words for the indices first .. first + N - 1, multiples of 4: all four words of a Philox call are used."""
    call = (first // 4 + tl.arange(0, N // 4)).to(tl.uint32)
    zero = call * 0
    c1, c2, c3 = zero + position.to(tl.uint32), zero + offset.to(tl.uint32), zero + stream
    w0, w1, w2, w3 = tl.philox(seed, call, c1, c2, c3)
    return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [N])  # index 4 c + i has word i of call c


@triton.jit
def race(weights, first, N: tl.constexpr, seed, position, offset, stream: tl.constexpr):
    """Exponential race: the index (from 0) with the smallest E / w, as the largest w / E; -1 if all weights are 0."""
    score = weights / exponential(uniform(random_bits(first, N, seed, position, offset, stream)))
    return tl.where(tl.max(score, 0) > 0, tl.argmax(score, 0).to(tl.int32), -1)


# ---- Statistics of rows (core/softmax.h) ---------------------------------------------------------------------


@triton.jit
def load_block(row_ptr, block, vocabulary):
    """[1024] logits of a block as float32, padded with -inf."""
    index = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    return tl.load(row_ptr + index, mask=index < vocabulary, other=-INFINITY).to(tl.float32)


@triton.jit
def weight(logit, reference, inverse_temperature):
    """Relative to another logit: exp((l - reference) / T). A reference of -inf means that all weights are 0."""
    difference = logit - tl.where(reference == -INFINITY, 0.0, reference)
    return tl.exp2(difference * (inverse_temperature * LOG2E))


@triton.jit
def log_probability(logit, inverse_temperature, lse):
    return logit * inverse_temperature - lse


@triton.jit
def probability(logit, inverse_temperature, lse):
    return tl.exp2(log_probability(logit, inverse_temperature, lse) * LOG2E)


@triton.jit
def inverse(temperature):
    """1 / T; 1 at temperature 0, where nothing is weighed."""
    return 1.0 / tl.where(temperature == 0.0, 1.0, temperature)


@triton.jit
def block_stats(x, temperature):
    """(largest logit, NaN if any is; sum of the weights relative to it) of one block."""
    any_nan = tl.max((x != x).to(tl.int32), 0) > 0
    largest = tl.max(tl.where(x != x, -INFINITY, x), 0)
    total = tl.sum(weight(x, largest, inverse(temperature)), 0)
    return tl.where(any_nan, float("nan"), largest), tl.where(temperature == 0.0, 0.0, total)


@triton.jit
def merge(block_max, block_sum, temperature):
    """A row's (largest logit, NaN if any is; lse, at temperature 0 that logit; masses of its blocks, relatively)."""
    any_nan = tl.max((block_max != block_max).to(tl.int32), 0) > 0
    largest = tl.max(tl.where(block_max != block_max, -INFINITY, block_max), 0)
    mass = block_sum * weight(block_max, largest, inverse(temperature))
    lse = tl.where(temperature == 0.0, largest, largest * inverse(temperature) + tl.log(tl.sum(mass, 0)))
    return tl.where(any_nan, float("nan"), largest), lse, mass


@triton.jit
def load_row(max_ptr, sum_ptr, row, num_blocks, temperature, BLOCKS: tl.constexpr):
    """``merge`` of the statistics that ``store_block_stats`` wrote for a row, and the [BLOCKS] maxima."""
    block = tl.arange(0, BLOCKS)
    at = row * num_blocks + block
    block_max = tl.load(max_ptr + at, mask=block < num_blocks, other=-INFINITY)
    block_sum = tl.load(sum_ptr + at, mask=block < num_blocks, other=0.0)
    largest, lse, mass = merge(block_max, block_sum, temperature)
    return largest, lse, mass, block_max


@triton.jit
def store_block_stats(row_ptr, block, vocabulary, temperature, max_ptr, sum_ptr, at):
    largest, total = block_stats(load_block(row_ptr, block, vocabulary), temperature)
    tl.store(max_ptr + at, largest)
    tl.store(sum_ptr + at, total)


# ---- Decisions and draws (core/accept.h) ---------------------------------------------------------------------


@triton.jit
def row_fault(largest):
    """What is wrong with a row whose largest logit this is, as a target flag."""
    fault = tl.where(largest == INFINITY, TARGET_POSITIVE_INFINITY, 0)
    fault = tl.where(largest == -INFINITY, TARGET_EMPTY, fault)
    return tl.where(largest != largest, TARGET_NAN, fault)


@triton.jit
def accept(u, log_p, log_q):
    """u q(x) < p(x): equal p and q are always accepted, p(x) = 0 never."""
    return u < tl.exp(log_p - log_q)


@triton.jit
def residual(p, q):
    """max(0, p - q). A NaN in q counts as no weight."""
    difference = p - q
    return tl.where(difference > 0.0, difference, 0.0)


@triton.jit
def argmax(row_ptr, vocabulary, block_max, largest, BLOCKS: tl.constexpr):
    """The token of the largest logit; the lowest id of a tie."""
    block = tl.min(tl.where(block_max == largest, tl.arange(0, BLOCKS), BLOCKS), 0)
    x = load_block(row_ptr, block, vocabulary)
    return block.to(tl.int64) * BLOCK + tl.min(tl.where(x == largest, tl.arange(0, BLOCK), BLOCK), 0)


@triton.jit
def draw(
    row_ptr,
    vocabulary,
    mass,
    block_max,
    largest,
    temperature,
    without,
    seed,
    position,
    offset,
    BLOCKS: tl.constexpr,
    BLOCK_STREAM: tl.constexpr,
    TOKEN_STREAM: tl.constexpr,
):
    """Draws a token from softmax(l / T) with token ``without`` (or -1) taken out; -1 if nothing has weight."""
    blocks, tokens = tl.arange(0, BLOCKS), tl.arange(0, BLOCK)
    if without >= 0:
        block = (without // BLOCK).to(tl.int32)
        its_max = tl.sum(tl.where(blocks == block, block_max, 0.0), 0)
        w = weight(load_block(row_ptr, block, vocabulary), its_max, inverse(temperature))
        w = tl.where(tokens == without % BLOCK, 0.0, w)
        its_mass = tl.sum(w, 0) * weight(its_max, largest, inverse(temperature))
        mass = tl.where(blocks == block, its_mass, mass)
    winner = race(mass, 0, BLOCKS, seed, position, offset, BLOCK_STREAM)
    token = tl.full([], -1, tl.int64)
    if winner >= 0:
        its_max = tl.sum(tl.where(blocks == winner, block_max, 0.0), 0)
        w = weight(load_block(row_ptr, winner, vocabulary), its_max, inverse(temperature))
        first = winner.to(tl.int64) * BLOCK
        w = tl.where(first + tokens == without, 0.0, w)
        token = race(w, first, BLOCK, seed, position, offset, TOKEN_STREAM).to(tl.int64)
        token = tl.where(token >= 0, first + token, -1)
    return token


@triton.jit
def residual_weights(p_ptr, p_lse, q_ptr, q_lse, block, vocabulary, temperature):
    """[1024] weights max(0, p - q) of one block."""
    p = probability(load_block(p_ptr, block, vocabulary), inverse(temperature), p_lse)
    q = probability(load_block(q_ptr, block, vocabulary), inverse(temperature), q_lse)
    return residual(p, q)
