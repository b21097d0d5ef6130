// The operations of recurrent layers, on float32. All tensors are dense.
#pragma once

#include <cstdint>

#include "../feed.h"

namespace specdec::cpu {

struct ConvWindowParams {
  float* window;        // [R, places, channels]
  const float* x;       // [rows, columns, channels]
  const float* weight;  // [channels, taps]
  const float* bias;    // [channels], or null
  float* y;             // [rows, columns, channels]
  Feed feed;
  int64_t channels, taps;
  bool silu;
};

struct DeltaStepParams {
  float* state;                                         // [R, heads, dk, dv]
  int64_t* base;                                        // [R]
  float *window_k, *window_v, *window_g, *window_beta;  // [R, places, ...], as the inputs
  const float *q, *k;                                   // [rows, columns, key_heads, dk]
  const float* v;                                       // [rows, columns, heads, dv]
  const float* g;     // [rows, columns, heads], or [rows, columns, heads, dk] with `by_channel`
  const float* beta;  // [rows, columns, heads]
  float* out;         // [rows, columns, heads, dv]
  Feed feed;
  int64_t heads, key_heads, dk, dv;
  bool by_channel, keep, normalize;
};

struct SsdStepParams {
  float* state;                            // [R, heads, size, numbers]
  int64_t* base;                           // [R]
  float *window_x, *window_dt, *window_b;  // [R, places, ...], as the inputs
  const float* x;                          // [rows, columns, heads, size]
  const float* dt;                         // [rows, columns, heads]
  const float *b, *c;                      // [rows, columns, groups, numbers]
  const float* a;                          // [heads], or [heads, numbers] with `by_number`
  const float* d;                          // [heads], or null
  float* out;                              // [rows, columns, heads, size]
  Feed feed;
  int64_t heads, size, groups, numbers;
  bool by_number, keep;
};

void conv_window(const ConvWindowParams& params);
void delta_step(const DeltaStepParams& params);
void ssd_step(const SsdStepParams& params);

}  // namespace specdec::cpu
