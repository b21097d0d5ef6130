// Exponential races by the threads of a block: among the blocks of a row, and among the tokens of a block.
#pragma once

#include "../core/accept.h"
#include "../core/random.h"
#include "blocks.h"

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

// By a warp: the best of its candidates.
SPECDEC_DEVICE Candidate best_of_warp(Candidate mine) {
  const uint32_t high = static_cast<uint32_t>(mine >> 32), best = simt::largest(high);
  return uint64_t{best} << 32 | simt::largest(high == best ? static_cast<uint32_t>(mine) : 0u);
}

// Of the shared memory of a block: what its warps tell each other. Two places in turn, so that one barrier is enough.
constexpr int kMostWarps = 16;
struct alignas(16) Slots {
  Candidate best[2][kMostWarps];
};

// By the threads of a block: the best of their candidates. `turn`: 0, 1, 0, 1, ... in consecutive calls.
SPECDEC_DEVICE Candidate best_of_block(Candidate mine, Slots* slots, int turn) {
  mine = best_of_warp(mine);
  if (lane() == 0) simt::write(&slots->best[turn][warp()], mine);
  simt::sync_block();
  return best_of_warp(lane() < num_warps() ? simt::read(&slots->best[turn][lane()]) : Candidate{0});
}

// By the threads of a block: calls function(i, rank) for each of n numbers in shared memory, which lesser ones pad to
// fours. The largest number has rank 0, and of equal ones the first comes first. `kShare` threads count for a number.
template <int kShare, class Function>
SPECDEC_DEVICE void for_ranks(const float* numbers, int n, const Function& function) {
  const int share = simt::thread() % kShare, at_once = simt::num_threads() / kShare;
#pragma unroll 1
  for (int first = 0; first < n; first += at_once) {
    const int i = first + simt::thread() / kShare;
    const float mine = simt::read(&numbers[i < n ? i : first]);
    uint32_t rank = 0;
#pragma unroll 2
    for (int at = 4 * share; at < n; at += 4 * kShare) {
      const Four others = Four::at(&numbers[at]);
#pragma unroll
      for (int k = 0; k < 4; ++k) rank += others.of[k] > mine || (others.of[k] == mine && at + k < i);
    }
    rank = simt::reduce<1, kShare / 2>(rank, [](uint32_t a, uint32_t b) { return a + b; });
    if (i < n && share == 0) function(i, rank);
  }
}

// The noise of an index, alone: one of four words.
SPECDEC_DEVICE float exponential_of(uint32_t index, Noise noise, Stream stream) {
  const Words words = philox(noise.seed, index / 4, noise.position, noise.offset, stream);
  // Not word[index % 4], since an array with a variable index would lie in memory.
  const uint32_t low = index % 2 == 0 ? words.word[0] : words.word[1],
                 high = index % 2 == 0 ? words.word[2] : words.word[3];
  return exponential(uniform(index % 4 < 2 ? low : high));
}

// Four tokens, the first of which has an index that is a multiple of four, race with the noise of these indices.
SPECDEC_DEVICE Candidate race_of_four(const float (&weights)[4], uint32_t index, Noise noise, Stream stream) {
  const Words words = philox(noise.seed, index / 4, noise.position, noise.offset, stream);
  Candidate best = 0;
#pragma unroll
  for (uint32_t k = 0; k < 4; ++k) {
    best = Better()(best, candidate(simt::quotient(weights[k], exponential(uniform(words.word[k]))), index + k));
  }
  return best;
}

// By the threads of a block: draws one of a block's 1024 tokens by weight_of(token); -1 if all weights are 0. A thread
// takes four neighbours.
template <class Weight>
SPECDEC_DEVICE int64_t race_in_block(int block, Noise noise, Stream stream, Slots* slots, int turn,
                                     const Weight& weight_of) {
  Candidate best = 0;
#pragma unroll 1
  for (int place = 4 * simt::thread(); place < kBlock; place += 4 * simt::num_threads()) {
    const int64_t first = int64_t{block} * kBlock + place;
    float weights[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) weights[k] = weight_of(first + k);
    best = Better()(best, race_of_four(weights, static_cast<uint32_t>(first), noise, stream));
  }
  return index_of(best_of_block(best, slots, turn));
}

// The weight of a logit relative to another one, by the GPU's own exponential; the one in core/softmax.h is for CPUs.
SPECDEC_DEVICE float weight_of(float logit, float reference, float scale) {
  return simt::exp2_of((logit - reference) * scale);
}

// The mass of a block relative to the row's largest logit.
SPECDEC_DEVICE float mass_of(Stats block, float max, float scale) {
  return block.sum * weight_of(block.max, max, scale);
}

// By the threads of a block: draws one of a row's n blocks by their masses; -1 if there is none.
SPECDEC_DEVICE int race_among_blocks(const Stats* stats, int n, float max, float scale, Noise noise, Stream stream,
                                     Slots* slots, int turn) {
  Candidate best = 0;
#pragma unroll 1
  for (int block = simt::thread(); block < n; block += simt::num_threads()) {
    const uint32_t index = static_cast<uint32_t>(block);
    const float mass = mass_of(simt::fresh(&stats[block]), max, scale);
    best = Better()(best, candidate(simt::quotient(mass, exponential_of(index, noise, stream)), index));
  }
  return static_cast<int>(index_of(best_of_block(best, slots, turn)));
}

// By a warp: the first block that has the row's largest logit.
SPECDEC_DEVICE int block_of_max(const Stats* stats, int n, float max) {
  Candidate first = 0;
#pragma unroll 1
  for (int i = lane(); i < n; i += kWarp) {
    if (simt::fresh(&stats[i]).max == max) first = Better()(first, candidate(1.0f, static_cast<uint32_t>(i)));
  }
  return static_cast<int>(index_of(best_of_warp(first)));
}

}  // namespace specdec::cuda
