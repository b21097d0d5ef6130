// speculative_step row by row, for sequences whose rows do not all stay in shared memory: each row is read once, and
// stays until it is decided. Rule `token` stops at the rejection, and the residuals of rule `block` need no second
// read.
#pragma once

#include "speculative_step.h"

namespace specdec::cuda {

// A warp's place in its slots, which it uses in turn.
struct Turn {
  int slot = 0, round = 0;

  // At most as many turns as there are slots.
  SPECDEC_DEVICE void go_on(int turns, int num_slots) {
    slot += turns;
    if (slot >= num_slots) slot -= num_slots, round ^= 1;
  }
};

// The rows of a sequence that are near: those that are not decided yet, and as many of the next ones as there are slots
// for. A warp takes the same blocks of every row, and reads no other warp's, so it reuses slots without asking others.
struct Window {
  const Sequence& s;
  const Place& place;
  bool pairs;      // a block of the target's row is followed by that of the draft's
  bool weighs;     // the draft's rows are measured, too
  bool behind;     // a row is decided after the next one is measured, which hides the barrier between the two
  int mine;        // blocks of a row that are the warp's
  int row, block;  // what is copied next
  bool of_draft;
  int free, unread;      // slots for further copies; copies that no one has waited for
  Turn now, oldest;      // what is measured next, and decided next
  bool arrived = false;  // at the cluster's barrier, without having waited

  SPECDEC_DEVICE static Window of(const Sequence& s, const Place& place) {
    const int num_slots = s.memory.ring.num_slots, mine = place.turns(s.memory.n);
    const bool pairs = rows_of_decision(s.params) == 2 && !s.greedy();
    return {s,
            place,
            pairs,
            s.draft_rows() > 0,
            slots_hold(num_slots, pairs ? 4 : 2, s.memory.n, place.all_warps),
            mine,
            mine > 0 ? 0 : s.limit + 1,
            place.my_warp,
            false,
            num_slots,
            0,
            {},
            {}};
  }

  SPECDEC_DEVICE Slot slot(const Turn& turn) const { return s.memory.ring.slot(turn.slot); }
  SPECDEC_DEVICE void next(Turn* turn, int turns) const { turn->go_on(turns, s.memory.ring.num_slots); }

  SPECDEC_DEVICE static void copy(const Slot& slot, const Row& row, int block) {
    slot.copy(row.block_in_memory(block), row.size_of(block) * row.element());
  }

  // By a warp: begins as many copies as there are free slots.
  SPECDEC_DEVICE void copy_ahead() {
    Turn ahead = oldest;
    next(&ahead, s.memory.ring.num_slots - free);
#pragma unroll 1
    for (; free > 0 && row <= s.limit; --free, ++unread) {
      if (place.lane0() && of_draft) copy(slot(ahead), s.draft_row(row), block);
      if (place.lane0() && !of_draft) copy(slot(ahead), s.target_row(row), block);
      next(&ahead, 1);
      of_draft = pairs && !of_draft && row < s.limit;
      if (of_draft) continue;
      block += place.all_warps;
      if (block >= s.memory.n) block = place.my_warp, ++row;
    }
  }

  SPECDEC_DEVICE void begin() {
    const Ring& ring = s.memory.ring;
    for (int i = 0; place.lane0() && i < ring.num_slots; ++i) simt::init(ring.slot(i).arrival);
    copy_ahead();
    simt::sync_warp();
  }

  // By a warp: gives the slots of the oldest turns to further copies.
  SPECDEC_DEVICE void release(int turns) {
    simt::sync_warp();  // all lanes have read the slots
    next(&oldest, turns);
    free += turns;
    copy_ahead();
  }
  SPECDEC_DEVICE void release_row() { release((pairs ? 2 : 1) * mine); }

  // By a warp, at the end: waits for the copies of rows that are not needed, since its memory ends with the block.
  SPECDEC_DEVICE void drain() {
    for (; unread > 0; --unread) slot(now).arrived(now.round), next(&now, 1);
  }

  // Every thread meets all others of the cluster by an arrival and a later wait.
  SPECDEC_DEVICE void arrive() { simt::arrive_cluster(), arrived = true; }
  SPECDEC_DEVICE void wait() {
    if (arrived) simt::wait_cluster();
    arrived = false;
  }

  // By a warp: the statistics of a block of row j, the target's or the draft's.
  SPECDEC_DEVICE void measure_block(int j, bool is_draft, int its, const char* data) const {
    const bool wants_raw = s.params.log_probs != nullptr && !is_draft;
    const int i = is_draft ? static_cast<int>(s.params.num_drafts_max) + 1 + j : j;  // as in StepMemory
    BlockStats stats, raw = {};
    if (s.params.sampling.has_table) {
      stats = adjusted_stats(data, s.row(i), its, s.inverse_temperature, wants_raw, &raw, [] {});
    } else {
      with_format(is_draft ? s.params.draft.dtype : s.params.target.dtype, [&](auto format) {
        Logits<decltype(format)> logits;
        const int left = static_cast<int>(s.params.vocabulary) - its * kBlock;
        if (left >= kBlock) {
          logits.load(data);
        } else {
          logits.load_part(data, left);
        }
        if (wants_raw) raw = block_stats(logits, 1.0f);
        stats = block_stats(logits, s.inverse_temperature);
      });
    }
    const int at = i * s.memory.n + its, blocks = simt::blocks_in_cluster();
    for (int block = simt::thread() % kWarp; block < blocks; block += kWarp) {
      simt::write(simt::in_block(&s.memory.max[at], block), stats.max);
      simt::write(simt::in_block(&s.memory.mass[at], block), stats.sum);
      if (!wants_raw) continue;
      simt::write(simt::in_block(&s.memory.raw_max[at], block), raw.max);
      simt::write(simt::in_block(&s.memory.raw_sum[at], block), raw.sum);
    }
  }

