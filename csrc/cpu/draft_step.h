#pragma once

#include "sequence_law.h"

namespace specdec::cpu {

// B sequences, V tokens of the draft's vocabulary; vectors and matrices are dense.
struct DraftStepParams {
  // inputs
  const char* logits;  // [B, V], rows dense
  Dtype dtype;
  int64_t row_stride;  // bytes from one row to the next
  int64_t batch, vocabulary;
  LawParams law;
  const int64_t* drafts;    // [B, offset] or null
  const int64_t* d2t;       // [V] target ids, ascending, or null
  const int64_t* seed;      // [B]
  const int64_t* position;  // [B]
  int64_t offset;
  bool coupled;
  int64_t compact;  // k', or 0
  // outputs, every slot written
  int64_t* tokens;       // [B]
  float* log_q;          // [B]
  float* cutoff;         // [B]
  float* lse;            // [B]
  int32_t* status;       // [B]
  int64_t* compact_ids;  // [B, k']
  float* compact_log_q;  // [B, k']
};

void draft_step(const DraftStepParams& params);

}  // namespace specdec::cpu
