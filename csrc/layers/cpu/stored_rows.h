// Some rows of a layer's weights as floats: what an embedding is.
#pragma once

#include <cstdint>

#include "linear.h"

namespace specdec::cpu {

struct StoredRowsParams {
  const char* weight;   // [size, inputs], or in blocks: [size, bytes], interleaved
  Stored stored;        // as what the weights are
  const int64_t* rows;  // [count]
  float* y;             // [count, inputs]
  int64_t size, count, inputs;
};

// The numbers are those that GGUF's own formulas give, to the last bit. False: a row is none of the weights'.
bool stored_rows(const StoredRowsParams& params);

}  // namespace specdec::cpu
