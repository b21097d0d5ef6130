// The first launch: statistics of all blocks of logits, a warp each. It is bound by how many instructions a
// multiprocessor can issue while a block arrives, so the kernel for plain rows does nothing else.
#pragma once

#include "work.h"

namespace specdec::cuda {

constexpr int kMeasureThreads = 256;  // at most

// By a warp: the statistics of its block of logits x, and the largest logits of its parts, if they are wanted.
template <class Block>
SPECDEC_DEVICE void write_stats(const Block& x, float scale, Stats* stats, float* parts) {
  float max = simt::reduce<1, kPartLanes / 2>(x.max(), Larger());
  if (parts != nullptr && lane() % kPartLanes == 0) simt::write(&parts[lane() / kPartLanes], max);
  max = simt::reduce<kPartLanes, kWarp / 2>(max, Larger());
  const float sum = sum_of_weights([&](int k) { return x[k]; }, max, scale);
  if (lane() == 0) simt::write(stats, Stats{max, sum});
}

// Grid: parts of a row, sequences, rows. Where log-probabilities are wanted, raw logits are measured as well.
template <class Rows>
SPECDEC_KERNEL(measure_kernel, kMeasureThreads, Rows::kMeasuring, Work) {
  simt::start_next_launch();
  const int block = simt::block_x() * num_warps() + warp(), i = simt::block_z();
  const uint32_t b = params.first + simt::block_y();
  if (block >= (Rows::kAny ? params.blocks(i) : params.n) || !params.used(b, i)) return;
  const Row row = params.row(b, i);
  typename Rows::Block x = Rows::load_raw(row, block);
  if constexpr (Rows::kAny) {
    if (params.scratch.raw != nullptr && i <= params.k()) write_stats(x, kLog2e, params.raw(b, i) + block, nullptr);
    x.adjust(row, block);
  }
  const uint64_t place = params.place(b, i, block);
  float* parts = params.scratch.parts;
  if (parts != nullptr) parts += place * kParts;
  // At temperature 0 the sum is not used.
  write_stats(x, kLog2e * simt::reciprocal(params.params.sampling.temperature[b]), params.scratch.stats + place, parts);
}

}  // namespace specdec::cuda
