// The last launch of draft_step: a block of threads draws from a row, whose statistics are known.
#pragma once

#include "race.h"

namespace specdec::cuda {

constexpr int kDraftThreads = 256;

struct Drawn {
  int64_t token;  // of the draft's vocabulary, or -1
  float log_q, cutoff, lse;
};

struct DraftMemory {
  RowStats* row;
  Slots* slots;

  SPECDEC_HD static DraftMemory cut(Arena& arena) { return {arena.take<RowStats>(1), arena.take<Slots>(1)}; }
};

// Grid: one, sequences.
template <class Rows>
SPECDEC_KERNEL(draft_kernel, kDraftThreads, 2, DraftWork) {
  const int64_t b = params.first + simt::block_y();
  const Row row = params.row(b, 0);
  const Noise noise = params.noise(b, 0);
  const float temperature = params.params.sampling.temperature[b];
  const float inverse_temperature = temperature == 0.0f ? 0.0f : 1.0f / temperature,
              scale = inverse_temperature * kLog2e;
  const int n = params.n;
  const Scratch& scratch = params.scratch;
  const Stats* stats = scratch.stats + params.place(b, 0);
  Arena arena(simt::shared_memory());
  const DraftMemory memory = DraftMemory::cut(arena);
  simt::wait_for_launch_before();
  if (simt::thread() < kWarp) {
    const RowStats found =
        scratch.rows != nullptr ? simt::fresh(&scratch.rows[b]) : merged(stats, n, inverse_temperature, scale);
    if (simt::thread() == 0) simt::write(memory.row, found);
  }
  simt::sync_block();
  const RowStats q = simt::read(memory.row);
  const int32_t fault = row_fault(q.max);
  Drawn drawn = {-1, -INFINITY, -INFINITY, NAN};
  if (fault == 0 && temperature == 0.0f) {
    drawn = {argmax<Rows>(row, stats, n, q.max), 0.0f, -INFINITY, q.max};
  } else if (fault == 0) {
    if (params.params.coupled) {
      drawn.token = winner_of(scratch.races + b * n, n);
    } else {
      const int block = race_among_blocks(stats, n, q.max, scale, noise, kDraftBlock, memory.slots, 0);
      const auto weigh = [&](int place, float (&weights)[4]) {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          const int64_t index = int64_t{block} * kBlock + place + k;
          const float logit = index < row.size ? Rows::logit(row, index) : -INFINITY;
          weights[k] = logit >= q.cutoff ? weight_of(logit, q.max, scale) : 0.0f;
        }
      };
      drawn.token = index_of(race_in_block(block, noise, kDraftToken, memory.slots, 1, weigh));
    }
    drawn.cutoff = q.cutoff, drawn.lse = q.lse;
    drawn.log_q = log_probability(Rows::logit(row, drawn.token), Distribution{inverse_temperature, q.lse, q.cutoff});
  }
  if (simt::thread() != 0) return;
  params.params.tokens[b] = drawn.token < 0 ? -1 : row.target_id(drawn.token);
  params.params.log_q[b] = drawn.log_q;
  params.params.cutoff[b] = drawn.cutoff;
  params.params.lse[b] = drawn.lse;
  params.params.status[b] = fault << kDraftFlagShift;
}

}  // namespace specdec::cuda
