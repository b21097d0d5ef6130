// Weights as a row of a matrix stores them, numbers or blocks of GGUF, read in groups whose scales are read once.
//
// A block's weights are those of gguf-py's `dequantize`, to the last bit: the products of a scale and an integer have
// at most 24 bits, so they are exact in whatever way they are computed, and a sum of two terms is rounded once.
#pragma once

#include "lanes.h"
#include "linear.h"

namespace specdec::cpu {

// The fields of a block, as in a file. Scales are float16.
struct __attribute__((packed)) Q4_0 {
  static constexpr int64_t kInputs = 32;
  Float16 scale;
  uint8_t quants[16];  // input i in the lower half of byte i, input 16 + i in the upper one
};

struct __attribute__((packed)) Q4_1 {
  static constexpr int64_t kInputs = 32;
  Float16 scale, least;
  uint8_t quants[16];
};

struct __attribute__((packed)) Q8_0 {
  static constexpr int64_t kInputs = 32;
  Float16 scale;
  int8_t quants[32];
};

struct __attribute__((packed)) Q4_K {
  static constexpr int64_t kInputs = 256;
  Float16 scale, least;
  uint8_t scales[12];   // of eight times 32 inputs, 6 bits of scale and 6 of least each
  uint8_t quants[128];  // four times 32 bytes, their lower halves before their upper ones
};

struct __attribute__((packed)) Q6_K {
  static constexpr int64_t kInputs = 256;
  uint8_t lower[128];  // two times 64 bytes: 128 inputs' lower 4 bits, the lower halves before the upper ones
  uint8_t upper[64];   // two times 32 bytes: their upper 2 bits, 32 inputs' after another's
  int8_t scales[16];   // of 16 inputs each
  Float16 scale;
};

// A block's scale, as kWidth > 4 has instructions for it.
template <int kWidth>
SPECDEC_BODY float scale_of(Float16 stored) {
  if constexpr (kWidth == 4) return to_float(stored);
  _Float16 scale;
  std::memcpy(&scale, &stored, sizeof(scale));
  return scale;
}

// Some consecutive weights of a row, from input k on, as kVectors vectors.
template <int kWidth, class Stored>
struct Group {
  static constexpr int64_t kInputs = 1;  // of which a row has a multiple
  static constexpr int kVectors = 1;
  const Stored* numbers;

  SPECDEC_BODY const Stored* at(const char* row, int64_t k) { return reinterpret_cast<const Stored*>(row) + k; }
  SPECDEC_BODY Group read(const char* row, int64_t k) { return {at(row, k)}; }
  template <class Vector>
  SPECDEC_BODY void expand(const Group& group, int, Vector* out) {
    widen<kWidth>(group.numbers, out);
  }
};

// Of a block, the 32 weights from input k on.
template <int kWidth, class Block>
struct BlockGroup {
  static constexpr int64_t kInputs = Block::kInputs;
  static constexpr int kVectors = 32 / kWidth;
  using Vector = typename Lanes<kWidth>::Vector;
  using Ints = typename Lanes<kWidth>::Ints;

  SPECDEC_BODY const Block* at(const char* row, int64_t k) {
    return reinterpret_cast<const Block*>(row) + k / Block::kInputs;
  }
};

template <int kWidth>
struct Group<kWidth, Q8_0> : BlockGroup<kWidth, Q8_0> {
  using typename BlockGroup<kWidth, Q8_0>::Ints;
  const int8_t* quants;
  float scale;

  SPECDEC_BODY Group read(const char* row, int64_t k) {
    const Q8_0* block = Group::at(row, k);
    return {{}, block->quants, scale_of<kWidth>(block->scale)};
  }
  template <class Vector>
  SPECDEC_BODY void expand(const Group& group, int i, Vector* out) {
    Ints quants;
    convert_lanes<kWidth>(group.quants + i * kWidth, &quants);
    *out = __builtin_convertvector(quants, Vector) * group.scale;
  }
};

// 32 weights of 4 bits, quant * scale + least, or with kCentred, (quant - 8) * scale.
template <int kWidth, class Block, bool kCentred>
struct NibbleGroup : BlockGroup<kWidth, Block> {
  using typename BlockGroup<kWidth, Block>::Ints;
  const uint8_t* quants;
  int upper;  // 4 if the weights are the upper halves of 32 bytes, 0 if they are the lower ones; -1: of 16 bytes, both
  float scale, least;

