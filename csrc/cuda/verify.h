// Verification of drafts: p and q of a draft, and the weights of a residual.
#pragma once

#include "sequence.h"

namespace specdec::cuda {

// By one thread, before lse is known: loads all that is needed of row j's draft, so that no later phase waits for
// memory.
SPECDEC_DEVICE Examined look(const Sequence& s, int64_t j) {
  Examined seen = {-INFINITY, -INFINITY, 0.0f, 0, kDraw};
  int32_t flags = 0;
  const int64_t x = s.draft(j, &flags);
  seen.flags = static_cast<int16_t>(flags);
  if (x < 0) return seen;
  seen.log_p = logit_at(s.target_row(j), x);
  seen.log_q = s.has_q() ? s.draft_logit(j, x) : 0.0f;
  const Noise noise = s.noise(j);
  seen.u = uniform(philox(noise.seed, 0, noise.position, noise.offset, kAccept).word[0]);
  seen.state = kRecover;
  return seen;
}

// By one thread: completes what `look` found, now that the rows' distributions are known.
SPECDEC_DEVICE Examined examine(const Sequence& s, int64_t j, Examined seen) {
  const int32_t fault = row_fault(simt::read(&s.memory.row_max[j]));
  if (fault != 0) return {-INFINITY, -INFINITY, 0.0f, static_cast<int16_t>(fault), kDone};
  if (seen.state != kRecover) return seen;
  if (s.has_q()) {
    const int64_t k = s.params.num_drafts_max;
    const bool handed_over = s.params.draft_lse != nullptr;
    const int32_t q_fault =
        row_fault(handed_over ? s.params.draft_lse[s.b * k + j] : simt::read(&s.memory.row_max[k + 1 + j]));
    if (q_fault != 0) return {-INFINITY, -INFINITY, 0.0f, static_cast<int16_t>(q_fault << kDraftFlagShift), kDraw};
    seen.log_q = log_probability(seen.log_q, s.q_of(j));  // which a row with a fault does not have
  }
  seen.log_p = log_probability(seen.log_p, s.p_of(j));
  if (seen.log_q == -INFINITY) seen.flags = kDraftZeroProbability;
  return seen;
}

// By a warp: p becomes max(0, p - q), where q is 0 except for the tokens that `ids` lists in ascending order; q_of(i)
// is that of entry i.
template <class Q>
SPECDEC_DEVICE void subtract_listed(const Row& row, const int64_t* ids, int64_t size, int block, const Q& q_of,
                                    float (&p)[kEach]) {
  const int64_t first = int64_t{block} * kBlock;
  const Range listed = range(ids, size, first, first + kBlock - 1);
  if (listed.begin >= listed.end) return;
  float* own = to_own(row, p);
  simt::sync_warp();
#pragma unroll 1
  for (int64_t at = listed.begin + simt::thread() % kWarp; at < listed.end; at += kWarp) {
    float* its = &own[own_place(static_cast<int>(ids[at] - int64_t{block} * kBlock))];
    simt::write(its, residual(simt::read(its), q_of(at)));
  }
  simt::sync_warp();
  from_own(own, p);
}

// By a warp: turns raw logits of a block of target row j into w p.
SPECDEC_DEVICE void weigh_target(const Sequence& s, int64_t j, float w, const Touched& touched, int block, Part part,
                                 float (&p)[kEach]) {
  const Distribution distribution = s.p_of(j);
  mask_block(touched.row, block, p);
  adjust_block(touched, block, p);
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    if (part.has(i)) p[i] = w * probability_of(p[i], distribution);
  }
}

// By a warp: p becomes max(0, p - q), where q is given by raw logits of the draft's row over the same vocabulary. Bias
// and penalties adjust the same tokens as in the target's row.
SPECDEC_DEVICE void subtract_draft(const Sequence& s, int64_t j, const Touched& touched, int block, Part part,
                                   float (&q)[kEach], float (&p)[kEach]) {
  const Distribution distribution = s.q_of(j);
  mask_block(s.draft_row(j), block, q);
  adjust_block(touched, block, q);
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    if (part.has(i)) p[i] = residual(p[i], probability_of(q[i], distribution));
  }
}

// The same where only some tokens have a q: a reduced vocabulary, or a one-hot draft.
SPECDEC_DEVICE void subtract_few(const Sequence& s, int64_t j, int block, float (&p)[kEach]) {
  const bool reduced = s.has_q();
  subtract_listed(
      s.target_row(j), reduced ? s.params.d2t : s.drafts() + j, reduced ? s.params.draft.vocabulary : 1, block,
      [&](int64_t at) { return reduced ? probability_of(logit_at(s.draft_row(j), at), s.q_of(j)) : 1.0f; }, p);
}

// By a warp: the weights max(0, w p - q) of a part of a block of row j, which has a draft. near(row, 0) returns where
// the granules of p's logits are copied to, and near(row, 1) those of q's; null: they are read where they are kept, or
// in device memory.
template <class Near>
SPECDEC_DEVICE void residual_weights(const Sequence& s, int64_t j, float w, int block, Part part, const Near& near,
                                     float (&p)[kEach]) {
  const Row row = s.target_row(j);
  const Touched touched = touched_of(row, block);
  load_raw(row, block, near(row, 0), p);
  weigh_target(s, j, w, touched, block, part, p);
  if (!s.same_vocabulary()) return subtract_few(s, j, block, p);
  const Row of_draft = s.draft_row(j);
  float q[kEach];
  load_raw(of_draft, block, near(of_draft, 1), q);
  subtract_draft(s, j, touched, block, part, q, p);
}

}  // namespace specdec::cuda
