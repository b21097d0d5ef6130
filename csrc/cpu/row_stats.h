// Statistics of many rows at once, split over threads by blocks, and draws from one row. All operations share this
// code, so equal rows have equal statistics, bit for bit, in drafting and in verification.
#pragma once

#include <optional>
#include <vector>

#include "block.h"

namespace specdec::cpu {

// A row and how it becomes a distribution. A row without data is skipped.
struct RowTask {
  Row row = {};
  float temperature = 0;  // 0: only the maximum is computed
  float top_k = 0, top_p = 1, min_p = 0;
  int64_t likely = 0;              // n > 0: also find the n-th largest logit
  bool weighed = true;             // false: lse is not needed
  bool raw = false;                // also compute the lse of the raw logits at temperature 1
  std::optional<float> mark = {};  // also compute the lse of the logits above this one; in rows without filters

  bool filtered() const { return temperature != 0.0f && (top_k > 0.0f || top_p < 1.0f || min_p > 0.0f); }
};

struct RowStats {
  float max = -INFINITY;          // NaN if any logit is NaN
  float lse = 0;                  // natural log of sum exp(l / T) of the kept logits; at temperature 0 the maximum
  float inverse_temperature = 0;  // 0 at temperature 0
  float cutoff = -INFINITY;       // logits below it are filtered out
  float likely_cutoff = -INFINITY;
  float raw_lse = 0;
  float lse_above = -INFINITY;         // of the logits above the mark
  const BlockStats* blocks = nullptr;  // sums of the kept logits

  Distribution distribution() const { return {inverse_temperature, lse, cutoff}; }
};

class StatsOfRows {
 public:
  // Scratch: 8 bytes per block of 1024 logits, 128 more with filters, 8 more for raw statistics or a mark; for top-p
  // without top-k, up to 1.5 KiB more, of which a usual row touches a tenth.
  explicit StatsOfRows(const std::vector<RowTask>& tasks);
  const RowStats& operator[](int64_t row) const { return stats_[row]; }

 private:
  std::vector<BlockStats> blocks_;
  std::vector<RowStats> stats_;
};

// The token with the largest logit, the lowest id of a tie.
int64_t argmax(Row row, const RowStats& stats);

// The `size` most likely of the kept tokens (the lowest ids of a tie), in ascending order. The row's `likely` was
// `size`.
std::vector<int64_t> most_likely(Row row, const RowStats& stats, int64_t size);

// Draws a token from the kept logits, in two levels.
int64_t draw(Row row, const RowStats& stats, Noise noise, Stream block_stream, Stream token_stream);

// The first `count` tokens to arrive in a one-level race of the kept logits, fewer if fewer are kept: draws without
// replacement. `ids`: the target's ids of a reduced vocabulary, which determine the noise, or null.
std::vector<int64_t> first_arrivals(Row row, const RowStats& stats, int64_t count, const int64_t* ids, Noise noise,
                                    Stream stream);

// The winner of the race of rule `coupled`, with `ids` as above.
int64_t draw_coupled(Row row, const RowStats& stats, const int64_t* ids, Noise noise);

}  // namespace specdec::cpu
