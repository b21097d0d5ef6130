// The accept rule `token` and its corners: Leviathan et al., arXiv 2211.17192, Algorithm 1. p = target, q = draft.
#pragma once

#include "hd.h"

namespace specdec {

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

// What is wrong with a row whose largest logit is `max` (NaN if any logit is), as a target flag.
SPECDEC_HD int32_t row_fault(float max) {
  if (max != max) return kTargetNan;
  if (max == INFINITY) return kTargetPositiveInfinity;
  if (max == -INFINITY) return kTargetEmpty;
  return 0;
}

// Accept iff u q(x) < p(x), u in (0, 1). In the log domain p == q bitwise gives a ratio of exactly 1: always accepted;
// p(x) = 0 gives 0: never.
SPECDEC_HD bool accept(float u, float log_p, float log_q) { return u < expf(log_p - log_q); }

// Weight of a token in the residual distribution max(0, p - q). A NaN in q counts as no weight.
SPECDEC_HD float residual(float p, float q) {
  const float difference = p - q;
  return difference > 0.0f ? difference : 0.0f;
}

}  // namespace specdec
