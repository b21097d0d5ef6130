// Statistics of many rows at once, split over threads by blocks, and the draw from one row. Shared by every operation,
// so that equal rows have bitwise equal statistics wherever they were computed.
#pragma once

#include <vector>

#include "block.h"

namespace specdec::cpu {

// A row and the temperature that it is wanted at; 0 asks for the maximum alone. A row without data is skipped.
struct RowTask {
  Row row;
  float temperature;
};

struct RowStats {
  float max;                  // NaN if any logit is
  float lse;                  // natural log of sum exp(l / T); at temperature 0 the maximum
  float inverse_temperature;  // 0 at temperature 0
  const BlockStats* blocks;
};

class StatsOfRows {
 public:
  // Scratch: 8 bytes a block of 1024 logits.
  explicit StatsOfRows(const std::vector<RowTask>& tasks);
  const RowStats& operator[](int64_t row) const { return stats_[row]; }

 private:
  std::vector<BlockStats> blocks_;
  std::vector<RowStats> stats_;
};

// The largest logit's token; the lowest id of a tie.
int64_t argmax(Row row, const RowStats& stats);

// Draws a token from softmax(l / T) with token `without` (or -1) taken out; -1 if nothing has weight.
int64_t draw(Row row, const RowStats& stats, int64_t without, Noise noise, Stream block_stream, Stream token_stream);

}  // namespace specdec::cpu
