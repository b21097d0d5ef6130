// Histograms of a block, for selection.
#pragma once

#include "block_sums.h"

namespace specdec::cpu {

// Conditions are joined by & and |, which compilers vectorise; branches would be mispredicted on random logits.
SPECDEC_BODY bool in_range(const Bins& bins, float x) { return (x >= bins.low) & (x <= bins.high); }

// `bin`, or `count` for a logit out of the range. Compilers would turn ?: into a branch.
SPECDEC_BODY int32_t bin_in_range(const Bins& bins, float x, int32_t bin) {
  const int32_t inside = -static_cast<int32_t>(in_range(bins, x));
  return (bin & inside) | (bins.count & ~inside);
}

// Monotone in x: halving keeps high - x from overflowing, and rounding keeps the order.
SPECDEC_BODY int32_t linear_bin(const Bins& bins, float x) {
  return bin_in_range(bins, x, static_cast<int32_t>((0.5f * bins.high - 0.5f * x) * bins.scale));
}

SPECDEC_BODY int32_t key_bin(const Bins& bins, float x) {
  return bin_in_range(bins, x, static_cast<int32_t>((bins.high_key - ordered_key(x)) >> bins.shift));
}

SPECDEC_BODY void histogram_body(Row row, int64_t block, const float* lanes, const Bins& bins, double* sums,
                                 int64_t n) {
  alignas(64) float buffer[kBlock];
  const float* x = view(row, block, buffer);
  int candidates = 0;
  for (int lane = 0; lane < kLanes; ++lane) candidates += lanes[lane] >= bins.low;
  if (candidates <= kLanes / 4) {  // few lanes hold a logit in the range: look at these alone
    for (int lane = 0; lane < kLanes; ++lane) {
      if (!(lanes[lane] >= bins.low)) continue;
      for (int64_t i = lane; i < n; i += kLanes) {
        if (!in_range(bins, x[i])) continue;
        const float size = bins.weigh ? weight(x[i], bins.max, bins.inverse_temperature) : 1.0f;
        sums[Bins::kCopies * (bins.linear ? linear_bin(bins, x[i]) : key_bin(bins, x[i]))] += size;
      }
    }
    return;
  }
  for (int64_t begin = 0; begin < n; begin += kLanes) {
    alignas(64) int32_t bin[kLanes];
    alignas(64) float size[kLanes];
    const float* each = x + begin;
    uint32_t any = 0;
    for (int i = 0; i < kLanes; ++i) any |= in_range(bins, each[i]) ? 1u : 0u;
    if (any == 0) continue;
    if (bins.linear) {
      for (int i = 0; i < kLanes; ++i) bin[i] = linear_bin(bins, each[i]);
    } else {
      for (int i = 0; i < kLanes; ++i) bin[i] = key_bin(bins, each[i]);
    }
    if (bins.weigh) {
      for (int i = 0; i < kLanes; ++i) size[i] = weight(each[i], bins.max, bins.inverse_temperature);
    } else {
      for (int i = 0; i < kLanes; ++i) size[i] = 1.0f;
    }
    for (int i = 0; i < kLanes; ++i) sums[Bins::kCopies * bin[i] + i % Bins::kCopies] += size[i];
  }
}

SPECDEC_BODY void range_body(Row row, int64_t block, const Bins& bins, int bin, float* low, float* high, int64_t n) {
  alignas(64) float buffer[kBlock];
  const float* x = view(row, block, buffer);
  float smallest[kLanes], largest[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) smallest[lane] = INFINITY, largest[lane] = -INFINITY;
  for (int64_t i = 0; i < n; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) {
      const float each = x[i + lane];
      const bool in = bin < 0 ? each > -INFINITY : linear_bin(bins, each) == bin;
      const float as_small = in ? each : INFINITY, as_large = in ? each : -INFINITY;
      smallest[lane] = as_small < smallest[lane] ? as_small : smallest[lane];
      largest[lane] = as_large > largest[lane] ? as_large : largest[lane];
    }
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    *low = std::min(*low, smallest[lane]);
    *high = std::max(*high, largest[lane]);
  }
}

}  // namespace specdec::cpu
