// Applies a sequence's sampling parameters to one of its rows.
#pragma once

#include <vector>

#include "row_stats.h"

namespace specdec::cpu {

// A row of sequence b with its temperature and filters.
RowTask task_of(const SamplingArguments& sampling, int64_t b, Row row);

// The logits that bias, penalties and bans change in the row of sequence b, after the drafts [0, num_drafts) of a step.
// `position`: of the step's first token. `ids`: [row.size] the target's ids of a reduced vocabulary, or null. Drafts
// have the target's ids.
std::vector<Patch> patches_of(const SamplingArguments& sampling, int64_t b, Row row, const int64_t* ids,
                              int64_t position, const int64_t* drafts, int64_t num_drafts);
void set_patches(Row& row, const std::vector<Patch>& patches);

// Rows of drafts, patched, for StatsOfRows; what the tasks refer to.
struct DraftRows {
  std::vector<RowTask> tasks;
  std::vector<std::vector<Patch>> patches;
};

// Rows [first, first + n) of an operation that drafts. `depth`: how many drafts of each sequence come before them.
template <class Params>
DraftRows draft_rows(const Params& params, int64_t depth, int64_t first, int64_t n, AllowedRows allowed = {}) {
  DraftRows rows = {std::vector<RowTask>(n), std::vector<std::vector<Patch>>(n)};
  for (int64_t i = 0; i < n; ++i) {
    const int64_t b = first + i;
    Row row = {params.logits + b * params.row_stride, params.dtype, params.vocabulary, allowed.row(b, params.d2t)};
    const int64_t* drafts = params.drafts == nullptr ? nullptr : params.drafts + b * depth;
    rows.patches[i] =
        patches_of(params.sampling, b, row, params.d2t, params.position[b], drafts, drafts == nullptr ? 0 : depth);
    set_patches(row, rows.patches[i]);
    rows.tasks[i] = task_of(params.sampling, b, row);
  }
  return rows;
}

}  // namespace specdec::cpu
