// What a whole cluster does with a row of a tree: copies and measures it, applies filters, races, weighs residuals.
#pragma once

#include "tree_rules.h"

namespace specdec::cuda {

// By one thread of every warp, once.
SPECDEC_DEVICE void init_arrivals(const PairSlots& slots) {
  if (slots.slots == nullptr) return;
#pragma unroll 1
  for (int turn = 0; turn < slots.num_slots; ++turn) {
    simt::init(slots.slot(turn, false).arrival), simt::init(slots.slot(turn, true).arrival);
  }
}

// By one thread of every warp: has its blocks of the row that comes next copied.
SPECDEC_DEVICE void begin_copies(const TreeSequence& s, const Place& place) {
  if (s.memory.slots.slots == nullptr) return;
  const Reading now = reading_of(s);
#pragma unroll 1
  for (int which = 0; which <= now.reads_q; ++which) {
    const bool is_q = which == 1;
    const Row logits = s.logits(is_q, now.row, now.level, false);
    int turn = 0;
    for (int block = place.my_warp; block < logits.num_blocks(); block += place.all_warps) {
      s.memory.slots.slot(turn++, is_q).copy(logits.granules(block));
    }
  }
}

// By a warp: the statistics of its blocks of p, and of q, in every block's memory. `rounds`: whether an odd number
// of rows was copied to the slots before, of p (bit 0) and of q (bit 1).
SPECDEC_DEVICE void measure_visit(const TreeSequence& s, const Place& place, uint32_t rounds) {
  const PairSlots& slots = s.memory.slots;
  const Reading now = reading_of(s);
#pragma unroll 1
  for (int which = 0; which <= now.reads_q; ++which) {
    const bool is_q = which == 1;
    const Row logits = s.logits(is_q, now.row, now.level, true);
    float* const max = is_q ? s.memory.q.max : s.memory.p.max;
    float* const mass = is_q ? s.memory.q.mass : s.memory.p.mass;
    const int n = logits.num_blocks(), round = static_cast<int>(rounds >> which & 1);
    const bool starts_aligned = reinterpret_cast<uintptr_t>(logits.data) % kGranule == 0;
    const int whole = starts_aligned ? static_cast<int>(logits.size / kBlock) : 0;  // blocks [0, whole) are aligned
    const int block_bytes = kBlock * logits.element();
    int turn = 0;
    for (int block = place.my_warp; block < n; block += place.all_warps) {
      const char* data;
      if (slots.slots != nullptr) {
        data = slots.slot(turn++, is_q).arrived(round);
      } else {
        data = logits.data + int64_t{block} * block_bytes;
      }
      BlockStats stats;
      if (s.params.sampling.has_table) {
        stats = adjusted_stats(data, logits, block, s.inverse_temperature, false, nullptr, [] {});
      } else {
        with_format(logits.dtype, [&](auto format) {
          Logits<decltype(format)> x;
          if (block < whole) {
            x.load(data);
          } else {
            x.load(Shifted::of(logits.granules(block), data, format.kLowest));
          }
          stats = block_stats(x, s.inverse_temperature);
        });
      }
      publish(&max[block], stats.max);
      publish(&mass[block], stats.sum);
    }
  }
}

// Computes the largest logit, masses, cutoff and lse of p and q, in every block of the cluster.
SPECDEC_DEVICE void merge_visit(const TreeSequence& s, const Place& place) {
  const TreeMemory& memory = s.memory;
  const bool filtered = s.filtered();
  const Reading now = reading_of(s);
  const auto blocks_of_row = [&](bool is_q) {
    return Blocks{is_q ? memory.q.max : memory.p.max, is_q ? memory.q.mass : memory.p.mass,
                  is_q ? memory.q.n : memory.p.n};
  };
  const auto lse_of_row = [&](const Blocks& blocks, float max) {
    return max * s.inverse_temperature + logf(total(blocks.mass, blocks.n));
  };
#pragma unroll 1
  for (int which = place.warp; which <= now.reads_q; which += place.warps) {
    const Blocks blocks = blocks_of_row(which == 1);
    const float max = max_of_blocks(blocks);
    const bool weighs = !s.walks() && !filtered;
    if (weighs) merge(blocks, max, s.inverse_temperature);
    simt::sync_warp();
    const float lse = weighs ? lse_of_row(blocks, max) : max;
    if (!place.lane0()) continue;
    simt::write(&memory.row_max[which], max);
    if (!filtered) simt::write(&memory.lse[which], lse), simt::write(&memory.cutoff[which], -INFINITY);
  }
  simt::sync_block();
  if (!filtered) return;
  // The filters of p are the work of one block, and those of q of another one.
#pragma unroll 1
  for (int which = simt::block_in_cluster(); which <= now.reads_q; which += simt::blocks_in_cluster()) {
    const Row logits = s.logits(which == 1, now.row, now.level, true);
    const Blocks blocks = blocks_of_row(which == 1);
    const float max = simt::read(&memory.row_max[which]);
    if (row_fault(max) != 0) {
      if (place.warp == 0) publish(&memory.lse[which], max), publish(&memory.cutoff[which], -INFINITY);
      continue;
    }
    if (place.warp == 0) merge(blocks, max, s.inverse_temperature);
    simt::sync_block();
    Selection selection = {logits, blocks, max, s.inverse_temperature, memory.selection};
    const float cutoff = cutoffs_of(selection, 0, 1.0f / s.inverse_temperature, total(blocks.mass, blocks.n)).kept;
    simt::sync_block();
    keep_above(logits, blocks, max, s.inverse_temperature, cutoff);
    simt::sync_block();
    const float lse = lse_of_row(blocks, max);
    simt::sync_block();
    for (int block = place.warp; block < blocks.n; block += place.warps) {
      const float mass = simt::read(&blocks.mass[block]);
      simt::sync_warp();
      publish(&blocks.mass[block], mass);
    }
    if (place.warp == 0) publish(&memory.lse[which], lse), publish(&memory.cutoff[which], cutoff);
    simt::sync_block();
  }
  simt::sync_cluster();
}

// By the whole cluster: the token that the target picks in a row that has a distribution, by the race of rule `walk`.
// In warp 0 of every block.
SPECDEC_DEVICE int64_t picked_token(const TreeSequence& s, const Place& place) {
  const TreeMemory& memory = s.memory;
  const Reading now = reading_of(s);
  const float max = simt::read(&memory.row_max[0]);
  if (s.greedy()) {
    if (place.warp != 0) return -1;
    return argmax(s.logits(false, now.row, now.level, false), block_of_max(memory.p, max), max);
  }
  Noise noise = s.noise(0);
  noise.position += static_cast<uint32_t>(now.level);
  const Candidate mine = race_of_row(s.logits(false, now.row, now.level, true), memory.p, max, s.inverse_temperature,
                                     simt::read(&memory.cutoff[0]), noise, place);
  publish(&memory.best[place.my_warp], mine);
  simt::sync_cluster();
  return place.warp == 0 ? index_of(best_of(memory.best, place.all_warps)) : -1;
}

// By a warp: of a block, sets the values of these tokens to 0.
SPECDEC_DEVICE void take_away(const int64_t* tokens, int from, int to, int block, float (&x)[kEach]) {
#pragma unroll 1
  for (int k = from; k < to; ++k) {
    const int64_t place = simt::read(&tokens[k]) - int64_t{block} * kBlock;
    if (place < 0 || place >= kBlock) continue;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (place_of(i) == place) x[i] = 0.0f;
    }
  }
}

