// The first launch: statistics of all blocks of logits, a warp each. It is bound by how many instructions a
// multiprocessor can issue while a block arrives, so the kernel for plain rows does nothing else.
#pragma once

#include "work.h"

namespace specdec::cuda {

constexpr int kMeasureThreads = 256;  // at most

// By a warp: writes the largest logits of a block's parts, if these are wanted, and returns the block's. `largest`: of
// this thread's logits.
SPECDEC_DEVICE float max_of_warp(float largest, float* parts) {
  largest = simt::reduce<1, 4>(largest, Larger());
  const int lane = simt::thread() % kWarp;
  if (parts != nullptr && lane % (kWarp / kParts) == 0) simt::write(&parts[lane / (kWarp / kParts)], largest);
  return simt::reduce<8, 16>(largest, Larger());
}

// Plain rows of a batch: all of the target's, or all of the draft's.
struct Measuring {
  LogitRows rows;
  const float* temperature;    // [B]
  const int64_t* num_drafts;   // [B], or null
  Stats* stats;                // of the first sequence's first row
  float* parts;                // the same, or null
  int64_t first, of_sequence;  // sequence of the launch; blocks of a sequence, in `stats`
  int n;                       // blocks of a row
  bool of_draft;
};

// Rows that no draft leads to are left out, and greedy sequences' rows of the draft.
SPECDEC_DEVICE bool skipped(const Measuring& params, int64_t b, int j) {
  if (params.num_drafts != nullptr && j + params.of_draft > params.num_drafts[b] && j + params.of_draft > 0) return true;
  return params.of_draft && params.temperature[b] == 0.0f;
}

// Grid: parts of a row, sequences, rows.
template <class Format>
SPECDEC_KERNEL(measure_kernel, kMeasureThreads, 5, Measuring) {
  simt::start_next_launch();
  const int block = simt::block_x() * (simt::num_threads() / kWarp) + simt::thread() / kWarp, j = simt::block_z();
  const int64_t b = params.first + simt::block_y();
  if (block >= params.n || skipped(params, b, j)) return;
  const int64_t before = int64_t{block} * kBlock, left = params.rows.vocabulary - before;
  const char* data = params.rows.row(b, j) + before * Logits<Format>::kBytes;
  Logits<Format> x;
  if (x.aligned(data, left)) {
    x.load_aligned(data);
  } else if (left >= kBlock + 16) {
    x.load_shifted(data);
  } else {
    x.load_single(data, left);
  }
  const float temperature = params.temperature[b], scale = temperature == 0.0f ? 0.0f : kLog2e / temperature;
  const int64_t place = b * params.of_sequence + int64_t{j} * params.n + block;
  const uint32_t largest = x.max();
  const float max = max_of_warp(
      simt::larger(Format::logit(largest, 0), Format::logit(largest, Format::kInWord - 1)),
      params.parts == nullptr ? nullptr : params.parts + place * kParts);
  const float sum = sum_of_weights(x, max, scale);
  if (simt::thread() % kWarp == 0) simt::write(&params.stats[place], Stats{max, sum});
}

SPECDEC_DEVICE float max_of(const float (&x)[kEach]) {
  float largest = x[0];
#pragma unroll
  for (int i = 1; i < kEach; ++i) largest = simt::larger(largest, x[i]);
  return largest;
}

// The same of any rows, and of their raw logits where log-probabilities are wanted.
template <class Work>
SPECDEC_KERNEL(measure_any_kernel, kMeasureThreads, 2, Work) {
  simt::start_next_launch();
  const int block = simt::block_x() * (simt::num_threads() / kWarp) + simt::thread() / kWarp, i = simt::block_z();
  const int64_t b = params.first + simt::block_y();
  if (block >= params.blocks(i) || !params.used(b, i)) return;
  const Row row = params.row(b, i);
  float x[kEach];
  Any::load_raw(row, block, x);
  const Scratch& scratch = params.scratch;
  if (scratch.raw != nullptr && i < params.emitting()) {
    const float max = max_of_warp(max_of(x), nullptr), sum = sum_of_weights(x, max, kLog2e);
    if (simt::thread() % kWarp == 0) {
      simt::write(&scratch.raw[(b * params.emitting() + i) * params.n + block], Stats{max, sum});
    }
  }
  Any::adjust_block(row, block, x);
  const float temperature = params.params.sampling.temperature[b];
  const int64_t place = params.place(b, i) + block;
  const float max = max_of_warp(max_of(x), scratch.parts == nullptr ? nullptr : scratch.parts + place * kParts);
  const float sum = sum_of_weights(x, max, temperature == 0.0f ? 0.0f : kLog2e / temperature);
  if (simt::thread() % kWarp == 0) simt::write(&scratch.stats[place], Stats{max, sum});
}

}  // namespace specdec::cuda
