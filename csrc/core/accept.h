// The accept rules and their corners. p = target, q = draft.
#pragma once

#include "hd.h"

namespace specdec {

// Indices in specdec_kernels.ops.RULES.
enum Rule : int64_t { kRuleToken = 0, kRuleBlock = 1, kRuleCoupled = 2, kNumRules = 3 };

// Indices in specdec_kernels.ops.TREE_RULES.
enum TreeRule : int64_t { kTreeWalk = 0, kTreeToken = 1, kTreeBlock = 2, kNumTreeRules = 3 };

// The flags of specdec_kernels.Status.
enum Status : int32_t {
  kTargetNan = 1,
  kTargetPositiveInfinity = 2,
  kTargetEmpty = 4,
  kDraftNan = 8,
  kDraftPositiveInfinity = 16,
  kDraftEmpty = 32,
  kDraftZeroProbability = 64,
  kDraftOutOfRange = 128,
};
constexpr int32_t kDraftFlagShift = 3;  // kTargetX << kDraftFlagShift == kDraftX

// The target flag of a row whose largest l / T, at temperature 0 its largest logit, is this (NaN if any logit is NaN);
// 0 if the row has a distribution.
SPECDEC_HD int32_t row_fault(float largest) {
  if (largest != largest) return kTargetNan;
  if (largest == INFINITY) return kTargetPositiveInfinity;
  if (largest == -INFINITY) return kTargetEmpty;
  return 0;
}

// The same of a row whose largest logit is `max`; at temperature 0 the inverse is 0.
SPECDEC_HD int32_t row_fault(float max, float inverse_temperature) {
  return row_fault(inverse_temperature == 0.0f ? max : max * inverse_temperature);
}

// p(x) / q(x). In the log domain p == q bitwise gives a ratio of exactly 1; p(x) = 0 gives 0.
SPECDEC_HD float ratio(float log_p, float log_q) { return expf(log_p - log_q); }

// Whether p(x) > 0 in floating point.
SPECDEC_HD bool possible(float log_p) { return expf(log_p) > 0.0f; }

// Rule `token` (Leviathan et al., arXiv 2211.17192, Algorithm 1): accept iff u q(x) < p(x), u in (0, 1).
SPECDEC_HD bool accept(float u, float log_p, float log_q) { return u < ratio(log_p, log_q); }

// Rule `block` (Sun et al., arXiv 2403.10444, Algorithm 2): the joint ratio of a prefix with joint ratio `w` and one
// more draft, whose p / q is `ratio`.
SPECDEC_HD float joint_ratio(float w, float ratio) {
  const float longer = w > 0.0f ? w * ratio : 0.0f;  // 0 stays 0, even if the ratio is infinite
  return longer < 1.0f ? longer : 1.0f;
}

// The probability of keeping a prefix of joint ratio `w`, given that no longer one is kept. `mass` is that of the
// residual of the row after it, sum max(0, w p - q). If p = q at w = 1 there is none, and the prefix is kept.
SPECDEC_HD float keep_probability(float w, float mass) {
  const float either = mass + (1.0f - w);
  return either > 0.0f ? mass / either : 1.0f;
}

// The weight of a token in the residual distribution: max(0, p - q), and 0 if q is NaN.
SPECDEC_HD float residual(float p, float q) {
  const float difference = p - q;
  return difference > 0.0f ? difference : 0.0f;
}

}  // namespace specdec