  template <class Vector>
  SPECDEC_BODY void expand(const NibbleGroup& group, int i, Vector* out) {
    Ints quants;
    if (group.upper < 0) {
      convert_lanes<kWidth>(group.quants + i * kWidth % 16, &quants);
      if (i * kWidth >= 16) quants >>= 4;
    } else {
      convert_lanes<kWidth>(group.quants + i * kWidth, &quants);
      quants >>= group.upper;
    }
    quants &= 15;
    if (kCentred) quants -= 8;
    *out = __builtin_convertvector(quants, Vector) * group.scale;
    if (!kCentred) *out += group.least;
  }
};

template <int kWidth>
struct Group<kWidth, Q4_0> : NibbleGroup<kWidth, Q4_0, true> {
  SPECDEC_BODY Group read(const char* row, int64_t k) {
    const Q4_0* block = Group::at(row, k);
    return {{{}, block->quants, -1, scale_of<kWidth>(block->scale), 0}};
  }
};

template <int kWidth>
struct Group<kWidth, Q4_1> : NibbleGroup<kWidth, Q4_1, false> {
  SPECDEC_BODY Group read(const char* row, int64_t k) {
    const Q4_1* block = Group::at(row, k);
    return {{{}, block->quants, -1, scale_of<kWidth>(block->scale), scale_of<kWidth>(block->least)}};
  }
};

template <int kWidth>
struct Group<kWidth, Q4_K> : NibbleGroup<kWidth, Q4_K, false> {
  SPECDEC_BODY Group read(const char* row, int64_t k) {
    const Q4_K* block = Group::at(row, k);
    const int part = static_cast<int>(k % 256 / 32);
    // The first four parts have the lower 6 bits of a byte each; the others 4 bits, and the upper 2 of those bytes.
    const uint8_t *scales = block->scales, *low = scales + part % 4;
    const int scale = part < 4 ? low[0] & 63 : (low[8] & 15) | low[0] >> 6 << 4;
    const int least = part < 4 ? low[4] & 63 : low[8] >> 4 | low[4] >> 6 << 4;
    return {{{},
             block->quants + part / 2 * 32,
             part % 2 * 4,
             scale_of<kWidth>(block->scale) * static_cast<float>(scale),
             -(scale_of<kWidth>(block->least) * static_cast<float>(least))}};
  }
};

template <int kWidth>
struct Group<kWidth, Q6_K> : BlockGroup<kWidth, Q6_K> {
  using typename BlockGroup<kWidth, Q6_K>::Ints;
  const uint8_t *lower, *upper;
  int lower_shift, upper_shift;
  float scales[2];

  SPECDEC_BODY Group read(const char* row, int64_t k) {
    const Q6_K* block = Group::at(row, k);
    const int part = static_cast<int>(k % 256 / 32), half = part / 4, quarter = part % 4;
    const float scale = scale_of<kWidth>(block->scale);
    return {{},
            block->lower + half * 64 + quarter % 2 * 32,
            block->upper + half * 32,
            quarter / 2 * 4,
            quarter * 2,
            {scale * block->scales[part * 2], scale * block->scales[part * 2 + 1]}};
  }
  template <class Vector>
  SPECDEC_BODY void expand(const Group& group, int i, Vector* out) {
    Ints lower, upper;
    convert_lanes<kWidth>(group.lower + i * kWidth, &lower);
    convert_lanes<kWidth>(group.upper + i * kWidth, &upper);
    const Ints quants = ((lower >> group.lower_shift & 15) | (upper >> group.upper_shift & 3) << 4) - 32;
    *out = __builtin_convertvector(quants, Vector) * group.scales[i * kWidth / 16];
  }
};

}  // namespace specdec::cpu
