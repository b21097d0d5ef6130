// The formats of numbers, and where a thread is in its block.
#pragma once

#include "../core/dtype.h"
#include "simt.h"

namespace specdec::cuda {

using simt::kWarp;

SPECDEC_DEVICE int lane() { return simt::thread() & (kWarp - 1); }
SPECDEC_DEVICE int warp() { return static_cast<int>(static_cast<uint32_t>(simt::thread()) / kWarp); }
SPECDEC_DEVICE int num_warps() { return static_cast<int>(static_cast<uint32_t>(simt::num_threads()) / kWarp); }

// A format of logits in words of 32 bits: how many are in a word, the word of which all are -inf, the i-th of a word,
// the larger ones of two words (NaN where one of them is), and a logit in memory, as bits and as a number.
struct Float32 {
  static constexpr int kInWord = 1;
  static constexpr uint32_t kLowest = 0xff800000u;
  SPECDEC_DEVICE static float logit(uint32_t word, int) { return as_float(word); }
  SPECDEC_DEVICE static uint32_t larger(uint32_t a, uint32_t b) {
    return as_bits(simt::larger(as_float(a), as_float(b)));
  }
  SPECDEC_DEVICE static uint32_t bits(const char* data, int64_t i) {
    return reinterpret_cast<const uint32_t*>(data)[i];
  }
};

struct Halves {
  static constexpr int kInWord = 2;
  SPECDEC_DEVICE static uint32_t bits(const char* data, int64_t i) {
    return reinterpret_cast<const uint16_t*>(data)[i];
  }
};

struct BFloat16 : Halves {
  static constexpr uint32_t kLowest = 0xff80ff80u;
  SPECDEC_DEVICE static float logit(uint32_t word, int i) { return as_float(i == 0 ? word << 16 : word & 0xffff0000u); }
  SPECDEC_DEVICE static uint32_t larger(uint32_t a, uint32_t b) { return simt::larger_bfloat16(a, b); }
  SPECDEC_DEVICE static uint16_t nearest(float value) { return simt::nearest_bfloat16(value); }
  SPECDEC_DEVICE static uint32_t nearest(float first, float second) { return simt::nearest_bfloat16(first, second); }
  static constexpr float kOfCentred = 64.0f;
  SPECDEC_DEVICE static uint32_t centred(uint32_t integers) { return simt::centred_bfloat16(integers); }
  SPECDEC_DEVICE static void multiply_add(float (&sum)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    simt::multiply_add_bfloat16(sum, a, b);
  }
};

struct Float16 : Halves {
  static constexpr uint32_t kLowest = 0xfc00fc00u;
  SPECDEC_DEVICE static float logit(uint32_t word, int i) {
    return simt::half_to_float(i == 0 ? word & 0xffffu : word >> 16);
  }
  SPECDEC_DEVICE static uint32_t larger(uint32_t a, uint32_t b) { return simt::larger_float16(a, b); }
  SPECDEC_DEVICE static uint16_t nearest(float value) { return simt::nearest_float16(value); }
  SPECDEC_DEVICE static uint32_t nearest(float first, float second) { return simt::nearest_float16(first, second); }
  static constexpr float kOfCentred = 512.0f;
  SPECDEC_DEVICE static uint32_t centred(uint32_t integers) { return simt::centred_float16(integers); }
  SPECDEC_DEVICE static void multiply_add(float (&sum)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    simt::multiply_add_float16(sum, a, b);
  }
};

// Calls function(format).
template <class Function>
SPECDEC_DEVICE void with_format(Dtype dtype, const Function& function) {
  if (dtype == Dtype::kBFloat16) {
    function(BFloat16());
  } else if (dtype == Dtype::kFloat16) {
    function(Float16());
  } else {
    function(Float32());
  }
}

// Four neighbouring numbers in shared memory.
struct alignas(16) Four {
  float of[4];

  SPECDEC_DEVICE static Four at(const float* place) { return simt::read(reinterpret_cast<const Four*>(place)); }
};

struct Sum {
  SPECDEC_HD float operator()(float a, float b) const { return a + b; }
};

}  // namespace specdec::cuda
