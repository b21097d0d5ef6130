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

// Some consecutive weights of a row, from input k on, as kParts times kVectors vectors.
template <int kWidth, class Stored>
struct Group {
  static constexpr int64_t kInputs = 1;  // of which a row has a multiple
  static constexpr int kParts = 1, kVectors = 1;
  const Stored* numbers;

  SPECDEC_BODY const Stored* at(const char* row, int64_t k) { return reinterpret_cast<const Stored*>(row) + k; }
  SPECDEC_BODY Group read(const char* row, int64_t k) { return {at(row, k)}; }
  template <class Vector>
  SPECDEC_BODY void expand(const Group& group, int, int, Vector* out) {
    widen<kWidth>(group.numbers, out);
  }
};

// Those of a block, in parts of 32.
template <int kWidth, class Block>
struct BlockGroup {
  static constexpr int64_t kInputs = Block::kInputs;
  static constexpr int kParts = kInputs / 32, kVectors = 32 / kWidth;

  SPECDEC_BODY const Block* at(const char* row, int64_t k) {
    return reinterpret_cast<const Block*>(row) + k / Block::kInputs;
  }
};

template <int kWidth>
struct Group<kWidth, Q8_0> : BlockGroup<kWidth, Q8_0> {
  const int8_t* quants;
  float scale;

  SPECDEC_BODY Group read(const char* row, int64_t k) {
    const Q8_0* block = Group::at(row, k);
    return {{}, block->quants, scale_of<kWidth>(block->scale)};
  }
  template <class Vector>
  SPECDEC_BODY void expand(const Group& group, int, int i, Vector* out) {
    typename Lanes<kWidth>::Ints quants;
    convert_lanes<kWidth>(group.quants + i * kWidth, &quants);
    *out = __builtin_convertvector(quants, Vector) * group.scale;
  }
};

// Weights from their quants of 4 bits, of which `quants` may have more bits above: scale * quant + least, or with
// kCentred scale * (quant - 8).
template <int kWidth, bool kCentred, class Ints, class Vector>
SPECDEC_BODY void from_nibbles(Ints quants, float scale, float least, Vector* out) {
#if defined(__x86_64__) && !defined(__clang__)
  if constexpr (kWidth == 16) {  // the 16 weights that there are fit into a vector
    constexpr Vector kQuants = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const Vector table = kCentred ? (kQuants - 8) * scale : kQuants * scale + least;
    *out = __builtin_shuffle(table, quants);
    return;
  }
#endif
  quants &= 15;
  if (kCentred) {
    *out = __builtin_convertvector(quants - 8, Vector) * scale;
  } else {
    *out = __builtin_convertvector(quants, Vector) * scale + least;
  }
}

// The 32 quants of a block are the lower halves of 16 bytes, then the upper ones.
template <int kWidth, class Block, bool kCentred>
struct NibbleGroup : BlockGroup<kWidth, Block> {
  const uint8_t* quants;
  float scale, least;

  template <class Vector>
  SPECDEC_BODY void expand(const NibbleGroup& group, int, int i, Vector* out) {
    typename Lanes<kWidth>::Ints quants;
    convert_lanes<kWidth>(group.quants + i * kWidth % 16, &quants);
    if (i * kWidth >= 16) quants >>= 4;
    from_nibbles<kWidth, kCentred>(quants, group.scale, group.least, out);
  }
};

template <int kWidth>
struct Group<kWidth, Q4_0> : NibbleGroup<kWidth, Q4_0, true> {
  SPECDEC_BODY Group read(const char* row, int64_t k) {
    const Q4_0* block = Group::at(row, k);
    return {{{}, block->quants, scale_of<kWidth>(block->scale), 0}};
  }
};

template <int kWidth>
struct Group<kWidth, Q4_1> : NibbleGroup<kWidth, Q4_1, false> {
  SPECDEC_BODY Group read(const char* row, int64_t k) {
    const Q4_1* block = Group::at(row, k);
    return {{{}, block->quants, scale_of<kWidth>(block->scale), scale_of<kWidth>(block->least)}};
  }
};

// kCount scales, integers of 8 bits, times one of a block.
template <int kWidth, int kCount, class Integer>
SPECDEC_BODY void scaled(const Integer* integers, float scale, float* out) {
  constexpr int kStep = kWidth < kCount ? kWidth : kCount;
  for (int i = 0; i < kCount; i += kStep) {
    typename Lanes<kStep>::Ints some;
    convert_lanes<kStep>(integers + i, &some);
    const auto product = __builtin_convertvector(some, typename Lanes<kStep>::Vector) * scale;
    std::memcpy(out + i, &product, sizeof(product));
  }
}

template <int kWidth>
struct Group<kWidth, Q4_K> : BlockGroup<kWidth, Q4_K> {
  const uint8_t* quants;
  float scales[8], leasts[8];

  SPECDEC_BODY Group read(const char* row, int64_t k) {
    const Q4_K* block = Group::at(row, k);
    // Four integers each. The first four scales and leasts are 6 bits of `scale` and `least`; of the others these have
    // the upper 2 bits, and `both` the lower 4.
    uint32_t scale, least, both;
    std::memcpy(&scale, block->scales, 4);
    std::memcpy(&least, block->scales + 4, 4);
    std::memcpy(&both, block->scales + 8, 4);
    const uint32_t integers[] = {scale & 0x3f3f3f3f, (both & 0x0f0f0f0f) | (scale >> 2 & 0x30303030),
                                 least & 0x3f3f3f3f, (both >> 4 & 0x0f0f0f0f) | (least >> 2 & 0x30303030)};
    uint8_t bytes[16];
    std::memcpy(bytes, integers, sizeof(bytes));
    Group group;
    group.quants = block->quants;
    scaled<kWidth, 8>(bytes, scale_of<kWidth>(block->scale), group.scales);
    scaled<kWidth, 8>(bytes + 8, -scale_of<kWidth>(block->least), group.leasts);
    return group;
  }
  template <class Vector>
  SPECDEC_BODY void expand(const Group& group, int part, int i, Vector* out) {
    typename Lanes<kWidth>::Ints quants;
    convert_lanes<kWidth>(group.quants + part / 2 * 32 + i * kWidth, &quants);
    from_nibbles<kWidth, false>(quants >> part % 2 * 4, group.scales[part], group.leasts[part], out);
  }
};

template <int kWidth>
struct Group<kWidth, Q6_K> : BlockGroup<kWidth, Q6_K> {
  const uint8_t *lower, *upper;
  float scales[16];

  SPECDEC_BODY Group read(const char* row, int64_t k) {
    const Q6_K* block = Group::at(row, k);
    Group group;
    group.lower = block->lower, group.upper = block->upper;
    scaled<kWidth, 16>(block->scales, scale_of<kWidth>(block->scale), group.scales);
    return group;
  }
  template <class Vector>
  SPECDEC_BODY void expand(const Group& group, int part, int i, Vector* out) {
    const int half = part / 4, quarter = part % 4;
    typename Lanes<kWidth>::Ints lower, upper;
    convert_lanes<kWidth>(group.lower + half * 64 + quarter % 2 * 32 + i * kWidth, &lower);
    convert_lanes<kWidth>(group.upper + half * 32 + i * kWidth, &upper);
    const auto quants = ((lower >> quarter / 2 * 4 & 15) | (upper >> quarter * 2 & 3) << 4) - 32;
    *out = __builtin_convertvector(quants, Vector) * group.scales[part * 2 + i * kWidth / 16];
  }
};

}  // namespace specdec::cpu
