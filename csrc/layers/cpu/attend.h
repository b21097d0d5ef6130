// Attention of few queries over the slots of a static cache that each of them sees.
#pragma once

#include <cstdint>

#include "../../core/dtype.h"

namespace specdec::cpu {

struct AttendParams {
  const float* q;       // [rows, heads, queries, size]
  const void *k, *v;    // [rows, key_heads, slots, size or value_size]
  Dtype dtype;          // of k and v: kFloat32 or kBFloat16
  const int64_t* seen;  // [rows, queries, columns]: first slot, end, then slots, or -1
  float* out;           // [rows, queries, heads, value_size]
  int64_t rows, heads, key_heads, queries, slots, size, value_size, columns;
  int64_t q_strides[3], k_strides[3], v_strides[3];  // of rows, of heads, and of queries or slots
  float scale;
  float cap;           // scores become cap tanh(score / cap); 0: they stay
  const float* sinks;  // [heads], the score of a slot whose value is 0, which every query of a head sees; or null
};

void attend(const AttendParams& params);

}  // namespace specdec::cpu
