// What a pass over a block does for top-p besides its statistics, and the sample that tells this pass where to look.
#pragma once

#include <bit>

#include "block_sums.h"

namespace specdec::cpu {

SPECDEC_BODY BlockStats mark_of_floats(const float* x, int64_t n, float inverse_temperature, const void* next,
                                       float mark, float* above) {
  float sum[kLanes] = {};
  const auto look = [&](int64_t i, int lane, float w)
                        __attribute__((always_inline)) { sum[lane] += x[i + lane] > mark ? w : 0.0f; };
  const BlockStats stats = stats_of_floats(x, n, inverse_temperature, nullptr, next, look);
  *above = sum_of_lanes(sum);
  return stats;
}

SPECDEC_BODY bool holds(Bracket bracket, float x) { return (x >= bracket.low) & !(x > bracket.high); }

SPECDEC_BODY BlockStats split_of_floats(const float* x, int64_t n, float inverse_temperature, float* lanes,
                                        const void* next, Bracket bracket, Split* split) {
  float above[kLanes] = {};
  uint32_t inside[kLanes] = {};  // of each lane, a bit for each of its logits
  const auto look = [&](int64_t i, int lane, float w) __attribute__((always_inline)) {
    const float each = x[i + lane];
    above[lane] = each > bracket.high ? above[lane] + w : above[lane];
    inside[lane] |= 1u << i / kLanes & -static_cast<uint32_t>(holds(bracket, each));
  };
  const BlockStats stats = stats_of_floats(x, n, inverse_temperature, lanes, next, look);
  split->above = sum_of_lanes(above);
  if (bracket.low == bracket.high) {
    split->count = 0;
    for (int lane = 0; lane < kLanes; ++lane) split->count += std::popcount(inside[lane]);
    return stats;
  }
  const uint64_t last = uint64_t{1} << (kLanes - 1 + n / kLanes);  // keeps a word from being 0, and is a logit
  int count = 0;
  for (int lane = 0; lane < kLanes && count <= Split::kMost; lane += 2) {
    uint64_t bits = inside[lane] | uint64_t{inside[lane + 1]} << 32;
    const int end = count + std::popcount(bits);
    // Always four at a time, of which some may be none: a branch for each would be mispredicted.
    while (count < end) {
      for (int i = 0; i < 4; ++i) {
        const int at = std::countr_zero(bits | last);
        split->logits[count++] = x[at % kLanes * kLanes + lane + at / kLanes];
        bits &= bits - 1;
      }
    }
    count = end;
  }
  std::fill_n(split->logits + count, kLanes, -INFINITY);
  split->count = count;
  return stats;
}

// A stretch of the block, at a place that differs from block to block.
SPECDEC_BODY int64_t stretch_of(int64_t block) { return block * kBlock + block * 5 % (kBlock / kSampled) * kSampled; }

SPECDEC_BODY void sample_body(Row row, int64_t block, float* x) {
  constexpr int64_t kAhead = 6;  // hardware does not foresee where the next ones are
  const int64_t next = stretch_of(block + kAhead) * size_in_bytes(row.dtype);
  for (int i = 0; i < kSampled; i += kLanes) prefetch_lanes(static_cast<const char*>(row.data) + next, i);
  load_range(row, stretch_of(block), kSampled, x);
}

// Bins of equal width from `max` downwards; the last is for all below, -inf, and NaN.
SPECDEC_BODY int32_t sample_bin(const SampleBins& bins, float x) {
  const float distance = (bins.max - x) * bins.scale;
  return static_cast<int32_t>(distance < SampleBins::kCount - 1 ? distance : SampleBins::kCount - 1.0f);
}

SPECDEC_BODY void tally_body(const float* x, int64_t n, const SampleBins& bins, int32_t* counts) {
  for (int64_t i = 0; i < n; i += kLanes) {
    int32_t bin[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) bin[lane] = sample_bin(bins, x[i + lane]);
    for (int lane = 0; lane < kLanes; ++lane) ++counts[Bins::kCopies * bin[lane] + lane % Bins::kCopies];
  }
}

SPECDEC_BODY Bracket sample_range_body(const float* x, int64_t n, const SampleBins& bins, int32_t first, int32_t last) {
  float smallest[kLanes], largest[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) smallest[lane] = INFINITY, largest[lane] = -INFINITY;
  for (int64_t i = 0; i < n; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const float each = x[i + lane];
      const int32_t bin = sample_bin(bins, each);
      const bool in = (bin >= first) & (bin <= last);
      const float as_small = in ? each : INFINITY, as_large = in ? each : -INFINITY;
      smallest[lane] = as_small < smallest[lane] ? as_small : smallest[lane];
      largest[lane] = as_large > largest[lane] ? as_large : largest[lane];
    }
  }
  Bracket range = {smallest[0], largest[0]};
  for (int lane = 1; lane < kLanes; ++lane) {
    range = {std::min(range.low, smallest[lane]), std::max(range.high, largest[lane])};
  }
  return range;
}

}  // namespace specdec::cpu
