// Maxima and sums over a block: of weights, and of max(0, p - q).
//
// The files block_*.h hold function bodies, written once as plain loops that compilers vectorise. block.cpp inlines
// them into one function for each instruction set. Sums are kept as kLanes partial sums, so the source fixes their
// order. `n` is the block's size, rounded up to whole lanes: a constant for all blocks except a row's last.
#pragma once

#include "../core/accept.h"
#include "load.h"

namespace specdec::cpu {

SPECDEC_BODY void max_of_lanes(const float* x, int64_t n, float* best) {
  for (int lane = 0; lane < kLanes; ++lane) best[lane] = -INFINITY;
  for (int64_t i = 0; i < n; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) best[lane] = x[i + lane] > best[lane] ? x[i + lane] : best[lane];
  }
}

// Both reductions halve the lanes until one is left: few operations wait for each other, and the order is fixed.
SPECDEC_BODY float max_of_numbers(const float* lanes) {
  float best[16];
  for (int i = 0; i < 16; ++i) best[i] = lanes[i + 16] > lanes[i] ? lanes[i + 16] : lanes[i];
  for (int i = 0; i < 8; ++i) best[i] = best[i + 8] > best[i] ? best[i + 8] : best[i];
  for (int i = 0; i < 4; ++i) best[i] = best[i + 4] > best[i] ? best[i + 4] : best[i];
  for (int i = 0; i < 2; ++i) best[i] = best[i + 2] > best[i] ? best[i + 2] : best[i];
  return best[1] > best[0] ? best[1] : best[0];
}

SPECDEC_BODY float sum_of_lanes(const float* lanes) {
  float sum[16];
  for (int i = 0; i < 16; ++i) sum[i] = lanes[i] + lanes[i + 16];
  for (int i = 0; i < 8; ++i) sum[i] += sum[i + 8];
  for (int i = 0; i < 4; ++i) sum[i] += sum[i + 4];
  return (sum[0] + sum[2]) + (sum[1] + sum[3]);
}

SPECDEC_BODY bool any_nan(const float* x, int64_t n) {
  uint32_t lanes[kLanes] = {}, any = 0;
  for (int64_t i = 0; i < n; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] |= x[i + lane] != x[i + lane] ? 1u : 0u;
  }
  for (int lane = 0; lane < kLanes; ++lane) any |= lanes[lane];
  return any != 0;
}

SPECDEC_BODY float sum_of(const float* x, int64_t n) {
  float sum[kLanes] = {};
  for (int64_t i = 0; i < n; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) sum[lane] += x[i + lane];
  }
  return sum_of_lanes(sum);
}

// exp((-inf) - (-inf)) would be NaN, so a block without any finite logit is weighed relative to 0.
SPECDEC_BODY float reference_of(float max) { return max == -INFINITY ? 0.0f : max; }

SPECDEC_BODY void copy_lanes(const float* best, float* lanes) {
  if (lanes == nullptr) return;
  for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = best[lane];
}

SPECDEC_BODY float max_body(Row row, int64_t block, float* lanes, int64_t n) {
  alignas(64) float buffer[kBlock];
  const float* x = view(row, block, buffer);
  float best[kLanes];
  max_of_lanes(x, n, best);
  copy_lanes(best, lanes);
  return any_nan(x, n) ? NAN : max_of_numbers(best);
}

// The statistics of n logits. `next`: where the next block's are, which is read into the cache meanwhile. look(i, w)
// gets the weights w[kLanes] of the logits from i on.
template <class Function>
SPECDEC_BODY BlockStats stats_of_floats(const float* x, int64_t n, float inverse_temperature, float* lanes,
                                        const void* next, const Function& look) {
  float best[kLanes];
  max_of_lanes(x, n, best);
  copy_lanes(best, lanes);
  const float max = max_of_numbers(best);
  const float reference = reference_of(max), scale = inverse_temperature * kLog2e;
  // Adding 0 keeps GCC from seeing a constant. It would turn the clamp into a comparison and a mask.
  const float lowest = kLowestExponent + 0.0f * scale;
  float sum[kLanes] = {};
  for (int64_t i = 0; i < n; i += kLanes) {
    prefetch_lanes(next, i);
    float w[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) w[lane] = clamp_exponent((x[i + lane] - reference) * scale, lowest);
    for (int lane = 0; lane < kLanes; ++lane) w[lane] = exp2_clamped(w[lane]);
    for (int lane = 0; lane < kLanes; ++lane) sum[lane] += w[lane];
    for (int lane = 0; lane < kLanes; ++lane) look(i, lane, w[lane]);
  }
  const float total = sum_of_lanes(sum);
  return {total == total || !any_nan(x, n) ? max : NAN, total};
}

// w[i] becomes the weight relative to `max`; logits below the cutoff have none.
SPECDEC_BODY void weights_above(Row row, int64_t block, float max, float inverse_temperature, float cutoff, float* w,
                                int64_t n) {
  alignas(64) float buffer[kBlock];
  const float* x = view(row, block, buffer);
  const float reference = reference_of(max);
  for (int64_t i = 0; i < n; ++i) {
    const float each = weight(x[i], reference, inverse_temperature);
    w[i] = x[i] >= cutoff ? each : 0.0f;
  }
}

SPECDEC_BODY float sum_above_body(Row row, int64_t block, float max, float inverse_temperature, float cutoff,
                                  int64_t n) {
  alignas(64) float w[kBlock];
  weights_above(row, block, max, inverse_temperature, cutoff, w, n);
  return sum_of(w, n);
}

// weights[i] becomes max(0, w p - q).
SPECDEC_BODY void residual_weights(Row p_row, Distribution p, float w, const DraftDistribution& q, int64_t block,
                                   float* weights, int64_t n) {
  alignas(64) float buffer[kBlock];
  const float* x = view(p_row, block, buffer);
  for (int64_t i = 0; i < n; ++i) weights[i] = w * probability(x[i], p);
  if (q.ids == nullptr) {
    x = view(q.row, block, buffer);
    for (int64_t i = 0; i < n; ++i) weights[i] = residual(weights[i], probability(x[i], q.distribution));
    return;
  }
  int64_t begin, end;
  q.entries(block, &begin, &end);
  const bool one_hot = q.row.data == nullptr;
  if (!one_hot) load_range(q.row, begin, end - begin, buffer);
  for (int64_t i = begin; i < end; ++i) {
    const float of_token = one_hot ? 1.0f : probability(buffer[i - begin], q.distribution);
    float& weight_of_token = weights[q.ids[i] - block * kBlock];
    weight_of_token = residual(weight_of_token, of_token);
  }
}

SPECDEC_BODY float residual_sum_body(Row p_row, Distribution p, float w, const DraftDistribution& q, int64_t block,
                                     int64_t n) {
  alignas(64) float weights[kBlock];
  residual_weights(p_row, p, w, q, block, weights, n);
  return sum_of(weights, n);
}

}  // namespace specdec::cpu
