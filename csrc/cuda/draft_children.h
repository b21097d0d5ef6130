// draft_children in one launch: a cluster of blocks measures a row. All of them race for the sampled children; block 0
// finds the most likely ones, applies filters, and writes the results.
#pragma once

#include "arrivals.h"
#include "drafted_row.h"
#include "likely.h"

namespace specdec::cuda {

static_assert(kMostLikely <= kMostArrivals);

struct ChildrenMemory {
  Ring ring;
  Blocks blocks;
  float* cutoff;  // [1]
  SelectionMemory* selection;
  ArrivalsMemory* arrivals;
  uint32_t *above, *at_cutoff;  // [blocks of the row], for the most likely tokens
  LikelyMemory* likely;

  static Items items(const DraftChildrenParams& params);
  static ChildrenMemory cut(Arena& arena, const DraftChildrenParams& params, const Items& items, const Cut& cut);

  SPECDEC_DEVICE ChildrenMemory at(char* base) const {
    return {ring.at(base),          {moved(blocks.max, base), moved(blocks.mass, base), blocks.n},
            moved(cutoff, base),    moved(selection, base),
            moved(arrivals, base),  moved(above, base),
            moved(at_cutoff, base), moved(likely, base)};
  }
};

inline Items ChildrenMemory::items(const DraftChildrenParams& params) { return items_of_drafting(params, false); }

inline ChildrenMemory ChildrenMemory::cut(Arena& arena, const DraftChildrenParams& params, const Items& items,
                                          const Cut& cut) {
  const int n = blocks_of(params.vocabulary);
  ChildrenMemory memory = {};
  memory.ring = ring_of(arena, items, cut);
  memory.blocks = {arena.take<float>(n), arena.take<float>(n), n};
  memory.cutoff = arena.take<float>(1);
  if (params.sampling.filters != nullptr || !params.sampled) memory.selection = arena.take<SelectionMemory>(1);
  memory.arrivals = arena.take<ArrivalsMemory>(1);
  if (!params.sampled) {
    memory.above = arena.take<uint32_t>(n), memory.at_cutoff = arena.take<uint32_t>(n);
    memory.likely = arena.take<LikelyMemory>(1);
  }
  return memory;
}

using ChildrenWork = Work<DraftChildrenParams, ChildrenMemory>;

// What every thread of a cluster knows of its row.
struct Branching {
  const DraftChildrenParams& params;
  ChildrenMemory memory;
  Row row;
  bool greedy;  // the only sampled child is the most likely token
  bool filtered;
  float temperature, inverse_temperature;  // temperature 1 for the most likely tokens of a greedy sequence
};

SPECDEC_DEVICE Branching branching_of(const ChildrenWork& work, int64_t b) {
  const DraftChildrenParams& params = work.params;
  const ChildrenMemory memory = work.memory(b);
  const Row row = row_to_draft_from(params, b, params.depth, memory.ring, work.place_for_copy());
  const float given = params.sampling.temperature[b];
  const bool greedy = given == 0.0f && params.sampled;
  const float temperature = given == 0.0f && !params.sampled ? 1.0f : given;
  return {params,
          memory,
          row,
          greedy,
          given != 0.0f && filters_of(params.sampling, b).any(),
          temperature,
          greedy ? 0.0f : 1.0f / temperature};
}

// By a block: writes a row's statistics, and the first `size` children of a sorted list.
SPECDEC_DEVICE void write_children(const Branching& s, const Candidate* list, int size, int32_t fault, Distribution q) {
  const int64_t width = s.params.width, first = s.row.b * width;
  for (int64_t i = simt::thread(); i < width; i += simt::num_threads()) {
    int64_t token = -1;
    float log_q = -INFINITY;
    if (i < size) {
      const int64_t index = index_of(simt::read(&list[i]));
      token = target_id(s.row, index);
      log_q = s.greedy ? 0.0f : log_probability(logit_at(s.row, index), q);
    }
    s.params.tokens[first + i] = token;
    s.params.log_q[first + i] = log_q;
  }
  if (simt::thread() != 0) return;
  s.params.cutoff[s.row.b] = fault != 0 ? -INFINITY : q.cutoff;
  s.params.lse[s.row.b] = fault != 0 ? NAN : q.lse;
  s.params.status[s.row.b] = fault << kDraftFlagShift;
}

// The cutoff of the filters, and that of the most likely tokens, if these are wanted. By the threads of a block.
SPECDEC_DEVICE Cutoffs cutoffs_of_children(const Branching& s, float max, float sum) {
  Selection selection = {s.row, s.memory.blocks, max, s.inverse_temperature, s.memory.selection};
  const int64_t likely = s.params.sampled ? 0 : s.params.width;
  if (s.filtered) return cutoffs_of(selection, likely, s.temperature, sum);
  if (likely == 0) return {-INFINITY, -INFINITY};
  selection.low = selection.bound_of(likely);
  return {-INFINITY, selection.select(-INFINITY, false, 1.0f, static_cast<float>(likely))};
}

// By the threads of a block: lists the most likely tokens.
SPECDEC_DEVICE int list_likely(const Branching& s, float cutoff) {
  const ChildrenMemory& memory = s.memory;
  const int size = fill_slots(s.row, memory.blocks, cutoff, static_cast<int>(s.params.width), memory.above,
                              memory.at_cutoff, memory.likely);
  for (int i = simt::thread(); i < size; i += simt::num_threads()) {
    const uint64_t key = ordered_key(simt::read(&memory.likely->logit[i]));
    simt::write(&memory.arrivals->list[i], key << 32 | (0xffffffffu - simt::read(&memory.likely->token[i])));
  }
  return size;
}

// Given the blocks' statistics.
SPECDEC_DEVICE void decide_children(const Branching& s, const Place& place) {
  const ChildrenMemory& memory = s.memory;
  const Blocks& blocks = memory.blocks;
  const bool sampled = s.params.sampled && !s.greedy;
  const float max = max_of_blocks(blocks);
  const int32_t fault = row_fault(max);
  if (!place.first && (!sampled || fault != 0)) return;
  Candidate* const list = memory.arrivals->list;
  if (fault != 0) return write_children(s, list, 0, fault, {});
  if (s.greedy) {
    if (place.warp == 0) {
      const int64_t token = argmax(s.row, block_of_max(blocks, max), max);
      if (place.lane0()) simt::write(&list[0], candidate(1.0f, static_cast<uint32_t>(token)));
    }
    simt::sync_block();
    return write_children(s, list, 1, 0, {0.0f, max, -INFINITY});
  }
  Distribution q = {s.inverse_temperature, 0.0f, -INFINITY};
  Cutoffs cutoffs = {-INFINITY, -INFINITY};
  if (place.first) {
    if (place.warp == 0) merge(blocks, max, s.inverse_temperature);
    simt::sync_block();
    float sum = total(blocks.mass, blocks.n);
    cutoffs = cutoffs_of_children(s, max, sum);
    q.cutoff = cutoffs.kept;
    if (s.filtered) {
      simt::sync_block();
      keep_above(s.row, blocks, max, s.inverse_temperature, q.cutoff);
      simt::sync_block();
      sum = total(blocks.mass, blocks.n);
    }
    q.lse = max * s.inverse_temperature + logf(sum);
  }
  int size;
  if (sampled) {
    if (s.filtered) {
      if (place.first && place.warp == 0) publish(memory.cutoff, q.cutoff);
      simt::sync_cluster();
      q.cutoff = simt::read(memory.cutoff);
    }
    const Noise noise = {static_cast<uint64_t>(s.params.seed[s.row.b]), static_cast<uint32_t>(s.row.position),
                         static_cast<uint32_t>(s.params.offset[s.row.b])};
    list_arrivals(s.row, blocks, max, q, noise, static_cast<uint32_t>(s.params.width), memory.arrivals, place);
    if (!place.first) return;
    size = gather_arrivals(memory.arrivals);
  } else {
    size = list_likely(s, cutoffs.likely);
  }
  sort_falling(list, size);
  write_children(s, list, size, 0, q);
}

// The first of the two kernels of a split launch.
SPECDEC_KERNEL(children_measure_kernel, kMostThreads, ChildrenWork) {
  measure_row(branching_of(params, simt::cluster() / params.blocks), Place::measuring(params.blocks));
}

SPECDEC_KERNEL(draft_children_kernel, kMostThreads, ChildrenWork) {
  const Place place = Place::here();
  const Branching s = branching_of(params, simt::cluster());
  if (params.measures()) {
    measure_row(s, place);
    simt::sync_cluster();
  }
  decide_children(s, place);
  simt::arrive_only();                     // block 0 has read what others list and keep,
  if (!place.first) simt::wait_cluster();  // whose shared memory ends with them
}

}  // namespace specdec::cuda
