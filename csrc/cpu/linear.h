// A linear layer for few rows of float32, as of one step of decoding.
#pragma once

#include <cstdint>

namespace specdec::cpu {

struct LinearParams {
  const float* x;       // [rows, inputs]
  const float* weight;  // [outputs, inputs]
  const float* bias;    // [outputs], or null
  float* y;             // [rows, outputs] = x weight^T + bias
  int64_t rows, inputs, outputs;
};

void linear(const LinearParams& params);

}  // namespace specdec::cpu
