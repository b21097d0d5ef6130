// A sequence in a step: its drafts, the weights of its residuals, and how far rule `block` keeps drafts.
#pragma once

#include "work.h"

namespace specdec::cuda {

// What every thread of a block knows of its sequence.
template <class Rows>
struct Sequence {
  const Work& work;
  StepMemory memory;
  uint32_t b;
  int limit;  // how many of its drafts count
  Temperature temperature;

  // `copy`: of the memory, for this block of threads.
  SPECDEC_DEVICE Sequence(const Work& work, uint32_t b, int copy)
      : work(work), b(b), limit(work.limit(b)), temperature(work.temperature(b)) {
    const int64_t at = (int64_t{b} * kStepMemories + copy) * work.memory_size();
    // Kernels for plain rows need not ask, so that their compiler sees that it is shared memory.
    char* memory_of_block = simt::shared_memory();
    if (Rows::kAny && work.scratch.own != nullptr) memory_of_block = work.scratch.own + at;
    Arena arena(memory_of_block);
    memory = StepMemory::cut(arena, work.k(), work.n);
  }

  SPECDEC_DEVICE bool greedy() const { return temperature.greedy(); }
  SPECDEC_DEVICE const SpeculativeStepParams& params() const { return work.params; }
  SPECDEC_DEVICE Row target_row(int j) const { return work.target_row(b, j); }
  SPECDEC_DEVICE Row draft_row(int j) const { return work.draft_row(b, j); }
  SPECDEC_DEVICE Noise noise(int j) const { return work.noise(b, j); }
  SPECDEC_DEVICE const Stats* stats(int i) const { return work.stats(b, i); }
  SPECDEC_DEVICE RowStats row(int i) const { return simt::read(&memory.rows[i]); }
  // Whether q is given by logits; else drafts are one-hot.
  SPECDEC_DEVICE bool has_q() const { return params().draft.data != nullptr; }

  // The draft of row j, or -1.
  SPECDEC_DEVICE int64_t draft(int j, int32_t* flags) const {
    const int64_t x = j < limit ? work.drafts(b)[j] : -1;
    if (x >= 0 && x < params().vocabulary) return x;
    if (x != -1) *flags |= kDraftOutOfRange;
    return -1;
  }

  // The logit in draft row j of the target's token `id`; -inf if the draft's vocabulary lacks it.
  SPECDEC_DEVICE float draft_logit(int j, int64_t id) const {
    const Row row = draft_row(j);
    if (!Rows::kAny || row.d2t == nullptr) return Rows::logit(row, id);
    const int64_t index = find(row.d2t, row.size, id);
    return row.d2t[index] == id ? Rows::logit(row, index) : -INFINITY;
  }

  // The distribution of draft row j, given by logits.
  SPECDEC_DEVICE RowStats q_of(int j) const { return row(work.k() + 1 + j); }

  // By the threads of a block, before they wait for the launch before: loads what they need of the drafts. Ends with a
  // barrier.
  SPECDEC_DEVICE void look_at_drafts() const {
#pragma unroll 1
    for (int j = simt::thread(); j <= limit; j += simt::num_threads()) {
      int32_t flags = 0;
      const int64_t x = draft(j, &flags);
      Examined seen = {-INFINITY, -INFINITY, 0.0f, static_cast<int16_t>(flags), kDraw};
      if (x >= 0) {
        seen.p = Rows::logit(target_row(j), x);
        seen.q = has_q() ? draft_logit(j, x) : 0.0f;
        const Noise its = noise(j);
        seen.u = uniform(philox(its.seed, 0, its.position, its.offset, kAccept).word[0]);
        seen.state = kRecover;
      }
      simt::write(&memory.examined[j], seen);
      if (params().draft_lse == nullptr || j == limit) continue;
      // An lse of NaN means that draft_step found none. The largest logit is not known; this is a little less, where
      // lse is large.
      const int64_t at = int64_t{b} * work.k() + j;
      const float lse = params().draft_lse[at], largest = temperature.value * lse;
      simt::write(&memory.rows[work.k() + 1 + j],
                  RowStats{largest - 0x1p-21f * fabsf(largest), lse, params().draft_cutoff[at], 0.0f});
    }
    simt::sync_block();
  }

  // By the threads of a block, when rows are measured: the statistics of the target's first `count` rows, and of the
  // draft's beside them. If `examines`, also what they say of the drafts. Ends with a barrier.
  SPECDEC_DEVICE void merge_rows(int count, bool examines) const {
    const bool weighs = work.weighs_drafts() && examines;
#pragma unroll 1
    for (int j = warp(); j < count; j += num_warps()) {
      const int last = weighs && j < limit ? work.k() + 1 + j : j;
#pragma unroll 1
      for (int i = j; i <= last; i += work.k() + 1) {
        const RowStats found = row_stats(work, b, i, temperature);
        if (lane() == 0) simt::write(&memory.rows[i], found);
      }
      if (!examines || lane() != 0) continue;
      const Examined seen = examine(j, simt::read(&memory.examined[j]));
      simt::write(&memory.examined[j], seen);
      if (j < limit) simt::write(&memory.ratio[j], seen.possible() ? ratio(seen.p, seen.q) : 0.0f);
    }
    simt::sync_block();
  }

