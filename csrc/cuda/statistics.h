// The first of two launches: what it measures, and where the statistics go (statistics_kernel.h).
#pragma once

#include "row_draws.h"

namespace specdec::cuda {

constexpr int kStatisticsThreads = 128;

// What is measured. Rows that no draft leads to are left out.
struct StatisticsParams {
  LogitRows target, draft;  // draft.data is null if the draft's rows are not measured
  int64_t batch;
  int target_rows, draft_rows, blocks;  // of a sequence; of a row
  const float* temperature;             // [B]
  const int64_t* num_drafts = nullptr;  // [B], or null: all
  // Where the statistics go, in the order of the rows, the target's being first.
  char* memory = nullptr;           // of all sequences
  int64_t stride = 0, mass_at = 0;  // bytes of a sequence, and from its largest logits to its sums

  SPECDEC_HD int rows() const { return target_rows + draft_rows; }
  SPECDEC_HD int parts() const { return (blocks + kStatisticsThreads / kWarp - 1) / (kStatisticsThreads / kWarp); }
  SPECDEC_HD int64_t launched() const { return batch * rows() * parts(); }
};

}  // namespace specdec::cuda
