"""Random numbers by Philox, and exponential races with them, function by function as in csrc/core/random.h."""

import triton
import triton.language as tl

# Streams: the last word of Philox' counter. No two kinds of decision share noise.
DRAFT_BLOCK = tl.constexpr(0)
DRAFT_TOKEN = tl.constexpr(1)
ACCEPT = tl.constexpr(2)
RECOVER_BLOCK = tl.constexpr(3)
RECOVER_TOKEN = tl.constexpr(4)
RACE = tl.constexpr(5)  # rule `coupled`, where draft and target share it on purpose; its offset is always 0


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
    """[N] words for the indices first .. first + N - 1; first and N are multiples of 4, as a Philox call gives four."""
    call = (first // 4 + tl.arange(0, N // 4)).to(tl.uint32)
    zero = call * 0
    c1, c2, c3 = zero + position.to(tl.uint32), zero + offset.to(tl.uint32), zero + stream
    w0, w1, w2, w3 = tl.philox(seed, call, c1, c2, c3)
    return tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [N])  # index 4 c + i has word i of call c


@triton.jit
def random_bits_of(index, seed, position, offset, stream: tl.constexpr):
    """The words of arbitrary indices, at four times the work of ``random_bits``."""
    call = (index // 4).to(tl.uint32)
    zero, word = call * 0, index % 4
    c1, c2, c3 = zero + position.to(tl.uint32), zero + offset.to(tl.uint32), zero + stream
    w0, w1, w2, w3 = tl.philox(seed, call, c1, c2, c3)
    return tl.where(word < 2, tl.where(word == 0, w0, w1), tl.where(word == 2, w2, w3))


@triton.jit
def noise(first, N: tl.constexpr, seed, position, offset, stream: tl.constexpr):
    """[N] Exp(1) variates, those of the indices first .. first + N - 1."""
    return exponential(uniform(random_bits(first, N, seed, position, offset, stream)))


@triton.jit
def noise_of(index, seed, position, offset, stream: tl.constexpr):
    """The same of arbitrary indices. Of few of them this is faster, as no numbers have to change places."""
    return exponential(uniform(random_bits_of(index, seed, position, offset, stream)))


@triton.jit
def race_of_blocks(mass, seed, position, offset, stream: tl.constexpr):
    """The first level of a race: the block that wins, of [N] masses; -1 if all are 0."""
    score = mass / noise_of(tl.arange(0, mass.shape[0]), seed, position, offset, stream)
    return tl.where(tl.max(score, 0) > 0, tl.argmax(score, 0).to(tl.int32), -1)


@triton.jit
def race(weights, first, N: tl.constexpr, seed, position, offset, stream: tl.constexpr):
    """Exponential race: the index (from 0) of the smallest E / w, as the largest w / E; -1 if all weights are 0."""
    score = weights / noise(first, N, seed, position, offset, stream)
    best = tl.max(score, 0)
    return tl.where(best > 0, tl.min(tl.where(score == best, tl.arange(0, N), N), 0), -1)


@triton.jit
def accept_noise(seed, position, offset):
    """u in (0, 1) of one offset or several: the random numbers that test drafts, word 0 of a call each."""
    zero = (offset * 0).to(tl.uint32)
    w0, w1, w2, w3 = tl.philox(seed, zero, zero + position.to(tl.uint32), zero + offset.to(tl.uint32), zero + ACCEPT)
    return uniform(w0)
