// The statistics of a row of logits. A row is cut into blocks of 1024 consecutive entries: the first level of every
// draw races among them, and their sums merge in a fixed order, so that a row has bitwise one lse however work is
// split.
#pragma once

#include "hd.h"

namespace specdec {

constexpr int kBlock = 1024;  // a constant of the contract, not of a kernel
constexpr float kLog2e = 1.44269504f;

// 2^x for x < 128: relative error 1e-7 before rounding; below 2^-126 it is 0. -inf gives 0, NaN gives NaN.
SPECDEC_HD float exp2_fast(float x) {
  constexpr float kShift = 0x1.8p23f + 127.0f;  // adding it leaves the biased exponent of 2^round(x) in the low bits
  const float clamped = -126.0f > x ? -126.0f : x;
  const float shifted = clamped + kShift;
  const float f = clamped - (shifted - kShift);
  float r = 0.0013264726f;
  r = r * f + 0.009671513f;
  r = r * f + 0.055507336f;
  r = r * f + 0.24022242f;
  r = r * f + 0.693147f;
  r = r * f + 1.0f;
  const float result = r * as_float(as_bits(shifted) << 23);
  return x < -126.0f ? 0.0f : result;
}

// One block: its largest logit, and the sum of weight(l, max) over it. max is NaN if any logit is.
struct BlockStats {
  float max;
  float sum;
};

// Weight of a logit relative to another one: exp((l - reference) / T).
SPECDEC_HD float weight(float logit, float reference, float inverse_temperature) {
  return exp2_fast((logit - reference) * (inverse_temperature * kLog2e));
}

// log p(v) = l / T - lse, and p(v) itself.
SPECDEC_HD float log_probability(float logit, float inverse_temperature, float lse) {
  return logit * inverse_temperature - lse;
}

SPECDEC_HD float probability(float logit, float inverse_temperature, float lse) {
  return exp2_fast(log_probability(logit, inverse_temperature, lse) * kLog2e);
}

}  // namespace specdec
