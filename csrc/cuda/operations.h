// The operations on the current NVIDIA GPU and the given stream. They throw std::runtime_error.
#pragma once

#include <functional>

#include "../core/params.h"

namespace specdec::cuda {

// Rows of bfloat16 or float16, and weights of the same. x and weight begin at a multiple of 16 bytes, and so do the
// rows of x; inputs are a multiple of 32.
struct LinearParams {
  const char* x;       // [rows, inputs], whose rows are x_stride bytes apart
  const char* weight;  // [outputs, inputs]
  const char* bias;    // [outputs], or null
  char* y;             // [rows, outputs] = x weight^T + bias
  Dtype dtype;
  int rows, inputs, outputs;
  int64_t x_stride;
};

// Allocates device memory that stays valid for the work that is submitted to the stream by this call.
using Allocate = std::function<char*(int64_t bytes)>;

void draft_step(const DraftStepParams& params, void* stream, const Allocate& allocate);
void speculative_step(const SpeculativeStepParams& params, void* stream, const Allocate& allocate);
void linear(const LinearParams& params, void* stream);

}  // namespace specdec::cuda
