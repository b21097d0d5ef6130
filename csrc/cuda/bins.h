// Intervals of logits, the bins of equal width into which they are cut, and histograms.
#pragma once

#include "work.h"

namespace specdec::cuda {

constexpr int kBins = 256;
// Lanes of a warp add to different copies of a bin, since additions to one place take turns.
constexpr int kCopies = 8;

// The logits from `low` to `high`; of itself empty.
struct Interval {
  float low = INFINITY, high = -INFINITY;

  SPECDEC_HD bool has(float x) const { return x >= low && x <= high; }
  SPECDEC_HD void include(float x) { low = fminf(low, x), high = fmaxf(high, x); }
};

// Bins of an interval, the highest logits first: of equal width in the logits or, if `scale` is 0, in their keys. A bin
// is a monotone function of the logit, however the arithmetic rounds.
struct Bins {
  Interval interval;
  float scale;
  int shift;

  SPECDEC_DEVICE static Bins of(Interval interval, bool linear) {
    const float width = interval.high - interval.low, scale = (kBins - 1) / width;
    if (linear && width < INFINITY && scale < INFINITY) return {interval, scale, 0};
    const uint32_t keys = ordered_key(interval.high) - ordered_key(interval.low);
    int shift = 0;
    while (keys >> shift >= kBins) ++shift;
    return {interval, 0.0f, shift};
  }

  SPECDEC_DEVICE uint32_t bin(float x) const {
    if (scale > 0.0f) return static_cast<uint32_t>((interval.high - x) * scale);
    return (ordered_key(interval.high) - ordered_key(x)) >> shift;
  }

  // By a warp: the smallest key in [first, last] of a bin <= `most`, which the bin of `last` is.
  SPECDEC_DEVICE uint32_t first_key(uint32_t most, uint32_t first, uint32_t last) const {
    const uint32_t lane = cuda::lane();
#pragma unroll 1
    while (first < last) {
      const uint32_t keys = last - first, step = keys / kWarp + 1;
      const auto key = [&](uint32_t of_lane) { return first + (of_lane * step < keys ? of_lane * step : keys); };
      // True in the first lanes.
      const uint32_t beyond = simt::count_bits(simt::ballot(bin(from_ordered_key(key(lane))) > most));
      if (beyond < kWarp) last = key(beyond);
      if (beyond > 0) first = key(beyond - 1) + 1;
    }
    return last;
  }

  // By a warp: the logits of a bin that is not empty.
  SPECDEC_DEVICE Interval interval_of(uint32_t bin) const {
    const uint32_t first = ordered_key(interval.low), last = ordered_key(interval.high);
    const uint32_t lowest = first_key(bin, first, last);
    const uint32_t highest = bin == 0 ? last : first_key(bin - 1, lowest, last) - 1;
    return {from_ordered_key(lowest), from_ordered_key(highest)};
  }
};

// Sums of 64 bits, whose copies must be added up. `words`: [low and high halves, kBins, copies]
template <int copies>
struct Histogram {
  static constexpr int kHalf = kBins * copies;
  uint32_t* words;

  SPECDEC_DEVICE void add(uint32_t bin, uint64_t amount) const {
    uint32_t* place = words + (bin * copies + simt::thread() % copies);
    const uint32_t low = static_cast<uint32_t>(amount), before = simt::add(place, low);
    const uint32_t high = static_cast<uint32_t>(amount >> 32) + (before + low < low);  // with the carry
    if (high != 0) simt::add(place + kHalf, high);
  }
  SPECDEC_DEVICE uint64_t sum(int bin) const {
    uint64_t sum = 0;
    for (int i = bin * copies; i < (bin + 1) * copies; ++i) {
      sum += uint64_t{simt::read(&words[kHalf + i])} << 32 | simt::read(&words[i]);
    }
    return sum;
  }
  SPECDEC_DEVICE void set(int bin, uint64_t sum) const {
    simt::write(&words[bin], static_cast<uint32_t>(sum));
    simt::write(&words[kHalf + bin], static_cast<uint32_t>(sum >> 32));
  }
  // By the threads of a block.
  SPECDEC_DEVICE void clear() const {
    for (int i = simt::thread(); i < 2 * kHalf; i += simt::num_threads()) simt::write(&words[i], 0u);
  }
};

}  // namespace specdec::cuda
