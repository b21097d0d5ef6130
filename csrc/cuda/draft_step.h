// The launch of draft_step that decides: a cluster of blocks takes a sequence, and measures its row if no launch before
// did (statistics.h). Without filters, each block then chooses the block of logits that has the draft, and the one that
// keeps it draws; else block 0 does all of that.
#pragma once

#include <optional>

#include "drafted_row.h"
#include "select.h"
#include "statistics.h"

namespace specdec::cuda {

struct DraftMemory {
  Ring ring;
  Blocks blocks;
  float* cutoff;    // [1]
  Candidate* best;  // [blocks of the cluster * warps]
  SelectionMemory* selection;

  // The items that a sequence has, and the memory that it needs.
  static Items items(const DraftStepParams& params);
  static DraftMemory cut(Arena& arena, const DraftStepParams& params, const Items& items, const Cut& cut);
  // What is left to read when the row is measured: a block of logits, or with rule `coupled` all of them.
  static Items deciding(const DraftStepParams& params, const Items& items) {
    Items left = items;
    left.most = params.coupled ? items.most : 1;
    return left;
  }
  Statistics statistics() const { return Statistics::of(blocks.max, blocks.mass, cutoff); }
  static std::optional<StatisticsParams> to_measure(const DraftStepParams& params);

  SPECDEC_DEVICE DraftMemory at(char* base) const {
    return {ring.at(base),
            {moved(blocks.max, base), moved(blocks.mass, base), blocks.n},
            moved(cutoff, base),
            moved(best, base),
            moved(selection, base)};
  }
};

inline Items DraftMemory::items(const DraftStepParams& params) {
  return items_of_drafting(params, params.allowed.words != nullptr);
}

inline DraftMemory DraftMemory::cut(Arena& arena, const DraftStepParams& params, const Items& items, const Cut& cut) {
  const int n = blocks_of(params.vocabulary);
  DraftMemory memory = {};
  memory.ring = ring_of(arena, items, cut);
  memory.blocks = {arena.take<float>(n), arena.take<float>(n), n};
  memory.cutoff = arena.take<float>(1);
  memory.best = arena.take<Candidate>(cut.all_warps);
  if (params.sampling.filters != nullptr) memory.selection = arena.take<SelectionMemory>(1);
  return memory;
}

// The row, if measuring it takes neither a mask nor bias and penalties.
inline std::optional<StatisticsParams> DraftMemory::to_measure(const DraftStepParams& params) {
  if (params.sampling.has_table || params.allowed.words != nullptr) return {};
  const LogitRows rows = {params.logits, params.dtype, params.row_stride, 0, params.vocabulary};
  return StatisticsParams{rows, {}, params.batch, 1, 0, blocks_of(params.vocabulary), params.sampling.temperature};
}

using DraftWork = Work<DraftStepParams, DraftMemory>;

struct Drawn {
  int64_t token;  // of the draft's vocabulary, or -1
  float log_q, cutoff, lse;
};

// By one thread.
SPECDEC_DEVICE void write_draft(const DraftStepParams& params, const Row& row, int32_t fault, Drawn drawn) {
  const int64_t b = row.b;
  params.tokens[b] = drawn.token < 0 ? -1 : target_id(row, drawn.token);
  params.log_q[b] = drawn.log_q;
  params.cutoff[b] = drawn.cutoff;
  params.lse[b] = drawn.lse;
  params.status[b] = fault << kDraftFlagShift;
}

SPECDEC_DEVICE Noise noise_of(const DraftStepParams& params, const Row& row) {
  return {static_cast<uint64_t>(params.seed[row.b]), static_cast<uint32_t>(row.position),
          static_cast<uint32_t>(params.offset)};
}

// What every thread of a cluster knows of its sequence.
struct Drafting {
  const DraftStepParams& params;
  DraftMemory memory;
  Row row;
  float temperature, inverse_temperature;
  bool filtered;
};

SPECDEC_DEVICE Drafting drafting_of(const DraftWork& work, int64_t b) {
  const DraftStepParams& params = work.params;
  const DraftMemory memory = work.memory(b);
  const Row row = row_to_draft_from(params, b, params.offset, memory.ring, work.place_for_copy(), &params.allowed);
  const float temperature = params.sampling.temperature[b];
  const bool filtered = temperature != 0.0f && filters_of(params.sampling, b).any();
  return {params, memory, row, temperature, temperature == 0.0f ? 0.0f : 1.0f / temperature, filtered};
}

// Draws and writes the draft, given the blocks' statistics.
SPECDEC_DEVICE void decide_draft(const Drafting& s, const Place& place) {
  const DraftStepParams& params = s.params;
  const DraftMemory& memory = s.memory;
  const Blocks& blocks = memory.blocks;
  const Row& row = s.row;
  const float temperature = s.temperature, inverse_temperature = s.inverse_temperature;
  const bool first = place.first, greedy = temperature == 0.0f;
  const int warp = place.warp;
  const float max = max_of_blocks(blocks);
  const int32_t fault = row_fault(max);
  if (fault != 0 || greedy) {
    const int block = fault != 0 ? -1 : block_of_max(blocks, max);
    if (!row.drawn_here(block)) return;
    int64_t token = -1;
    if (warp == 0 && fault == 0) token = argmax(row, block, max);
    if (simt::thread() == 0) {
      write_draft(params, row, fault,
                  fault != 0 ? Drawn{-1, -INFINITY, -INFINITY, NAN} : Drawn{token, 0.0f, -INFINITY, max});
    }
    return;
  }

  // Block 0 filters. With rule `coupled`, the others take part in the race and need the cutoff.
  if (!first && !params.coupled && s.filtered) return;
  float cutoff = -INFINITY, lse = 0.0f;
  if (first || !params.coupled) {
    if (warp == 0) merge(blocks, max, inverse_temperature);
    simt::sync_block();
    float sum = total(blocks.mass, blocks.n);
    if (s.filtered) {
      Selection selection = {row, blocks, max, inverse_temperature, memory.selection};
      cutoff = cutoffs_of(selection, 0, temperature, sum).kept;
      simt::sync_block();
      keep_above(row, blocks, max, inverse_temperature, cutoff);
      simt::sync_block();
      sum = total(blocks.mass, blocks.n);
    }
    lse = max * inverse_temperature + logf(sum);
    if (params.coupled && warp == 0) publish(memory.cutoff, cutoff);
  }
  int64_t token = -1;
  if (params.coupled) {
    simt::sync_cluster();
    cutoff = simt::read(memory.cutoff);
    const Noise step = noise_of(params, row), noise = {step.seed, step.position + step.offset, 0};
    const Candidate mine = race_of_row(row, blocks, max, inverse_temperature, cutoff, noise, place);
    if (simt::thread() % kWarp == 0) write_to_first(&memory.best[place.my_warp], mine);
    simt::sync_cluster();
    if (!first || warp != 0) return;
    token = index_of(best_of(memory.best, place.all_warps));
  } else {
    const Noise noise = noise_of(params, row);
    const int block = static_cast<int>(race_among(blocks.mass, blocks.n, noise, kDraftBlock));
    if (!s.filtered && !row.drawn_here(block)) return;
    token = draw(row, blocks, block, inverse_temperature, cutoff, noise, kDraftToken, memory.best, place);
  }
  if (simt::thread() == 0) {
    const Distribution distribution = {inverse_temperature, lse, cutoff};
    write_draft(params, row, 0, {token, log_probability(logit_at(row, token), distribution), cutoff, lse});
  }
}

// The first of the two kernels of a split launch.
SPECDEC_KERNEL(draft_measure_kernel, kMostThreads, DraftWork) {
  measure_row(drafting_of(params, simt::cluster() / params.blocks), Place::measuring(params.blocks));
}

SPECDEC_KERNEL(draft_step_kernel, kMostThreads, DraftWork) {
  const Place place = Place::here();
  const Drafting s = drafting_of(params, simt::cluster());
  if (params.measures()) {
    measure_row(s, place);
  } else if (params.measured != nullptr) {
    simt::wait_for_launch_before();
    params.load_statistics(s.row.b, s.memory.blocks.max);
  }
  simt::sync_cluster();
  decide_draft(s, place);
  if (!s.memory.ring.stay || !s.filtered || s.params.coupled) return;
  simt::arrive_only();                     // block 0 has read what others keep,
  if (!place.first) simt::wait_cluster();  // whose shared memory ends with them
}

}  // namespace specdec::cuda
