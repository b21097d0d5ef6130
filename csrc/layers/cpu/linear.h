// A linear layer of float32, made for the few rows of one step of decoding.
#pragma once

#include <cstdint>

namespace specdec::cpu {

// How weights are stored: as numbers, or in GGUF's blocks of some inputs. The numbers are those of its
// GGMLQuantizationType.
enum class Stored : int64_t {
  kFloat32 = 0,
  kFloat16 = 1,
  kQ4_0 = 2,
  kQ4_1 = 3,
  kQ8_0 = 8,
  kQ4_K = 12,
  kQ6_K = 14,
  kBFloat16 = 30
};

// The inputs and the bytes of one block, or of one number; both 0 of what is none of these.
struct BlockSize {
  int64_t inputs, bytes;
};
BlockSize block_size(Stored stored);

struct LinearParams {
  const float* x;      // [rows, inputs]
  const char* weight;  // [outputs, inputs], or in blocks: [outputs, bytes]
  Stored stored;       // as what the weights are
  const float* bias;   // [outputs], or null
  float* y;            // [rows, outputs] = x weight^T + bias
  int64_t rows, inputs, outputs;
};

// Layers of the same x, in one go.
void linear(const LinearParams* layers, int64_t count);

}  // namespace specdec::cpu
