// The operations on the current NVIDIA GPU and the given stream. They throw std::runtime_error.
#pragma once

#include "../../core/dtype.h"

namespace specdec::cuda {

// Rows of bfloat16 or float16, and all else of the same. x, weight and norm begin at a multiple of 16 bytes, and so do
// the rows of x; inputs are a multiple of 32. y has a norm, a norm and a gate, a base, or none of these.
struct LinearParams {
  const char* x;       // [rows, inputs], whose rows are x_stride bytes apart
  const char* weight;  // [outputs, inputs], or with a gate [2 outputs, inputs], of which the first half are its own
  const char* bias;    // [outputs or 2 outputs], or null
  char* y;             // [rows, outputs] = x weight^T + bias
  Dtype dtype;
  int rows, inputs, outputs;
  int64_t x_stride;
  const char* norm = nullptr;  // [inputs]: the weights of RMSNorm, through which x goes first
  float epsilon = 0.0f, offset = 0.0f;
  bool round_first = false;          // as the operation rms_norm takes them
  bool gated = false, gelu = false;  // y is activation(first half) * second half, as the operation gated computes it
  const char* base = nullptr;        // [rows, outputs]: what y is added to
  bool int8 = false;                 // weights are [.., inputs + 4] bytes, as weights.h has them
};

void linear(const LinearParams& params, void* stream);

}  // namespace specdec::cuda
