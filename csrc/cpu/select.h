// Exact selection in a row without sorting: the k-th largest logit, and the largest logit such that the tokens at or
// above it weigh enough.
//
// A histogram of 256 bins (16 for a row of one block) narrows the range down to one bin, and so on until the range is a
// single logit. The first histogram is linear in the logits and leaves about a thousandth of a usual row. The next ones
// are linear in the logits' bits (core/distribution.h, ordered_key), so a few of them suffice whatever the logits are.
// A cheap lower bound comes first: with a top-k of 50, it leaves about a hundred of 128,000 logits. A heap, or sorting
// the candidates, would be slow in rows with many ties, where the number of candidates has no bound. For top-p in a
// long row, nucleus.h usually leaves a few thousand logits for this.
#pragma once

#include "row_stats.h"

namespace specdec::cpu {

struct SelectionRow {
  Row row;
  float max, inverse_temperature;
  const BlockStats* blocks;  // their sums are used only by total_weight
  const float* lanes;        // [blocks, kLanes] maxima

  int64_t num_blocks() const { return row.num_blocks(); }
};

// The k-th largest logit; the smallest if there are fewer than k. Logits of -inf do not count.
float kth_largest(const SelectionRow& row, int64_t k);

// The weight of all logits relative to the largest, as the blocks' sums give it.
double total_weight(const SelectionRow& row);

// The largest logit c >= low such that the tokens >= c weigh at least `wanted`; the smallest one if all weigh less.
float cutoff_of_weight(const SelectionRow& row, float low, double wanted);

// The same for the share top_p of the weight of all tokens, which the blocks' sums give.
float nucleus_cutoff_of_all(const SelectionRow& row, float top_p);

// The same for the share top_p of the weight of the tokens >= low.
float nucleus_cutoff(const SelectionRow& row, float low, float top_p);

}  // namespace specdec::cpu
