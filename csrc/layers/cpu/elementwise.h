// What stands between the products of a decoder layer.
#pragma once

#include <cstdint>

namespace specdec::cpu {

// y = x / sqrt(mean(x^2) + epsilon) * (weight + offset), for each row.
struct RmsNormParams {
  const float* x;       // [rows, size]
  const float* weight;  // [size], or null
  float* y;             // [rows, size]
  int64_t rows, size;
  float epsilon, offset;
};

// Pairs of numbers (i, i + size / 2) of each head turned by an angle: y = x cos + (-x of the other half, x) sin.
struct RotateParams {
  const float* x;          // [rows, heads, queries, size], by strides
  const float *cos, *sin;  // [rows or 1, queries, size]
  float* y;                // [rows, heads, queries, size]
  int64_t rows, heads, queries, size;
  int64_t x_strides[3];  // of rows, heads and queries
  int64_t angle_stride;  // of rows: 0 if all have the same angles
};

// cos and sin of position * frequency, times `scale`, twice beside each other: what RotateParams takes.
struct AnglesParams {
  const int64_t* positions;  // [tokens]
  const float* frequencies;  // [half]
  float *cos, *sin;          // [tokens, 2 half]
  int64_t tokens, half;
  float scale;
};

enum class Activation { kSilu, kGeluTanh };

// y = activation(gate) * up.
struct GatedParams {
  const float *gate, *up;  // [rows, size]
  float* y;                // [rows, size]
  int64_t rows, size;
  Activation activation;
};

// sum = x + y.
struct AddParams {
  const float *x, *y;  // [size]
  float* sum;          // [size]
  int64_t size;
};

// target[rows[i]] = source[i], one after the other.
struct WriteRowsParams {
  const char* source;   // [count] rows
  const int64_t* rows;  // [count], in [0, size)
  char* target;         // [size] rows
  int64_t count, size, row_bytes;
};

// y = x, row after row.
struct CopyParams {
  const char* x;  // [sizes..., a row], by strides
  char* y;        // dense
  int64_t sizes[3], strides[3];
  int64_t row_bytes;  // strides are in bytes, too
};

void rms_norm(const RmsNormParams& params);
void rotate(const RotateParams& params);
void angles(const AnglesParams& params);
void gated(const GatedParams& params);
void add(const AddParams& params);
void copy(const CopyParams& params);
bool write_rows(const WriteRowsParams& params);  // false: a row is out of range, and none was written

}  // namespace specdec::cpu