  // By a warp: the statistics of its blocks of row j, and of the draft's row beside it.
  SPECDEC_DEVICE void measure_row(int j) {
    bool is_draft = false;
#pragma unroll 1
    for (int its = place.my_warp; its < s.memory.n;) {
      const char* data = slot(now).arrived(now.round);
      if (!is_draft || weighs) measure_block(j, is_draft, its, data);
      next(&now, 1), --unread;
      is_draft = pairs && !is_draft && j < s.limit;
      if (!is_draft) its += place.all_warps;
    }
  }

  // Whether a rejected draft's row is copied over the row after it, which has been measured.
  SPECDEC_DEVICE bool replaces() const { return behind && !pairs && s.same_vocabulary() && aligned(s.params.draft); }

  // By a warp: copies its blocks of a row over those of the row after the oldest one.
  SPECDEC_DEVICE void replace_next(const Row& by) const {
    if (!place.lane0()) return;
    Turn turn = oldest;
    next(&turn, mine);
    for (int its = place.my_warp; its < s.memory.n; its += place.all_warps) copy(slot(turn), by, its), next(&turn, 1);
  }

  // By a warp: the mass of a whole block of row j's residual, if both rows have one format and nothing adjusts them: in
  // fewer instructions, since no filter cuts off any p.
  SPECDEC_DEVICE float plain_mass(int j, float w, const char* of_p, const char* of_q) const {
    const Distribution p = s.p_of(j), q = s.q_of(j);
    float sum = 0.0f;
    with_format(s.params.target.dtype, [&](auto format) {
      Logits<decltype(format)> x, y;
      x.load(of_p), y.load(of_q);
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const float its = simt::exp2_of(log_probability(x[i], p.inverse_temperature, p.lse) * kLog2e);
        sum += residual(rounded_product(w, its), probability_of(y[i], q));
      }
    });
    return sum;
  }

  // By a warp: the masses of its blocks of row j's residual, in every block's memory. Row j is the oldest one. With
  // rule `block`, which is done with the row then, releases it.
  SPECDEC_DEVICE void weigh_row(int j, float w, float* masses) {
    if (replaces()) replace_next(s.draft_row(j));
    const bool plain =
        (pairs || replaces()) && !s.params.sampling.has_table && s.params.draft.dtype == s.params.target.dtype;
    Turn of_p = oldest, of_q = oldest;
    next(&of_q, pairs ? 1 : mine);
    for (int its = place.my_warp; its < s.memory.n; its += place.all_warps) {
      const auto near = [&](const Row& its_row, int is_draft) -> const char* {
        if (is_draft == 0) return slot(of_p).data;
        if (pairs) return slot(of_q).data;
        return replaces() ? slot(of_q).arrived(of_q.round ^ 1) : place_of_block(its_row, its);
      };
      float sum = 0.0f;
      if (plain && (its + 1) * kBlock <= s.params.vocabulary) {
        sum = plain_mass(j, w, slot(of_p).data, near(s.draft_row(j), 1));
      } else {
        float weights[kEach];
        residual_weights(s, j, w, its, {}, near, weights);
#pragma unroll
        for (int i = 0; i < kEach; ++i) sum += weights[i];
      }
      publish(&masses[its], simt::reduce(sum, Sum()));
      next(&of_p, pairs ? 2 : 1), next(&of_q, pairs ? 2 : 1);
      if (s.params.rule == kRuleBlock) release(pairs ? 2 : 1);
    }
  }

  // By a warp, if sampling goes on after weigh_row: brings back what the draft's row replaced.
  SPECDEC_DEVICE void restore_next(int j) const {
    if (!replaces()) return;
    replace_next(s.target_row(j + 1));
    Turn turn = oldest;
    next(&turn, mine);
    for (int i = 0; i < mine; ++i) slot(turn).arrived(turn.round), next(&turn, 1);
  }
};

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
      const int64_t token = argmax(s.target_row(j), s.blocks(j), max);
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
  const Place place = Place::spread();
  const Sequence s = sequence_of(params, simt::cluster());
  Window window = Window::of(s, place);
  window.begin();
  look_at_drafts(s);
  simt::sync_cluster();  // now all blocks run, and may write to each other's memory
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
    emitted = {end.j, draw_end(s, end, place), end.status};
  }
  if (place.warp == 0) write_step(s, emitted);
}

}  // namespace specdec::cuda
