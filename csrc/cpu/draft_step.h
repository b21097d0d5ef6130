#pragma once

#include "block.h"

namespace specdec::cpu {

// B sequences, V tokens; vectors are dense.
struct DraftStepParams {
  // inputs
  const char* logits;  // [B, V], rows dense
  Dtype dtype;
  int64_t row_stride;  // bytes from one row to the next
  int64_t batch, vocabulary;
  const float* temperature;  // [B]
  const int64_t* seed;       // [B]
  const int64_t* position;   // [B]
  int64_t offset;
  // outputs, every slot written
  int64_t* tokens;  // [B]
  float* log_q;     // [B]
  float* cutoff;    // [B]
  float* lse;       // [B]
  int32_t* status;  // [B]
};

void draft_step(const DraftStepParams& params);

}  // namespace specdec::cpu
