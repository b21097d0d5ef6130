#pragma once

#include "block.h"

namespace specdec::cpu {

// Logits of N rows a sequence; a row is dense.
struct LogitRows {
  const char* data;  // [B, N, V]; null: none
  Dtype dtype;
  int64_t sequence_stride, row_stride;  // bytes
};

// B sequences, K drafts, V tokens; vectors and matrices are dense.
struct SpeculativeStepParams {
  // inputs
  LogitRows target;                           // [B, K+1, V]
  LogitRows draft;                            // [B, K, V], or none: one-hot drafts
  const int64_t* draft_tokens;                // [B, K]
  const float* draft_lse;                     // [B, K], or null: computed here
  const int64_t* num_drafts;                  // [B], clamped to [0, K], or null: K
  const float* temperature;                   // [B]
  const int64_t* seed;                        // [B]
  const int64_t* position;                    // [B]
  int64_t batch, num_drafts_max, vocabulary;  // B, K, V
  // outputs, every slot written
  int64_t* tokens;        // [B, K+1]
  int32_t* num_accepted;  // [B]
  int32_t* status;        // [B]
};

void speculative_step(const SpeculativeStepParams& params);

}  // namespace specdec::cpu
