// Statistics of a row: those of its blocks, and merged. The order of sums depends on the vocabulary alone.
#pragma once

#include "rows.h"

namespace specdec::cuda {

// By the GPU's own exponential; the one in core/softmax.h is for CPUs.
SPECDEC_DEVICE float weight_of(float logit, float reference, float inverse_temperature) {
  return simt::exp2_of((logit - reference) * (inverse_temperature * kLog2e));
}

SPECDEC_DEVICE float probability_of(float logit, Distribution distribution) {
  const float p = simt::exp2_of(log_probability(logit, distribution.inverse_temperature, distribution.lse) * kLog2e);
  return logit >= distribution.cutoff ? p : 0.0f;
}

struct Sum {
  SPECDEC_HD float operator()(float a, float b) const { return a + b; }
};

// The largest logit (NaN if any is NaN) and, unless the inverse temperature is 0 (greedy), the sum of weights relative
// to it.
template <class Format>
SPECDEC_DEVICE BlockStats block_stats(const Logits<Format>& x, float inverse_temperature) {
  const float max = x.max();
  if (max != max || inverse_temperature == 0.0f) return {max, 0.0f};
  const float reference = max == -INFINITY ? 0.0f : max;
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < kEach; ++i) sum += weight_of(x[i], reference, inverse_temperature);
  return {max, simt::reduce(sum, Sum())};
}

// The statistics of a row's n blocks. `mass` holds sums relative to each block's largest logit until `merge` makes them
// relative to the row's.
struct Blocks {
  float* max;
  float* mass;
  int n;
};

// By a warp: the largest logit of all blocks, NaN if any is NaN.
SPECDEC_DEVICE float max_of_blocks(const Blocks& blocks) {
  float max = -INFINITY;
  for (int i = simt::thread() % kWarp; i < blocks.n; i += kWarp) max = simt::larger(max, simt::read(&blocks.max[i]));
  return simt::reduce(max, [](float a, float b) { return simt::larger(a, b); });
}

SPECDEC_DEVICE float total(const float* mass, int n) {
  float sum = 0.0f;
  for (int i = simt::thread() % kWarp; i < n; i += kWarp) sum += simt::read(&mass[i]);
  return simt::reduce(sum, Sum());
}

// By a warp: makes the blocks' sums relative to `max`, the row's largest logit.
SPECDEC_DEVICE void merge(const Blocks& blocks, float max, float inverse_temperature) {
  for (int i = simt::thread() % kWarp; i < blocks.n; i += kWarp) {
    const float of_block = simt::read(&blocks.max[i]);
    simt::write(&blocks.mass[i], simt::read(&blocks.mass[i]) * weight_of(of_block, max, inverse_temperature));
  }
}

// By the threads of a block: computes the masses of the logits >= cutoff.
SPECDEC_DEVICE void keep_above(const Row& row, const Blocks& blocks, float max, float inverse_temperature,
                               float cutoff) {
  for (int block = simt::thread() / kWarp; block < blocks.n; block += simt::num_threads() / kWarp) {
    float sum = 0.0f;
    if (simt::read(&blocks.max[block]) >= cutoff) {
      float x[kEach];
      load_block(row, block, x);
#pragma unroll
      for (int i = 0; i < kEach; ++i) sum += x[i] >= cutoff ? weight_of(x[i], max, inverse_temperature) : 0.0f;
    }
    sum = simt::reduce(sum, Sum());
    if (simt::thread() % kWarp == 0) simt::write(&blocks.mass[block], sum);
  }
}

}  // namespace specdec::cuda
