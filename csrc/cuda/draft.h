// The last launch of draft_step: a block of threads draws from a row, whose statistics are known.
#pragma once

#include "race.h"

namespace specdec::cuda {

constexpr int kDraftThreads = 256;

struct alignas(16) DraftMemory {
  RowStats row;
  Slots slots;
};

// Grid: one, sequences.
template <class Rows>
SPECDEC_KERNEL(draft_kernel, kDraftThreads, 2, Work) {
  const uint32_t b = params.first + simt::block_y();
  const Row row = params.row(b, 0);
  const Noise noise = params.noise(b, 0);
  const Temperature temperature = params.temperature(b);
  const int n = params.n;
  const Stats* stats = params.stats(b, 0);
  DraftMemory* const memory = reinterpret_cast<DraftMemory*>(simt::shared_memory());
  simt::wait_for_launch_before();
  if (warp() == 0) {
    const RowStats found = row_stats(params, b, 0, temperature);
    if (lane() == 0) simt::write(&memory->row, found);
  }
  simt::sync_block();
  const RowStats q = simt::read(&memory->row);
  const int32_t fault = q.fault(temperature);
  int64_t token = -1;
  float log_q = -INFINITY, cutoff = -INFINITY, lse = NAN;
  if (fault == 0 && temperature.greedy()) {
    token = argmax<Rows>(row, stats, n, q.max), log_q = 0.0f, lse = q.max;
  } else if (fault == 0) {
    if (params.scratch.races != nullptr) {
      token = winner_of(params.races(b, 0), n);
    } else {
      const int block = race_among_blocks(stats, n, q.max, temperature.scale, noise, kDraftBlock, &memory->slots, 0);
      token = race_in_block(block, noise, kDraftToken, &memory->slots, 1, [&](int64_t index) {
        const float logit = index < row.size ? Rows::logit(row, index) : -INFINITY;
        return logit >= q.cutoff ? weight_of(logit, q.max, temperature.scale) : 0.0f;
      });
    }
    log_q = log_probability(Rows::logit(row, token), q.distribution(temperature)), cutoff = q.cutoff, lse = q.lse;
  }
  if (simt::thread() != 0) return;
  params.params.tokens[b] = token < 0 ? -1 : row.target_id(token);
  params.log_q[b] = log_q;
  params.cutoff[b] = cutoff;
  params.lse[b] = lse;
  params.params.status[b] = fault << kDraftFlagShift;
}

}  // namespace specdec::cuda
