// The first launch: statistics of all blocks of logits, a warp each. It is bound by how many instructions a
// multiprocessor can issue while a block arrives, so the kernel for plain rows does nothing else.
#pragma once

#include "work.h"

namespace specdec::cuda {

constexpr int kMeasureThreads = 256;  // at most

// By a warp: the largest of its logits; writes those of the block's parts as well, if they are wanted. `largest`: of
// this thread's logits.
SPECDEC_DEVICE float max_of_warp(float largest, float* parts) {
  largest = simt::reduce<1, kPartLanes / 2>(largest, Larger());
  if (parts != nullptr && lane() % kPartLanes == 0) simt::write(&parts[lane() / kPartLanes], largest);
  return simt::reduce<kPartLanes, kWarp / 2>(largest, Larger());
}

// Plain rows of the sequences of a launch: all of the target's, or all of the draft's.
struct Measuring {
  LogitRows rows;
  const float* temperature;
  const int64_t* num_drafts;  // null: all count
  Stats* stats;               // of the first row
  float* parts;               // the same; for filters
  uint32_t of_sequence, n;    // blocks of a sequence, in `stats`, and of a row
  bool of_draft, some;        // whether these are rows of the draft; whether only some of them are needed
};

// Whether a row is needed: drafts lead to it, and if it is the draft's, the sequence is not greedy.
SPECDEC_DEVICE bool needed(const Measuring& params, int b, int j) {
  const int after = j + params.of_draft;
  if (params.num_drafts != nullptr && after > 0 && after > params.num_drafts[b]) return false;
  return !params.of_draft || params.temperature[b] != 0.0f;
}

// Grid: parts of a row, sequences, rows. `kFilters`: whether filters will need the largest logits of parts.
template <class Format, bool kFilters>
SPECDEC_KERNEL(measure_kernel, kMeasureThreads, (Format::kInWord == 2 ? 5 : 4), Measuring) {
  simt::start_next_launch();
  const uint32_t block = simt::block_x() * num_warps() + warp(), b = simt::block_y(), j = simt::block_z();
  if (block >= params.n || (params.some && !needed(params, b, j))) return;
  const int left = static_cast<int>(params.rows.vocabulary) - static_cast<int>(block * kBlock);
  const char* data = params.rows.row(b, j) + block * (kBlock * Logits<Format>::kBytes);
  Logits<Format> x;
  if (x.aligned(data, left)) {
    x.load_aligned(data, lane());
  } else if (left >= kBlock + 16) {
    x.load_shifted(data);
  } else {
    x.load_single(data, left, lane());
  }
  const float temperature = params.temperature[b];
  const uint64_t place = uint64_t{b} * params.of_sequence + (j * params.n + block);
  const uint32_t largest = x.max();
  const float max = max_of_warp(simt::larger(Format::logit(largest, 0), Format::logit(largest, Format::kInWord - 1)),
                                kFilters ? params.parts + place * kParts : nullptr);
  const float sum = sum_of_weights([&](int k) { return x[k]; }, max,
                                   temperature == 0.0f ? 0.0f : simt::quotient(kLog2e, temperature));
  if (lane() == 0) simt::write(&params.stats[place], Stats{max, sum});
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
  const int block = simt::block_x() * num_warps() + warp(), i = simt::block_z();
  const int64_t b = params.first + simt::block_y();
  if (block >= params.blocks(i) || !params.used(b, i)) return;
  const Row row = params.row(b, i);
  float x[kEach];
  Any::load_raw(row, block, x);
  const Scratch& scratch = params.scratch;
  if (scratch.raw != nullptr && i < params.emitting()) {
    const float max = max_of_warp(max_of(x), nullptr), sum = sum_of_weights([&](int k) { return x[k]; }, max, kLog2e);
    if (lane() == 0) {
      simt::write(&scratch.raw[(b * params.emitting() + i) * params.n + block], Stats{max, sum});
    }
  }
  Any::adjust_block(row, block, x);
  const float temperature = params.params.sampling.temperature[b];
  const int64_t place = params.place(b, i) + block;
  const float max = max_of_warp(max_of(x), scratch.parts == nullptr ? nullptr : scratch.parts + place * kParts);
  const float sum = sum_of_weights([&](int k) { return x[k]; }, max,
                                   temperature == 0.0f ? 0.0f : simt::quotient(kLog2e, temperature));
  if (lane() == 0) simt::write(&scratch.stats[place], Stats{max, sum});
}

}  // namespace specdec::cuda
