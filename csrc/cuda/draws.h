// Exponential races by a warp: among blocks, within a block, and the one-level race of rule `coupled`.
#pragma once

#include "../core/random.h"
#include "stats.h"

namespace specdec::cuda {

struct Noise {
  uint64_t seed;
  uint32_t position;
  uint32_t offset;
};

// The best w / E of a race and its index, in one number of which the larger wins. A tie goes to the lowest index. 0
// stands for no winner.
using Candidate = uint64_t;

SPECDEC_HD Candidate candidate(float score, uint32_t index) {
  return score > 0.0f ? uint64_t{as_bits(score)} << 32 | (0xffffffffu - index) : 0;
}

SPECDEC_HD float score_of(Candidate best) { return as_float(static_cast<uint32_t>(best >> 32)); }
SPECDEC_HD int64_t index_of(Candidate best) {
  return best == 0 ? -1 : int64_t{0xffffffffu - static_cast<uint32_t>(best)};
}

struct Better {
  SPECDEC_HD Candidate operator()(Candidate a, Candidate b) const { return a > b ? a : b; }
};

// By a warp: the best of n candidates in memory.
SPECDEC_DEVICE Candidate best_of(const Candidate* candidates, int n) {
  Candidate best = 0;
  for (int i = simt::thread() % kWarp; i < n; i += kWarp) best = Better()(best, simt::read(&candidates[i]));
  return simt::reduce(best, Better());
}

// w / E, without the detour that a division makes for 0.
SPECDEC_DEVICE float score(float weight, float exponential) {
  const float quotient = (weight > 0.0f ? weight : 1.0f) / exponential;
  return weight > 0.0f ? quotient : 0.0f;
}

// A warp's part of a block: of the groups of four neighbours that a thread holds, those with a bit.
struct Part {
  uint32_t groups = 0xff;

  // Every step-th group from `first` on.
  SPECDEC_DEVICE static Part of(int first, int step) {
    uint32_t groups = 0;
    for (int group = first; group < kEach / 4; group += step) groups |= 1u << group;
    return {groups};
  }
  SPECDEC_DEVICE bool has(int i) const { return groups >> i / 4 & 1; }
};
static_assert(kEach / 4 == 8);

// Draws an index in [0, n) by these weights; -1 if all are 0.
SPECDEC_DEVICE int64_t race_among(const float* weights, int n, Noise noise, Stream stream) {
  Candidate best = 0;
  for (int i = 4 * (simt::thread() % kWarp); i < n; i += 4 * kWarp) {
    const Words words = philox(noise.seed, static_cast<uint32_t>(i / 4), noise.position, noise.offset, stream);
    for (int k = 0; k < 4 && i + k < n; ++k) {
      const float its = score(simt::read(&weights[i + k]), exponential(uniform(words.word[k])));
      best = Better()(best, candidate(its, static_cast<uint32_t>(i + k)));
    }
  }
  return index_of(simt::reduce(best, Better()));
}

// Whether a token of this weight can beat `best` with the smallest possible E, 2^-33.
SPECDEC_HD bool can_beat(Candidate best, float weight) {
  return weight > 0.0f && weight * 0x1.01p33f >= score_of(best);
}

// The best of `before` and of a part of a block whose weights the warp holds. A thread whose tokens cannot win draws no
// random numbers; often no thread of the warp needs any.
SPECDEC_DEVICE Candidate race_in_block(const float (&weights)[kEach], int block, Noise noise, Stream stream,
                                       Candidate before, Part part = {}) {
  Candidate best = before;
#pragma unroll
  for (int i = 0; i < kEach; i += 4) {
    if (!part.has(i)) continue;
    float largest = weights[i];
    for (int k = 1; k < 4; ++k) largest = weights[i + k] > largest ? weights[i + k] : largest;
    if (!can_beat(best, largest)) continue;
    const uint32_t index = static_cast<uint32_t>(block) * kBlock + static_cast<uint32_t>(place_of(i));
    const Words words = philox(noise.seed, index / 4, noise.position, noise.offset, stream);
    for (int k = 0; k < 4; ++k) {
      const float its = score(weights[i + k], exponential(uniform(words.word[k])));
      best = Better()(best, candidate(its, index + static_cast<uint32_t>(k)));
    }
  }
  return simt::reduce(best, Better());
}

// The same with the noise of the target's ids. Each of them needs its own Philox call.
SPECDEC_DEVICE Candidate race_by_target_ids(const float (&weights)[kEach], int block, const int64_t* d2t, Noise noise,
                                            Candidate before) {
  Candidate best = before;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    if (!can_beat(best, weights[i])) continue;
    const uint32_t index = static_cast<uint32_t>(block) * kBlock + static_cast<uint32_t>(place_of(i));
    const uint32_t id = static_cast<uint32_t>(d2t[index]);
    const Words words = philox(noise.seed, id / 4, noise.position, noise.offset, kRace);
    // Not word[id % 4], since an array with a variable index would lie in memory.
    const uint32_t low = id % 2 == 0 ? words.word[0] : words.word[1],
                   high = id % 2 == 0 ? words.word[2] : words.word[3];
    const float its = score(weights[i], exponential(uniform(id % 4 < 2 ? low : high)));
    best = Better()(best, candidate(its, index));
  }
  return simt::reduce(best, Better());
}

// Turns the logits of a part of a block into weights relative to `max`, 0 below the cutoff.
SPECDEC_DEVICE void weights_above(float (&x)[kEach], float max, float inverse_temperature, float cutoff,
                                  Part part = {}) {
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    if (part.has(i)) x[i] = x[i] >= cutoff ? weight_of(x[i], max, inverse_temperature) : 0.0f;
  }
}

}  // namespace specdec::cuda
