// A linear layer whose weights are in blocks of few bits. Its inputs are rounded to 16 bits, so that the products of a
// block are added up exactly, as integers, in whatever order.
#pragma once

#include <cstdint>
#include <memory>

#include "linear.h"

namespace specdec::cpu {

constexpr int kRounded = 32;  // inputs, with a scale of their own

// Rows of inputs, as integers times scales that are powers of two.
struct RoundedRows {
  int64_t rows, inputs;
  std::unique_ptr<int16_t[]> integers;  // [rows, inputs]
  std::unique_ptr<float[]> scales;      // [rows, inputs / kRounded]
  std::unique_ptr<float[]> sums;        // [rows, inputs / kRounded], of the rounded inputs
};

// x: [rows, inputs], of which inputs is a multiple of kRounded.
RoundedRows round_rows(const float* x, int64_t rows, int64_t inputs);

// The inputs and bytes of a block; both 0 of what is not packed.
BlockSize packed_block_size(Stored stored);

inline bool is_packed(Stored stored) { return packed_block_size(stored).inputs > 0; }

// Computes the outputs [begin, end) of a layer, but in whole tiles: those of tiles that begin there.
void packed_linear(const LinearParams& layer, const RoundedRows& x, int64_t begin, int64_t end);

}  // namespace specdec::cpu
