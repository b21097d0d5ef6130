// How a thread holds its logits of a block: in registers, as they are in memory.
#pragma once

#include "../core/params.h"
#include "granules.h"

namespace specdec::cuda {

constexpr int kEach = kBlock / kWarp;  // logits of a block that a thread holds
constexpr int kVector = 8;             // how many of these are neighbours

// The index within the block of a thread's i-th logit. Neighbours are loaded at once.
SPECDEC_DEVICE int place_of(int i) {
  return i / kVector * (kVector * kWarp) + simt::thread() % kWarp * kVector + i % kVector;
}

SPECDEC_HD int blocks_of(int64_t logits) { return static_cast<int>((logits + kBlock - 1) / kBlock); }

// A format of logits in words of 32 bits: how many are in a word, and the word of which all are -inf.
struct Float32 {
  static constexpr int kInWord = 1;
  static constexpr uint32_t kLowest = 0xff800000u;
  SPECDEC_DEVICE static float logit(uint32_t word, int) { return as_float(word); }
  // The larger logits of two words, NaN where one of them is.
  SPECDEC_DEVICE static uint32_t larger(uint32_t a, uint32_t b) {
    return as_bits(simt::larger(as_float(a), as_float(b)));
  }
};

struct BFloat16 {
  static constexpr int kInWord = 2;
  static constexpr uint32_t kLowest = 0xff80ff80u;
  SPECDEC_DEVICE static float logit(uint32_t word, int i) { return as_float(i == 0 ? word << 16 : word & 0xffff0000u); }
  SPECDEC_DEVICE static uint32_t larger(uint32_t a, uint32_t b) { return simt::larger_bfloat16(a, b); }
};

struct Float16 {
  static constexpr int kInWord = 2;
  static constexpr uint32_t kLowest = 0xfc00fc00u;
  SPECDEC_DEVICE static float logit(uint32_t word, int i) {
    return simt::half_to_float(i == 0 ? word & 0xffffu : word >> 16);
  }
  SPECDEC_DEVICE static uint32_t larger(uint32_t a, uint32_t b) { return simt::larger_float16(a, b); }
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

// A thread's logits of a block.
template <class Format>
struct Logits {
  static constexpr int kInVector = 4 * Format::kInWord;
  uint32_t word[kEach / Format::kInWord];

  SPECDEC_DEVICE float operator[](int i) const { return Format::logit(word[i / Format::kInWord], i % Format::kInWord); }

  // The largest logit of the warp's; NaN if any is NaN.
  SPECDEC_DEVICE float max() const {
    uint32_t largest = word[0];
#pragma unroll
    for (int i = 1; i < kEach / Format::kInWord; ++i) largest = Format::larger(largest, word[i]);
    largest = simt::reduce(largest, [](uint32_t a, uint32_t b) { return Format::larger(a, b); });
    return simt::larger(Format::logit(largest, 0), Format::logit(largest, Format::kInWord - 1));
  }

  // Loads a whole block from an aligned address.
  SPECDEC_DEVICE void load(const char* data) {
#pragma unroll
    for (int i = 0; i < kEach; i += kInVector) set(i, simt::load16(data + offset_of(i)));
  }

  // The same of a block that begins or ends anywhere.
  SPECDEC_DEVICE void load(const Shifted& block) {
    if (block.whole > kBlock * 4 / Format::kInWord) {
#pragma unroll
      for (int i = 0; i < kEach; i += kInVector) set(i, block.bytes_of_whole(offset_of(i)));
    } else {
#pragma unroll
      for (int i = 0; i < kEach; i += kInVector) set(i, block.bytes(offset_of(i)));
    }
  }

  // Loads a block of `size` logits, which end with a whole vector, from an aligned address; pads them with -inf.
  SPECDEC_DEVICE void load_part(const char* data, int size) {
    constexpr Bytes16 lowest = {{Format::kLowest, Format::kLowest, Format::kLowest, Format::kLowest}};
#pragma unroll
    for (int i = 0; i < kEach; i += kInVector) {
      set(i, place_of(i) < size ? simt::load16(data + offset_of(i)) : lowest);
    }
  }

 private:
  SPECDEC_DEVICE static int offset_of(int i) { return 4 / Format::kInWord * place_of(i); }
  SPECDEC_DEVICE void set(int i, const Bytes16& bytes) {
#pragma unroll
    for (int k = 0; k < 4; ++k) word[i / Format::kInWord + k] = bytes.word[k];
  }
};

SPECDEC_DEVICE Logits<Float32> logits_of(const float (&x)[kEach]) {
  Logits<Float32> logits;
#pragma unroll
  for (int i = 0; i < kEach; ++i) logits.word[i] = as_bits(x[i]);
  return logits;
}

// Loads `size` logits from an aligned address, and pads them with -inf to a block.
SPECDEC_DEVICE void load_aligned(const char* data, Dtype dtype, int size, float (&x)[kEach]) {
  with_format(dtype, [&](auto format) {
    Logits<decltype(format)> logits;
    logits.load_part(data, size);
#pragma unroll
    for (int i = 0; i < kEach; ++i) x[i] = logits[i];
  });
}

}  // namespace specdec::cuda
