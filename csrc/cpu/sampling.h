// Applies a sequence's sampling parameters to one of its rows.
#pragma once

#include <vector>

#include "row_stats.h"

namespace specdec::cpu {

// A row of sequence b with its temperature and filters.
RowTask task_of(const SamplingArguments& sampling, int64_t b, Row row);

// The logits that bias, penalties and bans put in the place of raw ones in the row of sequence b after the drafts
// [0, num_drafts) of a step. `position`: of the step's first token. `ids`: [row.size] the target's ids of a reduced
// vocabulary, or null. Drafts have the target's ids.
std::vector<Patch> patches_of(const SamplingArguments& sampling, int64_t b, Row row, const int64_t* ids,
                              int64_t position, const int64_t* drafts, int64_t num_drafts);

}  // namespace specdec::cpu
