// A linear layer of float32, made for the few rows of one step of decoding.
#pragma once

#include <cstdint>

#include "block.h"

namespace specdec::cpu {

struct LinearParams {
  const float* x;      // [rows, inputs]
  const void* weight;  // [outputs, inputs]
  Dtype dtype;         // of the weights: kFloat32 or kBFloat16
  const float* bias;   // [outputs], or null
  float* y;            // [rows, outputs] = x weight^T + bias
  int64_t rows, inputs, outputs;
};

// Layers of the same x, in one go.
void linear(const LinearParams* layers, int64_t count);

}  // namespace specdec::cpu
