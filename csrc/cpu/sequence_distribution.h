// What a sequence's distribution makes of one row.
#pragma once

#include <vector>

#include "row_stats.h"

namespace specdec::cpu {

// The task of a row of sequence b.
RowTask task_of(const SamplingArguments& sampling, int64_t b, Row row);

// What replaces raw logits of sequence b's row after the drafts [0, num_drafts) of a step. `position`: of the step's
// first token. `ids`: the target's ids [row.size] of a reduced vocabulary, or null; drafts are of the target's.
std::vector<Patch> patches_of(const SamplingArguments& sampling, int64_t b, Row row, const int64_t* ids,
                              int64_t position, const int64_t* drafts, int64_t num_drafts);

}  // namespace specdec::cpu
