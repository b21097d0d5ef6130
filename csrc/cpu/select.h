// Exact selection in a row without sorting it: where the k-th largest logit lies, and where the tokens above weigh
// enough.
//
// Histograms of 256 bins (16 for a row of one block), of the range that is left, until that range is one logit. The
// first is linear in the logits, which spread over its bins as they do over their range: one pass leaves some
// thousandth of a row. The next ones cut ranges of the logits' bits (core/distribution.h, ordered_key), so whatever the
// logits are, a few of them end it. A lower bound that costs next to nothing comes first: of a row of 128,000 logits, a
// top-k of 50 looks at some hundred. Why not a heap, or a sort of candidates: their number has no bound (rows of ties),
// and bins do not care.
#pragma once

#include "row_stats.h"

namespace specdec::cpu {

struct SelectionRow {
  Row row;
  float max, inverse_temperature;
  const BlockStats* blocks;  // their maxima; their sums where `of_all` asks for them
  const float* lanes;        // [blocks, kLanes] maxima

  int64_t num_blocks() const { return row.num_blocks(); }
};

// The k-th largest logit but for those of -inf; the smallest if there are fewer.
float kth_largest(const SelectionRow& row, int64_t k);

// The largest logit c such that the tokens >= c weigh top_p of all (`of_all`: the blocks' sums say what those weigh),
// or of those >= `low`.
float nucleus_cutoff(const SelectionRow& row, float low, bool of_all, float top_p);

}  // namespace specdec::cpu
