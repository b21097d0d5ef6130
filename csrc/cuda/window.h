// The rows of a sequence that are near while they are decided one by one, and what warps do with their blocks.
#pragma once

#include "speculative_step.h"

namespace specdec::cuda {

// A warp's place in its slots, which it uses in turn: a number in two rounds of them, since registers are scarce.
struct Turn {
  int number = 0;

  SPECDEC_DEVICE int round(int num_slots) const { return number >= num_slots; }
  SPECDEC_DEVICE int slot(int num_slots) const { return number - (number >= num_slots ? num_slots : 0); }
  // At most as many turns as there are slots.
  SPECDEC_DEVICE void go_on(int turns, int num_slots) {
    number += turns;
    if (number >= 2 * num_slots) number -= 2 * num_slots;
  }
};

// The rows of a sequence that are near: those that are not decided yet, and as many of the next ones as there are slots
// for. A warp takes the same blocks of every row, and reads no other warp's, so it reuses slots without asking others.
struct Window {
  const Sequence& s;
  const Place& place;
  bool pairs;                // a block of the target's row is followed by that of the draft's
  bool weighs;               // the draft's rows are measured, too
  bool behind;               // a row is decided after the next one is measured, which hides the barrier between the two
  int mine;                  // blocks of a row that are the warp's
  int whole_blocks;          // of a row, those that begin and end with a granule in every row: [0, whole_blocks)
  int free;                  // slots for further copies
  int unread = 0;            // copies that no one has waited for
  int next_row, next_block;  // what is copied next
  bool next_is_draft = false;
  Turn now, oldest;      // what is measured next, and decided next
  bool arrived = false;  // at the cluster's barrier, without having waited

  SPECDEC_DEVICE Window(const Sequence& sequence, const Place& its_place) : s(sequence), place(its_place) {
    pairs = rows_of_decision(s.params) == 2 && !s.greedy();
    weighs = s.draft_rows() > 0;
    free = s.memory.ring.num_slots;
    behind = slots_hold(free, 2 * rows(), s.memory.n, place.all_warps);
    mine = place.turns(s.memory.n);
    whole_blocks =
        aligned(s.params.target) && aligned(s.params.draft) ? static_cast<int>(s.params.vocabulary / kBlock) : 0;
    next_row = mine > 0 ? 0 : s.limit + 1;
    next_block = place.my_warp;
  }

  SPECDEC_DEVICE int rows() const { return pairs ? 2 : 1; }
  SPECDEC_DEVICE Slot slot(const Turn& turn) const { return s.memory.ring.slot(turn.slot(s.memory.ring.num_slots)); }
  SPECDEC_DEVICE int round(const Turn& turn) const { return turn.round(s.memory.ring.num_slots); }
  SPECDEC_DEVICE void next(Turn* turn, int turns) const { turn->go_on(turns, s.memory.ring.num_slots); }

  SPECDEC_DEVICE static void copy(const Slot& slot, const Row& row, int block) { slot.copy(row.granules(block)); }