  // Makes logits log-probabilities.
  SPECDEC_DEVICE Examined examine(int j, Examined seen) const {
    const RowStats p = row(j);
    if (const int32_t fault = p.fault(temperature); fault != 0) {
      return {-INFINITY, -INFINITY, 0.0f, static_cast<int16_t>(fault), kDone};
    }
    if (seen.state != kRecover) return seen;
    seen.p = log_probability(seen.p, p.distribution(temperature));
    if (!has_q()) return seen;
    const RowStats q = q_of(j);
    if (const int32_t fault = work.weighs_drafts() ? q.fault(temperature) : row_fault(q.lse); fault != 0) {
      return {-INFINITY, -INFINITY, 0.0f, static_cast<int16_t>(fault << kDraftFlagShift), kDraw};
    }
    seen.q = log_probability(seen.q, q.distribution(temperature));
    if (seen.q == -INFINITY) seen.flags = kDraftZeroProbability;
    return seen;
  }

  SPECDEC_DEVICE Examined examined(int j) const { return simt::read(&memory.examined[j]); }

  // p or q of a logit.
  SPECDEC_DEVICE float probability(float logit, RowStats row) const {
    const float p = simt::exp2_of(fmaf(logit, temperature.scale, -row.lse * kLog2e));
    return logit >= row.cutoff ? p : 0.0f;
  }

  // Where rounding lse is worth nats, only the largest logit has any probability, which is 1.
  SPECDEC_DEVICE static bool large(RowStats row) { return fabsf(row.lse) > 0x1p23f; }
  SPECDEC_DEVICE float probability_in_p(float logit, RowStats p) const {
    return large(p) ? (logit >= p.max ? 1.0f : 0.0f) : probability(logit, p);
  }

  // The distribution of q for residuals, of which a q of 1 leaves nothing, nor does an infinite one. Of a one-hot q,
  // the draft has the logit 0, and no other token any.
  SPECDEC_DEVICE RowStats subtracted(int j) const {
    if (!has_q()) return {0.0f, 0.0f, -INFINITY, 0.0f};
    const RowStats q = q_of(j);
    return large(q) ? RowStats{q.max, -INFINITY, q.max, 0.0f} : q;
  }

  // By a warp: the mass of max(0, w p - q) in a block of row j, which has a draft.
  SPECDEC_DEVICE float residual_mass(int j, float w, int block) const {
    const RowStats of_p = row(j), of_q = subtracted(j);
    float even = 0.0f, odd = 0.0f;
    if (large(of_p)) {
#pragma unroll 1
      for (int i = lane(); i < kBlock; i += kWarp) even += token_weight(j, w, true, int64_t{block} * kBlock + i);
      return simt::reduce(even, Sum());
    }
    const typename Rows::Block p = Rows::load(target_row(j), block);
    const typename Rows::Block q =
        has_q() ? load_q(j, block) : Rows::Block::only(work.drafts(b)[j] - int64_t{block} * kBlock);
    const auto weight = [&](int i) { return residual(w * probability(p[i], of_p), probability(q[i], of_q)); };
#pragma unroll
    for (int i = 0; i < kEach; i += 2) even += weight(i), odd += weight(i + 1);
    return simt::reduce(even + odd, Sum());
  }

  // The weight of a token of row j: in max(0, w p - q), or in p.
  SPECDEC_DEVICE float token_weight(int j, float w, bool in_residual, int64_t token) const {
    if (token >= params().vocabulary) return 0.0f;
    const float p = w * probability_in_p(Rows::logit(target_row(j), token), row(j));
    if (!in_residual) return p;
    if (!has_q()) return residual(p, token == work.drafts(b)[j] ? 1.0f : 0.0f);
    return residual(p, probability(draft_logit(j, token), subtracted(j)));
  }

  // By a warp: the logits in draft row j of a block of the target's tokens.
  SPECDEC_DEVICE typename Rows::Block load_q(int j, int block) const {
    const Row row = draft_row(j);
    if constexpr (Rows::kAny) {
      if (row.d2t != nullptr) return load_mapped(row, int64_t{block} * kBlock);
    }
    return Rows::load(row, block);
  }

  // The logits in a draft row over a reduced vocabulary of the target's tokens from `first` on; -inf for those that it
  // lacks.
  SPECDEC_DEVICE Any::Block load_mapped(const Row& row, int64_t first) const {
    Any::Block q;
    const int64_t begin = first_from(row.d2t, row.size, first);
    const int64_t size = first_from(row.d2t, row.size, first + kBlock) - begin;
#pragma unroll
    for (int i = 0; i < kEach; i += kVector) {
      int64_t at = begin + first_from(row.d2t + begin, size, first + place_of(i));
#pragma unroll
      for (int e = 0; e < kVector; ++e) {
        const bool there = at < begin + size && row.d2t[at] == first + place_of(i + e);
        q.x[i + e] = there ? Rows::logit(row, at) : -INFINITY;
        at += there;
      }
    }
    return q;
  }

  // The joint ratio of a prefix of joint ratio `w` and draft j.
  SPECDEC_DEVICE float joint(float w, int j) const { return joint_ratio(w, simt::read(&memory.ratio[j])); }

  // Rule `block`: the longest prefix whose joint ratio is 1, which is kept whatever the residuals are.
  SPECDEC_DEVICE int surely_kept() const {
    int sure = 0;
    float w = 1.0f;
    for (int j = 0; j < limit; ++j) {
      w = joint(w, j);
      if (w == 1.0f) sure = j + 1;
    }
    return sure;
  }

  // Calls function(j, w, u) for the longer ones that may be kept, w being their joint ratio and u the number that tests
  // them. Since a prefix is kept with probability w at most, others fail without their residual. Allows for rounding.
  template <class Function>
  SPECDEC_DEVICE void for_doubtful(int sure, const Function& function) const {
    float w = 1.0f;
#pragma unroll 1
    for (int j = sure; j < limit; ++j) {
      w = joint(w, j);
      const float u = examined(j).u;
      if (u < w * 1.0001f) function(j + 1, w, u);
    }
  }
};

}  // namespace specdec::cuda
