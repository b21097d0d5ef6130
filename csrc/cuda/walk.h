// Rules `token` and `block`: how many of a sequence's drafts are kept, and the token after them.
#pragma once

#include "verify.h"

namespace specdec::cuda {

// If the draft's statistics are handed over, residuals are the first to read its rows, which would then wait for
// memory. The rows of a whole batch that have no more bytes than this are brought to the L2 cache while the target is
// measured; others when a draft is rejected. An A100 reads as much in a microsecond.
constexpr int64_t kMostPrefetched = 2 << 20;

SPECDEC_DEVICE bool reads_drafts_late(const Sequence& s) {
  return s.same_vocabulary() && !weighs_drafts(s.params) && !s.favours();
}

// By a warp: has its part of the draft's rows [begin, end) brought to the L2 cache. Each lane takes blocks of its own.
SPECDEC_DEVICE void prefetch_drafts(const Sequence& s, const Place& place, int begin, int end) {
  const int lane = simt::thread() % kWarp;
#pragma unroll 1
  for (int i = begin * s.memory.n + lane * place.all_warps + place.my_warp; i < end * s.memory.n;
       i += kWarp * place.all_warps) {
    const Granules granules = s.draft_row(i / s.memory.n).granules(i % s.memory.n);
    simt::prefetch(granules.first, granules.whole);
  }
}

// The same for all drafts, if they are few.
SPECDEC_DEVICE void prefetch_few_drafts(const Sequence& s, const Place& place) {
  const LogitRows& draft = s.params.draft;
  const int64_t rows = s.params.batch * s.params.num_drafts_max;
  if (!reads_drafts_late(s) || rows * draft.vocabulary * size_in_bytes(draft.dtype) > kMostPrefetched) return;
  prefetch_drafts(s, place, 0, s.limit);
}

// By the whole cluster: computes the masses of row j's residual in every block's memory. `turn`: the warp's next turn
// of the ring.
SPECDEC_DEVICE void weigh_residual(const Sequence& s, const Place& place, int64_t j, float w, float* masses,
                                   int* turn) {
  const Ring& ring = s.memory.ring;
  const int first = place.first_after(static_cast<int>(j) * s.memory.n), pairs = ring.num_slots / 2;
  const bool copies = copies_residuals(s.params, ring);
  const auto copy_block = [&](const Row& row, int block, int its_turn) {
    ring.of_turn(its_turn).copy(row.granules(block));
  };
  const auto copy_pair = [&](int block, int its_turn) {
    if (!copies || block >= s.memory.n || !place.lane0()) return;
    copy_block(s.target_row(j), block, its_turn);
    copy_block(s.draft_row(j), block, its_turn + 1);
  };
  if (!copies && reads_drafts_late(s)) prefetch_drafts(s, place, static_cast<int>(j), static_cast<int>(j) + 1);
  for (int pair = 0; pair < pairs; ++pair) copy_pair(first + pair * place.all_warps, *turn + 2 * pair);
  for (int block = first; block < s.memory.n; block += place.all_warps) {
    float weights[kEach], sum = 0.0f;
    const auto near = [&](const Row&, int of_draft) { return copies ? ring.arrived(*turn + of_draft) : nullptr; };
    residual_weights(s, j, w, block, {}, near, weights);
    if (copies) {
      simt::sync_warp();  // all lanes have read the slots
      copy_pair(block + pairs * place.all_warps, *turn + 2 * pairs);
      *turn += 2;
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) sum += weights[i];
    publish(&masses[block], simt::reduce(sum, Sum()));
  }
}

// Where a sequence's kept drafts end: the row after them, the state there, and the status.
struct Outcome {
  int64_t j;
  int32_t state, status;
  float w;
  const float* masses;  // of the residual
};

SPECDEC_DEVICE Outcome walk(const Sequence& s, const Place& place) {
  const StepMemory& memory = s.memory;
  Outcome end = {0, kDone, 0, 1.0f, memory.residual};
  int turn = s.measures ? place.turns(s.items()) : 0;
  while (true) {
    Examined row = simt::read(&memory.examined[end.j]);
    while (row.kept()) row = simt::read(&memory.examined[++end.j]);
    end.state = row.state, end.status |= row.flags;
    if (row.state != kRecover) return end;
    weigh_residual(s, place, end.j, 1.0f, memory.residual, &turn);
    simt::sync_cluster();
    if (total(memory.residual, memory.n) > 0.0f) return end;
    simt::sync_cluster();
    // A residual without mass: p and q are equal up to rounding. The draft is accepted, unless p(x) = 0.
    end.state = kDraw;
    if (row.log_p == -INFINITY) return end;
    ++end.j;
  }
}

// By the threads of a block: which prefix is kept, when the residuals of the first `drafted` rows are weighed.
SPECDEC_DEVICE Outcome joint_end(const Sequence& s, const Place& place, int drafted) {
  const StepMemory& memory = s.memory;
  for (int j = place.warp; j < drafted; j += place.warps) {
    const float sum = total(memory.residual + int64_t{j} * memory.n, memory.n);
    if (place.lane0()) simt::write(&memory.total[j], sum);
  }
  simt::sync_block();
  Outcome end = {0, kDone, 0, 1.0f, nullptr};
  float w = 1.0f, u = 0.0f;  // tests the prefix: the number of its last draft
  for (int64_t j = 0;; ++j) {
    const Examined row = simt::read(&memory.examined[j]);
    const float keep = row.state == kRecover ? keep_probability(w, simt::read(&memory.total[j])) : w;
    if (j == 0 || u < keep) end = {j, row.state, row.flags, w, memory.residual + j * memory.n};
    if (!row.possible()) break;
    u = row.u;
    w = joint_ratio(w, row.log_p, row.log_q);
  }
  while (end.state == kRecover && !(simt::read(&memory.total[end.j]) > 0.0f)) {
    const Examined row = simt::read(&memory.examined[end.j]);
    end.state = kDraw;
    if (row.log_p == -INFINITY || end.j + 1 > drafted) break;
    const Examined next = simt::read(&memory.examined[end.j + 1]);
    const int64_t j = end.j + 1;
    end = {j, next.state, next.flags, joint_ratio(end.w, row.log_p, row.log_q), memory.residual + j * memory.n};
    if (end.state == kRecover && j >= drafted) end.state = kDraw;
  }
  return end;
}

SPECDEC_DEVICE Outcome walk_jointly(const Sequence& s, const Place& place) {
  const StepMemory& memory = s.memory;
  int turn = s.measures ? place.turns(s.items()) : 0;
  int drafted = 0;  // number of rows with a residual
  float w = 1.0f;
  for (bool possible = true; possible && simt::read(&memory.examined[drafted]).state == kRecover; ++drafted) {
    const Examined row = simt::read(&memory.examined[drafted]);
    weigh_residual(s, place, drafted, w, memory.residual + int64_t{drafted} * memory.n, &turn);
    possible = row.possible();
    w = joint_ratio(w, row.log_p, row.log_q);
  }
  simt::sync_cluster();
  return joint_end(s, place, drafted);
}

// By a warp: the block of logits that has the token after the kept drafts; -1 if there is none.
SPECDEC_DEVICE int block_of_end(const Sequence& s, const Outcome& end) {
  if (end.state == kDone) return -1;
  const float* masses = end.state == kDraw ? s.blocks(end.j).mass : end.masses;
  return static_cast<int>(race_among(masses, s.memory.n, s.noise(end.j), kRecoverBlock));
}

// By the threads of a block: draws that token.
SPECDEC_DEVICE int64_t draw_end(const Sequence& s, const Outcome& end, int block, const Place& place) {
  const Noise noise = s.noise(end.j);
  if (end.state == kDraw) {
    return draw(s.target_row(end.j), s.blocks(end.j), block, s.inverse_temperature, s.p_of(end.j).cutoff, noise,
                kRecoverToken, s.memory.drawn, place);
  }
  // Other thread blocks, which may keep q's logits, may have ended.
  const auto near = [&](const Row& row, int of_draft) { return of_draft ? row.granules(block).first : nullptr; };
  return draw_by(block, noise, kRecoverToken, s.memory.drawn, place, [&](Part part, float (&weights)[kEach]) {
    residual_weights(s, end.j, end.w, block, part, near, weights);
  });
}

}  // namespace specdec::cuda