  // By a warp: begins as many copies as there are free slots.
  SPECDEC_DEVICE void copy_ahead() {
    Turn ahead = oldest;
    next(&ahead, s.memory.ring.num_slots - free);
#pragma unroll 1
    for (; free > 0 && next_row <= s.limit; --free, ++unread) {
      if (place.lane0() && next_is_draft) copy(slot(ahead), s.draft_row(next_row), next_block);
      if (place.lane0() && !next_is_draft) copy(slot(ahead), s.target_row(next_row), next_block);
      next(&ahead, 1);
      next_is_draft = pairs && !next_is_draft && next_row < s.limit;
      if (next_is_draft) continue;
      next_block += place.all_warps;
      if (next_block >= s.memory.n) next_block = place.my_warp, ++next_row;
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
  SPECDEC_DEVICE void release_row() { release(rows() * mine); }

  // By a warp, at the end: waits for the copies of rows that are not needed, since its memory ends with the block.
  SPECDEC_DEVICE void drain() {
    for (; unread > 0; --unread) slot(now).arrived(round(now)), next(&now, 1);
  }

  // Every thread meets all others of the cluster by an arrival and a later wait.
  SPECDEC_DEVICE void arrive() { simt::arrive_cluster(), arrived = true; }
  SPECDEC_DEVICE void wait() {
    if (arrived) simt::wait_cluster();
    arrived = false;
  }

  // By a warp: the statistics of a block of row j, the target's or the draft's.
  SPECDEC_DEVICE void measure_block(int j, bool is_draft, int block, const char* data) const {
    const bool wants_raw = s.params.log_probs != nullptr && !is_draft;
    const int i = is_draft ? static_cast<int>(s.params.num_drafts_max) + 1 + j : j;  // as in StepMemory
    BlockStats stats, raw = {};
    if (s.adjusts()) {
      stats = adjusted_stats(data, s.row(i), block, s.inverse_temperature, wants_raw, &raw, [] {});
    } else {
      with_format(is_draft ? s.params.draft.dtype : s.params.target.dtype, [&](auto format) {
        Logits<decltype(format)> logits;
        if (block < whole_blocks) {
          logits.load(data);
        } else {
          logits.load(Shifted::of(s.row(i).granules(block), data, format.kLowest));
        }
        if (wants_raw) raw = block_stats(logits, 1.0f);
        stats = block_stats(logits, s.inverse_temperature);
      });
    }
    const int at = i * s.memory.n + block, blocks = simt::blocks_in_cluster();
    for (int rank = simt::thread() % kWarp; rank < blocks; rank += kWarp) {
      simt::write(simt::in_block(&s.memory.max[at], rank), stats.max);
      simt::write(simt::in_block(&s.memory.mass[at], rank), stats.sum);
      if (!wants_raw) continue;
      simt::write(simt::in_block(&s.memory.raw_max[at], rank), raw.max);
      simt::write(simt::in_block(&s.memory.raw_sum[at], rank), raw.sum);
    }
  }

  // By a warp: the statistics of its blocks of row j, and of the draft's row beside it.
  SPECDEC_DEVICE void measure_row(int j) {
    bool is_draft = false;
#pragma unroll 1
    for (int block = place.my_warp; block < s.memory.n;) {
      const char* data = slot(now).arrived(round(now));
      if (!is_draft || weighs) measure_block(j, is_draft, block, data);
      next(&now, 1), --unread;
      is_draft = pairs && !is_draft && j < s.limit;
      if (!is_draft) block += place.all_warps;
    }
  }

  // Whether a rejected draft's row is copied over the row after it, which has been measured.
  SPECDEC_DEVICE bool replaces() const { return behind && !pairs && s.same_vocabulary(); }

  // By a warp: copies its blocks of a row over those of the row after the oldest one.
  SPECDEC_DEVICE void replace_next(const Row& by) const {
    if (!place.lane0()) return;
    Turn turn = oldest;
    next(&turn, mine);
    for (int block = place.my_warp; block < s.memory.n; block += place.all_warps)
      copy(slot(turn), by, block), next(&turn, 1);
  }

  // By a warp: the mass of a whole block of row j's residual, if both rows are aligned and have one format, and nothing
  // adjusts them: in fewer instructions, since no filter cuts off any p.
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
    const bool plain = (pairs || replaces()) && !s.adjusts() && s.params.draft.dtype == s.params.target.dtype;
    Turn of_p = oldest, of_q = oldest;
    next(&of_q, pairs ? 1 : mine);
    for (int block = place.my_warp; block < s.memory.n; block += place.all_warps) {
      const auto near = [&](const Row&, int is_draft) -> const char* {
        if (is_draft == 0) return slot(of_p).data;
        if (pairs) return slot(of_q).data;
        return replaces() ? slot(of_q).arrived(round(of_q) ^ 1) : nullptr;
      };
      float sum = 0.0f;
      if (plain && block < whole_blocks) {
        sum = plain_mass(j, w, slot(of_p).data, near(s.draft_row(j), 1));
      } else {
        float weights[kEach];
        residual_weights(s, j, w, block, {}, near, weights);
#pragma unroll
        for (int i = 0; i < kEach; ++i) sum += weights[i];
      }
      publish(&masses[block], simt::reduce(sum, Sum()));
      next(&of_p, rows()), next(&of_q, rows());
      if (s.params.rule == kRuleBlock) release(rows());
    }
  }

  // By a warp, if sampling goes on after weigh_row: brings back what the draft's row replaced.
  SPECDEC_DEVICE void restore_next(int j) const {
    if (!replaces()) return;
    replace_next(s.target_row(j + 1));
    Turn turn = oldest;
    next(&turn, mine);
    for (int i = 0; i < mine; ++i) slot(turn).arrived(round(turn)), next(&turn, 1);
  }
};

}  // namespace specdec::cuda