// By a warp: the weights max(0, scale p - q) of a part of a block of the last visit's row. `left`, if not null, gets
// the lane's mass of q without what is rejected, the present child among it, and needs the whole block.
SPECDEC_DEVICE void sibling_weights(const TreeSequence& s, bool near, float scale, int block, Part part, float* left,
                                    float (&weights)[kEach]) {
  // Read where it is needed, since registers are scarce.
  const int level = simt::read(&s.memory.next->level);
  const Visit* const visit = &s.memory.visits[level];
  const auto read = [&](const Distribution& its) {
    return Distribution{s.inverse_temperature, simt::read(&its.lse), simt::read(&its.cutoff)};
  };
  const auto logits = [&](bool is_q) { return s.logits(is_q, simt::read(&visit->row), level, near); };
  load_block(logits(false), block, weights);
  const Distribution p = read(visit->p);
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    if (part.has(i)) weights[i] = rounded_product(scale, probability_of(weights[i], p));
  }
  if (s.params.d2t == nullptr) {
    float q[kEach];
    load_block(logits(true), block, q);
    const Distribution of_q = read(visit->q);
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (part.has(i)) q[i] = probability_of(q[i], of_q), weights[i] = residual(weights[i], q[i]);
    }
    if (left == nullptr) return;
    take_away(s.memory.removed, simt::read(&visit->removed_from), simt::read(&visit->removed) + 1, block, q);
#pragma unroll
    for (int i = 0; i < kEach; ++i) *left += q[i];
    return;
  }
  subtract_listed(
      logits(false), s.params.d2t, s.params.draft.vocabulary, block,
      [&](int64_t at) {
        const float q = probability_of(logit_at(logits(true), at), read(visit->q));
        if (left != nullptr &&
            !is_removed(s, simt::read(&visit->removed_from), simt::read(&visit->removed) + 1, s.params.d2t[at])) {
          *left += q;
        }
        return q;
      },
      weights);
}

// By a warp: the masses of its blocks of a residual, and of what is left of q without the present child, in every
// block's memory.
SPECDEC_DEVICE void weigh_siblings(const TreeSequence& s, const Place& place) {
  const bool near = simt::read(&s.memory.next->near) == reading_of(s).row;
  const float scale = simt::read(&s.memory.next->scale);
  float* const masses = s.memory.residual + (1 - simt::read(&s.memory.next->residual)) * s.memory.p.n;
#pragma unroll 1
  for (int block = place.my_warp; block < s.memory.p.n; block += place.all_warps) {
    float weights[kEach], left = 0.0f, sum = 0.0f;
    sibling_weights(s, near, scale, block, {}, &left, weights);
#pragma unroll
    for (int i = 0; i < kEach; ++i) sum += weights[i];
    publish(&masses[block], simt::reduce(sum, Sum()));
    publish(&s.memory.left[block], simt::reduce(left, Sum()));
  }
}

}  // namespace specdec::cuda
