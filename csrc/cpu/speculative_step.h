#pragma once

#include "../core/accept.h"
#include "sequence_law.h"

namespace specdec::cpu {

// Logits of N rows a sequence; a row is dense.
struct LogitRows {
  const char* data;  // [B, N, V]; null: none
  Dtype dtype;
  int64_t sequence_stride, row_stride;  // bytes
  int64_t vocabulary;                   // V
};

// B sequences, K drafts, V tokens; vectors and matrices are dense.
struct SpeculativeStepParams {
  // inputs
  LogitRows target;             // [B, K+1, V]
  const int64_t* draft_tokens;  // [B, K]
  // q, in one of three forms; none of them: one-hot drafts
  LogitRows draft;                        // [B, K, V], or with d2t [B, K, its length]
  const float *draft_cutoff, *draft_lse;  // [B, K], or null: computed here
  const int64_t* d2t;                     // target ids of the draft's vocabulary, ascending, or null
  const int64_t* compact_ids;             // [B, K, k'], ascending, or null
  const float* compact_log_q;             // [B, K, k']
  int64_t compact_size;                   // k'
  const int64_t* num_drafts;              // [B], clamped to [0, K], or null: K
  LawParams law;
  const int64_t* seed;                        // [B]
  const int64_t* position;                    // [B]
  int64_t batch, num_drafts_max, vocabulary;  // B, K, V
  Rule rule;
  // outputs, every slot written
  int64_t* tokens;        // [B, K+1]
  int32_t* num_accepted;  // [B]
  int32_t* status;        // [B]
  int32_t* num_emitted;   // [B]
  float* log_probs;       // [B, K+1], or null
  float* raw_log_probs;   // [B, K+1], null where log_probs is
};

void speculative_step(const SpeculativeStepParams& params);

}  // namespace specdec::cpu
