// What the caller says of every sequence's law, and what it makes of one row.
#pragma once

#include <vector>

#include "row_stats.h"

namespace specdec::cpu {

// B sequences; dense. Null pointers: nothing of the kind, or nothing in it.
struct LawParams {
  bool has_table;                // which may have no entries
  const float* temperature;      // [B]
  const float* filters;          // [B, 3] top_k, top_p, min_p
  const float* penalties;        // [B, 3] repetition, presence, frequency
  const int64_t* table_ids;      // [B, N] ascending
  const float* table_bias;       // [B, N]
  const bool* table_in_prompt;   // [B, N]
  const int32_t* table_count;    // [B, N]
  const int64_t* ends;           // [E] tokens that may not come before
  const int64_t* first_end;      // [B] this absolute position
  int64_t table_size, num_ends;  // N, E

  // The task of a row of sequence b.
  RowTask task(int64_t b, Row row) const;

  // What replaces raw logits of sequence b's row behind the drafts [0, num_drafts) of a step. `position`: of the step's
  // first token. `ids`: the target's ids [row.size] of a reduced vocabulary, or null; drafts are of the target's.
  std::vector<Patch> patches(int64_t b, Row row, const int64_t* ids, int64_t position, const int64_t* drafts,
                             int64_t num_drafts) const;
};

}  // namespace specdec::cpu
