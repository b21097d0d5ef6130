// speculative_step row by row, for sequences whose rows do not all stay in shared memory: each row is read once, and
// stays until it is decided. Rule `token` stops at the rejection, and the residuals of rule `block` need no second
// read.
#pragma once

#include "window.h"

namespace specdec::cuda {

// By the threads of a block: merges the statistics of row j, and tests its draft.
SPECDEC_DEVICE void conclude_row(const Sequence& s, const Place& place, int j) {
  if (place.warp == 0) {
    merge_row(s, place, j, false);
    if (j < s.draft_rows()) merge_row(s, place, s.params.num_drafts_max + 1 + j, false);
    simt::sync_warp();
    if (!s.greedy()) {
      if (place.lane0()) {
        simt::write(&s.memory.examined[j], examine(s, j, simt::read(&s.memory.examined[j])));
      }
    } else if (const float max = simt::read(&s.memory.row_max[j]); row_fault(max) == 0) {
      const int64_t token = argmax(s.target_row(j), block_of_max(s.blocks(j), max), max);
      if (place.lane0()) simt::write(&s.memory.favourite[j], token);
    }
  }
  simt::sync_block();
}

// Rule `token` at row j: whether its draft is kept. If not, *state is that of the sequence.
SPECDEC_DEVICE bool keeps_row(const Sequence& s, Window* window, int j, int32_t* state, int32_t* status) {
  const Examined row = simt::read(&s.memory.examined[j]);
  if (row.kept()) return true;
  *state = row.state, *status |= row.flags;
  if (row.state != kRecover) return false;
  window->weigh_row(j, 1.0f, s.memory.residual);
  window->wait(), window->arrive(), window->wait();
  if (total(s.memory.residual, s.memory.n) > 0.0f) return false;
  // A residual without mass, as in `walk`.
  *state = kDraw;
  if (row.log_p == -INFINITY) return false;
  window->restore_next(j);
  if (window->behind) window->arrive();  // no block weighs the next residual before all have read this one
  return true;
}

// Walks along the rows until no more of them count, and returns the last one. With rule `block`, those before it have
// a residual.
SPECDEC_DEVICE int walk_rows(const Sequence& s, const Place& place, Window* window, int32_t* state, int32_t* status) {
  bool possible = true;
  float w = 1.0f;
#pragma unroll 1
  for (int measured = 0;; ++measured) {
    if (measured <= s.limit) window->measure_row(measured);
    window->wait();
    window->arrive();
    if (!window->behind) window->wait();
    const int j = window->behind ? measured - 1 : measured;
    if (j < 0) continue;
    conclude_row(s, place, j);
    if (s.greedy() || s.params.rule == kRuleToken) {
      Emitted so_far = {j, -1, 0};
      if (s.greedy() ? !is_favourite(s, &so_far) : !keeps_row(s, window, j, state, status)) return j;
      window->release_row();
    } else {
      const Examined row = simt::read(&s.memory.examined[j]);
      if (!possible || row.state != kRecover) return j;
      window->weigh_row(j, w, s.memory.residual + int64_t{j} * s.memory.n);
      possible = row.possible();
      w = joint_ratio(w, row.log_p, row.log_q);
    }
  }
}

SPECDEC_KERNEL(speculative_rows_kernel, kMostThreads, StepWork) {
  simt::arrive_only();
  const Place place = Place::spread();
  const Sequence s = sequence_of(params, simt::cluster());
  Window window(s, place);
  window.begin();
  look_at_drafts(s);
  simt::wait_cluster();  // now all blocks run, and may write to each other's memory
  int32_t state = kDone, status = 0;
  const int last = walk_rows(s, place, &window, &state, &status);
  window.drain();
  window.wait();  // no block writes to another one's memory any more
  if (!place.first) return;
  Emitted emitted = {last, -1, 0};
  if (s.greedy()) {
    is_favourite(s, &emitted);
  } else {
    Outcome end = {last, state, status, 1.0f, s.memory.residual};
    if (s.params.rule == kRuleBlock) end = joint_end(s, place, last);
    emitted = {end.j, draw_end(s, end, block_of_end(s, end), place), end.status};
  }
  if (place.warp == 0) write_step(s, emitted);
}

}  // namespace specdec::cuda
