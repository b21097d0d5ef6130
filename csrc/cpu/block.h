// Vectorised work on one block of a row, compiled for several instruction sets; the best that this machine has is
// chosen when the first operation runs.
#pragma once

#include <cstdint>

#include "../core/random.h"
#include "../core/softmax.h"

namespace specdec::cpu {

enum class Dtype { kFloat32, kBFloat16, kFloat16 };

// A row of V raw logits, dense.
struct Row {
  const void* data;
  Dtype dtype;
  int64_t size;  // V

  int64_t num_blocks() const { return (size + kBlock - 1) / kBlock; }
};

// Where a draw's random numbers come from.
struct Noise {
  uint64_t seed;
  uint32_t position;
  uint32_t offset;
};

// How a row becomes weights: p(v) = exp(l / T - lse).
struct Distribution {
  float inverse_temperature;
  float lse;
};

struct BlockKernels {
  const char* instruction_set;
  // The largest logit (NaN if any is) of a block.
  float (*max)(Row row, int64_t block);
  // The largest logit and the sum of weights relative to it.
  BlockStats (*stats)(Row row, int64_t block, float inverse_temperature);
  // The same sum, relative to `max`, with token `without` taken out.
  float (*sum_without)(Row row, int64_t block, float max, float inverse_temperature, int64_t without);
  // Sum over the block of max(0, p - q).
  float (*residual_sum)(Row p, Distribution p_law, Row q, Distribution q_law, int64_t block);
  // Draws a token of the block, weights as in `stats`; token `without` (or -1) has none. -1 if all weights are 0.
  int64_t (*draw)(Row row, int64_t block, float max, float inverse_temperature, int64_t without, Noise noise,
                  Stream stream);
  // Draws a token of the block, weights max(0, p - q).
  int64_t (*draw_residual)(Row p, Distribution p_law, Row q, Distribution q_law, int64_t block, Noise noise);
  // Draws an index in [0, n) with the given weights; -1 if all are 0. The first level of every draw.
  int64_t (*draw_index)(const float* weights, int64_t n, Noise noise, Stream stream);
  // The lowest token of the block whose logit equals `value`.
  int64_t (*find)(Row row, int64_t block, float value);
};

const BlockKernels& block_kernels();

// One logit as float32.
float logit_at(Row row, int64_t token);

}  // namespace specdec::cpu
