// Computes the statistics of all blocks of logits of a batch, a warp each. The kernel is small and needs few registers,
// so that many warps wait for memory at the same time, on every multiprocessor.
#pragma once

#include "statistics.h"

namespace specdec::cuda {

SPECDEC_KERNEL_OF(statistics_kernel, kStatisticsThreads, 6, StatisticsParams) {
  simt::start_next_launch();
  const uint32_t parts = params.parts(), rows = params.rows(), mine = static_cast<uint32_t>(simt::cluster());
  const int i = static_cast<int>(mine / parts % rows);
  const int block = static_cast<int>(mine % parts) * (simt::num_threads() / kWarp) + simt::thread() / kWarp;
  const int64_t b = mine / parts / rows;
  const float temperature = params.temperature[b];
  const bool of_draft = i >= params.target_rows;
  const int j = of_draft ? i - params.target_rows : i;
  const int64_t limit = params.num_drafts == nullptr ? params.target_rows - 1 : params.num_drafts[b];
  if (block >= params.blocks || (j > 0 && j > limit) || (of_draft && (j >= limit || temperature == 0.0f))) return;
  const LogitRows& of = of_draft ? params.draft : params.target;
  const int element = static_cast<int>(size_in_bytes(of.dtype));
  const int64_t before = int64_t{block} * kBlock;
  const Granules granules =
      Granules::of(of.row(b, j) + before * element, (of.vocabulary - before) * element, kBlock * element);
  with_format(of.dtype, [&](auto format) {
    Logits<decltype(format)> logits;
    if (granules.shift == 0 && granules.whole == kBlock * element) {
      logits.load(granules.first);
    } else {
      logits.load(Shifted::of(granules, granules.first, format.kLowest));
    }
    const BlockStats stats = block_stats(logits, temperature == 0.0f ? 0.0f : 1.0f / temperature);
    if (simt::thread() % kWarp != 0) return;
    char* its = params.memory + b * params.stride + (int64_t{i} * params.blocks + block) * sizeof(float);
    simt::write(reinterpret_cast<float*>(its), stats.max);
    simt::write(reinterpret_cast<float*>(its + params.mass_at), stats.sum);
  });
}

}  // namespace specdec::cuda
