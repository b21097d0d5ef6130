// The statistics of a row of logits. A row is cut into blocks of 1024 consecutive entries. The first level of every
// draw races among blocks, and their sums are merged in a fixed order, so a row's lse is the same, bit for bit, however
// the work is split.
#pragma once

#include "hd.h"

namespace specdec {

constexpr int kBlock = 1024;  // the same in all backends: drawn tokens depend on it
constexpr float kLog2e = 1.44269504f;

constexpr float kLowestExponent = -126.0f;

// The exponent, but no less than `lowest`. NaN stays NaN.
SPECDEC_HD float clamp_exponent(float x, float lowest) { return lowest > x ? lowest : x; }

// 2^x for x < 128 that was clamped, with a relative error of 1e-7 before rounding. 0 for x < -125.5; NaN gives NaN. The
// polynomial is 2 * 2^f, since the low bits, taken for an exponent, are 2^(round(x) - 1), or 0 for the smallest.
SPECDEC_HD float exp2_clamped(float x) {
  constexpr float kShift = 0x1.8p23f + 126.0f;  // adding it leaves 126 + round(x) in the low bits
  const float shifted = x + kShift;
  const float f = x - (shifted - kShift);
  float r = 2.0f * 0.0013264726f;
  r = r * f + 2.0f * 0.009671513f;
  r = r * f + 2.0f * 0.055507336f;
  r = r * f + 2.0f * 0.24022242f;
  r = r * f + 2.0f * 0.693147f;
  r = r * f + 2.0f;
  return r * as_float(as_bits(shifted) << 23);
}

SPECDEC_HD float exp2_fast(float x) { return exp2_clamped(clamp_exponent(x, kLowestExponent)); }

// Of one block: its largest logit, NaN if any logit is NaN, and the sum of weight(l, max).
struct BlockStats {
  float max;
  float sum;
};

// exp((l - reference) / T): the weight of a logit relative to another one.
SPECDEC_HD float weight(float logit, float reference, float inverse_temperature) {
  return exp2_fast((logit - reference) * (inverse_temperature * kLog2e));
}

// lse of a row from its largest logit and the sum of the weights relative to it.
SPECDEC_HD float lse_of(float max, float inverse_temperature, float sum) {
  return rounded_product(max, inverse_temperature) + logf(sum);
}

// log p(v) = l / T - lse, and p(v) itself. l / T is rounded as in lse: where it is so large that rounding is worth
// whole nats, the largest logit would have any probability otherwise.
SPECDEC_HD float log_probability(float logit, float inverse_temperature, float lse) {
  return rounded_product(logit, inverse_temperature) - lse;
}

SPECDEC_HD float probability(float logit, float inverse_temperature, float lse) {
  return exp2_fast(log_probability(logit, inverse_temperature, lse) * kLog2e);
}

}  // namespace specdec
