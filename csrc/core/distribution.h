// How raw logits become a distribution: penalties, temperature, and filters as one cutoff.
#pragma once

#include "softmax.h"

namespace specdec {

struct Penalties {
  float repetition, presence, frequency;
};

// The logit of a token after its bias and penalties; `count` is how often it was generated. All backends add and
// multiply in this order, and round after each operation: otherwise logits that are equal in one would differ in
// another, and filters would keep other tokens. Repetition penalty: Keskar et al., arXiv 1909.05858.
SPECDEC_HD float adjust(float logit, float bias, bool in_prompt, int32_t count, Penalties penalties) {
  float x = logit + bias;
  if (in_prompt || count > 0) x = x < 0.0f ? rounded_product(x, penalties.repetition) : x / penalties.repetition;
  if (count > 0) x = x - penalties.presence - rounded_product(penalties.frequency, static_cast<float>(count));
  return x;
}

// p(v) = exp(l / T - lse) for adjusted logits l >= cutoff, else 0.
struct Distribution {
  float inverse_temperature;
  float lse;
  float cutoff;
};

SPECDEC_HD float log_probability(float logit, Distribution distribution) {
  return logit >= distribution.cutoff ? log_probability(logit, distribution.inverse_temperature, distribution.lse)
                                      : -INFINITY;
}

SPECDEC_HD float probability(float logit, Distribution distribution) {
  const float p = probability(logit, distribution.inverse_temperature, distribution.lse);
  return logit >= distribution.cutoff ? p : 0.0f;
}

// min-p (Nguyen et al., arXiv 2407.01082) as a logit: p(v) >= min_p p_max. min_p = 0 gives -inf.
SPECDEC_HD float min_p_cutoff(float max, float temperature, float min_p) { return max + temperature * logf(min_p); }

// Unsigned integer keys in the order of the floats, so that ranges of keys are ranges of logits: the basis of exact
// selection. The key is 2^31 +- magnitude. Both zeros have the same key, since they compare equal, and every key in
// between belongs to a float.
SPECDEC_HD uint32_t ordered_key(float x) {
  const uint32_t bits = as_bits(x), magnitude = bits & 0x7fffffffu;
  const uint32_t negative = static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31);  // all ones, or 0
  return 0x80000000u + ((magnitude ^ negative) - negative);
}

SPECDEC_HD float from_ordered_key(uint32_t key) {
  return as_float(key >> 31 ? key - 0x80000000u : 0x80000000u | (0x80000000u - key));
}

}  // namespace specdec
