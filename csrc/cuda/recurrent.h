// The operations of recurrent layers on the current NVIDIA GPU and the given stream. All tensors are dense. They throw
// std::runtime_error.
#pragma once

#include "../core/feed.h"
#include "../core/numbers.h"

namespace specdec::cuda {

constexpr int kMostChannels = 256;  // dk, of the delta rule
constexpr int kMostNumbers = 256;   // N, of a state-space model
constexpr int kMostNodes = 2048;    // columns of a tree

struct ConvWindowParams {
  Numbers window;  // [R, places, channels]
  Numbers x;       // [rows, columns, channels]
  Numbers weight;  // [channels, taps]
  Numbers bias;    // [channels], or without data
  Numbers y;       // [rows, columns, channels]
  Feed feed;
  int64_t channels, taps;
  bool silu;
};

struct DeltaStepParams {
  float* state;                                       // [R, heads, dk, dv]
  int64_t* base;                                      // [R]
  Numbers window_k, window_v, window_g, window_beta;  // [R, places, ...], as the inputs
  Numbers q, k;                                       // [rows, columns, key_heads, dk]
  Numbers v;                                          // [rows, columns, heads, dv]
  Numbers g;     // [rows, columns, heads], or [rows, columns, heads, dk] with `by_channel`
  Numbers beta;  // [rows, columns, heads]
  float* out;    // [rows, columns, heads, dv]
  Feed feed;
  int64_t heads, key_heads, dk, dv;
  bool by_channel, keep, normalize;
};

struct SsdStepParams {
  float* state;                           // [R, heads, size, numbers]
  int64_t* base;                          // [R]
  Numbers window_x, window_dt, window_b;  // [R, places, ...], as the inputs
  Numbers x;                              // [rows, columns, heads, size]
  Numbers dt;                             // [rows, columns, heads]
  Numbers b, c;                           // [rows, columns, groups, numbers]
  const float* a;                         // [heads], or [heads, numbers] with `by_number`
  const float* d;                         // [heads], or null
  float* out;                             // [rows, columns, heads, size]
  Feed feed;
  int64_t heads, size, groups, numbers;
  bool by_number, keep;
};

void conv_window(const ConvWindowParams& params, void* stream);
void delta_step(const DeltaStepParams& params, void* stream);
void ssd_step(const SsdStepParams& params, void* stream);

}  // namespace specdec::cuda
