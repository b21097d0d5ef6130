// A warp's block of logits: which of them a thread has, and how they are loaded and measured.
#pragma once

#include "../common/formats.h"
#include "../core/params.h"
#include "../core/softmax.h"

namespace specdec::cuda {

constexpr int kEach = kBlock / kWarp;       // logits of a block that a thread has
constexpr int kVector = 8;                  // how many of these are neighbours
constexpr int kParts = 8;                   // of a block, whose maxima filters use
constexpr int kPartLanes = kWarp / kParts;  // neighbours, which have the logits of a part

// The index within the block of the i-th logit of a lane, or of this one.
SPECDEC_DEVICE int place_of(int i, int lane) { return i / kVector * (kVector * kWarp) + lane * kVector + i % kVector; }
SPECDEC_DEVICE int place_of(int i) { return place_of(i, lane()); }

SPECDEC_HD int blocks_of(int64_t logits) { return static_cast<int>((logits + kBlock - 1) / kBlock); }

// A thread's logits of a block, as they are in memory.
template <class Format>
struct Logits {
  static constexpr int kWords = kEach / Format::kInWord, kBytes = 4 / Format::kInWord;
  static constexpr int kInLoad = 4 * Format::kInWord;  // logits in 16 bytes
  uint32_t word[kWords];

  SPECDEC_DEVICE float operator[](int i) const { return Format::logit(word[i / Format::kInWord], i % Format::kInWord); }

  // The logits of a block that are -inf but for a 0 at this place, if the block has it.
  SPECDEC_DEVICE static Logits only(int64_t place) {
    Logits logits;
#pragma unroll
    for (int i = 0; i < kEach; i += Format::kInWord) {
      const uint32_t first = Format::kInWord == 2 ? 0xffff0000u : 0u;
      uint32_t its = place_of(i) == place ? Format::kLowest & first : Format::kLowest;
      if (Format::kInWord == 2 && place_of(i + 1) == place) its = Format::kLowest & ~first;
      logits.word[i / Format::kInWord] = its;
    }
    return logits;
  }

  // What a lane has of a whole block, or of its part up to the row's end, in whole vectors of 16 bytes.
  template <bool kWhole>
  SPECDEC_DEVICE void load_vectors(const char* data, int left, int lane) {
    const char* of_lane = data + static_cast<uint32_t>(kBytes * place_of(0, lane));
#pragma unroll
    for (int i = 0; i < kEach; i += kInLoad) {
      simt::Bytes16 bytes = {{Format::kLowest, Format::kLowest, Format::kLowest, Format::kLowest}};
      if (kWhole || place_of(i, lane) < left) bytes = simt::load16(of_lane + kBytes * place_of(i, 0));
#pragma unroll
      for (int k = 0; k < 4; ++k) word[i / Format::kInWord + k] = bytes.word[k];
    }
  }

  // One logit at a time, so that nothing behind the row is read, and little code does it.
  SPECDEC_DEVICE void load_single(const char* data, int left, int lane) {
#pragma unroll
    for (int i = 0; i < kEach; i += Format::kInWord) {
      const int place = place_of(i, lane);
      uint32_t all = Format::kLowest;
      if (place < left) all = Format::bits(data, place) | (Format::kInWord == 2 ? all & 0xffff0000u : 0u);
      if constexpr (Format::kInWord == 2) {
        if (place + 1 < left) all = (all & 0xffffu) | Format::bits(data, place + 1) << 16;
      }
      word[i / Format::kInWord] = all;
    }
  }

  // Blocks that begin anywhere. `left`: how many logits there are to the row's end. `kShifts`: more code, fewer loads.
  template <bool kShifts>
  SPECDEC_DEVICE void load(const char* data, int left, int lane) {
    if (static_cast<uint32_t>(reinterpret_cast<uintptr_t>(data)) % 16 == 0 && left >= kBlock) {
      load_vectors<true>(data, left, lane);
    } else if (kShifts && left >= kBlock + 16) {
      load_shifted(data);
    } else {
      load_single(data, left, lane);
    }
  }

  // A whole block that begins anywhere, in a row that goes on for 16 bytes at least: from the two 16-byte granules in
  // which each 16 bytes lie. What lies before the block in its first granule belongs to the same allocation.
  SPECDEC_DEVICE void load_shifted(const char* data) {
    const int shift = static_cast<int>(reinterpret_cast<uintptr_t>(data) % 16);
#pragma unroll
    for (int i = 0; i < kEach; i += kInLoad) {
      const char* from = data - shift + kBytes * place_of(i);
      const simt::Bytes16 low = simt::load16(from), high = simt::load16(from + 16);
      uint32_t both[8] = {low.word[0],  low.word[1],  low.word[2],  low.word[3],
                          high.word[0], high.word[1], high.word[2], high.word[3]};
      // An array with a variable index would lie in memory.
#pragma unroll
      for (int k = 0; k < 6; ++k) both[k] = (shift & 8) != 0 ? both[k + 2] : both[k];
#pragma unroll
      for (int k = 0; k < 5; ++k) both[k] = (shift & 4) != 0 ? both[k + 1] : both[k];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        word[i / Format::kInWord + k] =
            static_cast<uint32_t>((uint64_t{both[k + 1]} << 32 | both[k]) >> 8 * (shift & 2));
      }
    }
  }

  // The largest logit that this thread has.
  SPECDEC_DEVICE float max() const {
    uint32_t largest = word[0];
#pragma unroll
    for (int i = 1; i < kWords; ++i) largest = Format::larger(largest, word[i]);
    return simt::larger(Format::logit(largest, 0), Format::logit(largest, Format::kInWord - 1));
  }
};

// Statistics of a block: its largest logit, NaN if any is NaN, and the sum of weights relative to it.
struct alignas(8) Stats {
  float max, sum;
};

struct Larger {
  SPECDEC_DEVICE float operator()(float a, float b) const { return simt::larger(a, b); }
};

// By a warp: the sum of the weights of its logits relative to the largest. The order of additions is the same for every
// format and address. x(i) is this thread's i-th logit. `scale`: log2(e) / temperature. One operation a logit makes its
// exponent; what the offset lost by rounding, which is the same for all, is made good at the end. So that both are
// finite, about 2^30 over the largest logit, by a difference of bits, limits `scale`. That changes no weight: where it
// does so, the next float below the largest logit weighs 2^-64 at most.
template <class Values>
SPECDEC_DEVICE float sum_of_weights(const Values& x, float max, float scale) {
  const float reference = fmaxf(max, -0x1.fffffep127f);
  scale = fminf(scale, as_float((284u << 23) - as_bits(fmaxf(fabsf(reference), 0x1p-97f))));
  const float offset = -reference * scale;
  float even = 0.0f, odd = 0.0f;
#pragma unroll
  for (int i = 0; i < kEach; i += 2) {
    even += simt::exp2_of(fmaf(x(i), scale, offset));
    odd += simt::exp2_of(fmaf(x(i + 1), scale, offset));
  }
  return simt::reduce(even + odd, Sum()) * simt::exp2_of(-fmaf(reference, scale, offset));
}

}  // namespace specdec::cuda
