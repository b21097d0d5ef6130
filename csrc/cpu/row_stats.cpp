#include "row_stats.h"

#include "parallel.h"

namespace specdec::cpu {
namespace {

// In order of blocks, whatever thread computed them.
RowStats merge(const RowTask& task, const BlockStats* blocks) {
  const int64_t n = task.row.num_blocks();
  const bool greedy = task.temperature == 0.0f;
  float max = -INFINITY;
  bool nan = false;
  for (int64_t b = 0; b < n; ++b) {
    nan |= blocks[b].max != blocks[b].max;
    max = blocks[b].max > max ? blocks[b].max : max;
  }
  if (nan) max = NAN;
  if (greedy) return {max, max, 0.0f, blocks};
  const float inverse_temperature = 1.0f / task.temperature;
  float sum = 0.0f;
  for (int64_t b = 0; b < n; ++b) sum += blocks[b].sum * weight(blocks[b].max, max, inverse_temperature);
  return {max, max * inverse_temperature + logf(sum), inverse_temperature, blocks};
}

}  // namespace

StatsOfRows::StatsOfRows(const std::vector<RowTask>& tasks) : stats_(tasks.size()) {
  std::vector<int64_t> first(tasks.size() + 1, 0);  // row r owns blocks first[r] .. first[r + 1] - 1
  for (size_t r = 0; r < tasks.size(); ++r) {
    first[r + 1] = first[r] + (tasks[r].row.data == nullptr ? 0 : tasks[r].row.num_blocks());
  }
  blocks_.resize(first.back());
  const BlockKernels& kernel = block_kernels();
  parallel_for(first.back(), kGrainBlocks, [&](int64_t begin, int64_t end) {
    size_t r = 0;
    for (int64_t i = begin; i < end; ++i) {
      while (i >= first[r + 1]) ++r;
      const RowTask& task = tasks[r];
      const int64_t block = i - first[r];
      blocks_[i] = task.temperature == 0.0f ? BlockStats{kernel.max(task.row, block), 0.0f}
                                            : kernel.stats(task.row, block, 1.0f / task.temperature);
    }
  });
  for (size_t r = 0; r < tasks.size(); ++r) {
    if (tasks[r].row.data != nullptr) stats_[r] = merge(tasks[r], &blocks_[first[r]]);
  }
}

int64_t argmax(Row row, const RowStats& stats) {
  int64_t block = 0;
  while (stats.blocks[block].max != stats.max) ++block;
  return block_kernels().find(row, block, stats.max);
}

int64_t draw(Row row, const RowStats& stats, int64_t without, Noise noise, Stream block_stream, Stream token_stream) {
  const BlockKernels& kernel = block_kernels();
  std::vector<float> mass(row.num_blocks());
  for (size_t b = 0; b < mass.size(); ++b) {
    mass[b] = stats.blocks[b].sum * weight(stats.blocks[b].max, stats.max, stats.inverse_temperature);
  }
  if (without >= 0) {
    const int64_t b = without / kBlock;
    mass[b] = kernel.sum_without(row, b, stats.blocks[b].max, stats.inverse_temperature, without) *
              weight(stats.blocks[b].max, stats.max, stats.inverse_temperature);
  }
  const int64_t block = kernel.draw_index(mass.data(), row.num_blocks(), noise, block_stream);
  if (block < 0) return -1;
  return kernel.draw(row, block, stats.blocks[block].max, stats.inverse_temperature, without, noise, token_stream);
}

}  // namespace specdec::cpu
