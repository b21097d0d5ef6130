// Weights in GGUF's blocks, sixteen rows at a time.
//
// The rows are interleaved by 16 bits: the first two bytes of sixteen rows, then their next two, and so on. So what a
// vector needs lies together: a scale of many rows, or two inputs of each of them. The integers and the scales of a
// block are those of the file.
#pragma once

#include "lanes.h"

namespace specdec::cpu {

constexpr int kTile = 16;  // rows

// Two bytes of each row of a tile.
struct Unit {
  uint8_t bytes[2 * kTile];
};

// Vectors with one lane for each row, of which a tile takes kVectors. Of integers of 16 bits a lane has two.
template <int kWidth>
struct OfRows {
  static constexpr int kLanes = kWidth == 16 ? 16 : 8, kVectors = kTile / kLanes;
  typedef float Floats __attribute__((vector_size(kLanes * sizeof(float))));
  typedef int32_t Ints __attribute__((vector_size(kLanes * sizeof(int32_t))));
  typedef int16_t Pairs __attribute__((vector_size(kLanes * sizeof(int32_t))));
  typedef uint16_t Halves __attribute__((vector_size(kLanes * sizeof(uint16_t))));
};

// The weights of some inputs of a tile, a weight being scale * integer + least.
template <int kWidth>
struct Expanded {
  static constexpr int kMost = 256, kVectors = OfRows<kWidth>::kVectors;  // inputs
  typename OfRows<kWidth>::Pairs integers[kMost / 2][kVectors];           // of inputs 2 i and 2 i + 1
  typename OfRows<kWidth>::Floats scales[kMost / 16][kVectors];           // of so many inputs as have one
  typename OfRows<kWidth>::Floats leasts[kMost / 32][kVectors];
};

#if defined(__x86_64__) && !defined(__clang__)
#define SPECDEC_NAMED_INSTRUCTIONS 1  // GCC converts vectors piece by piece
#else
#define SPECDEC_NAMED_INSTRUCTIONS 0
#endif

// Bytes of the rows of vector v as integers of 16 bits. kWidth is the instruction set's, as in lanes.h: from 8 on it
// has AVX2.
template <int kWidth, class Byte>
SPECDEC_BODY void widen_bytes(const Unit& unit, int v, typename OfRows<kWidth>::Pairs* out) {
  constexpr int kBytes = 2 * OfRows<kWidth>::kLanes;
#if SPECDEC_NAMED_INSTRUCTIONS
  if constexpr (kWidth > 4) {
    struct Memory {
      uint8_t bytes[kBytes];
    };
    const Memory& memory = *reinterpret_cast<const Memory*>(unit.bytes + v * kBytes);
    if constexpr (std::is_signed_v<Byte>) asm("vpmovsxbw %1, %0" : "=v"(*out) : "m"(memory));
    if constexpr (!std::is_signed_v<Byte>) asm("vpmovzxbw %1, %0" : "=v"(*out) : "m"(memory));
    return;
  }
#endif
  typedef Byte Bytes __attribute__((vector_size(kBytes)));
  Bytes bytes;
  std::memcpy(&bytes, unit.bytes + v * kBytes, sizeof(bytes));
  *out = __builtin_convertvector(bytes, typename OfRows<kWidth>::Pairs);
}

// A float16 of each row of vector v.
template <int kWidth>
SPECDEC_BODY void read_halves(const Unit& unit, int v, typename OfRows<kWidth>::Floats* out) {
  constexpr int kLanes = OfRows<kWidth>::kLanes;
  if constexpr (kWidth > 4) {
    convert_lanes<kLanes>(reinterpret_cast<const _Float16*>(unit.bytes) + v * kLanes, out);
  } else {  // without F16C
    for (int i = 0; i < kLanes; ++i) {
      Float16 half;
      std::memcpy(&half, unit.bytes + (v * kLanes + i) * sizeof(half), sizeof(half));
      (*out)[i] = to_float(half);
    }
  }
}

// A byte of each row of vector v, that with the number `byte` of a field of several.
template <int kWidth>
SPECDEC_BODY void read_bytes(const Unit* field, int byte, int v, typename OfRows<kWidth>::Ints* out) {
  typename OfRows<kWidth>::Halves halves;
  std::memcpy(&halves, field[byte / 2].bytes + v * sizeof(halves), sizeof(halves));
  *out = __builtin_convertvector(halves >> byte % 2 * 8 & 255, typename OfRows<kWidth>::Ints);
}

// `count` units with two integers of 4 bits in a byte: the lower halves, less `centre`, and `after` them the upper
// ones.
template <int kWidth>
SPECDEC_BODY void expand_nibbles(const Unit* units, int count, int16_t centre, int after, Expanded<kWidth>* out,
                                 int first) {
  for (int i = 0; i < count; ++i) {
    for (int v = 0; v < OfRows<kWidth>::kVectors; ++v) {
      typename OfRows<kWidth>::Pairs both;
      widen_bytes<kWidth, uint8_t>(units[i], v, &both);
      out->integers[first + i][v] = (both & 15) - centre;
      out->integers[first + after + i][v] = (both >> 4) - centre;
    }
  }
}

// Each format has the inputs of a block, and of these, how many have a scale of their own. `expand` writes the weights
// of a block whose inputs begin at `first`.
struct Q4_0 {
  static constexpr int kInputs = 32, kPart = 32;
  static constexpr bool kLeast = false;
  Unit scale, quants[8];  // input i in the lower half of byte i, input 16 + i in the upper one

  template <int kWidth>
  SPECDEC_BODY void expand(const Q4_0& block, int64_t first, Expanded<kWidth>* out) {
    expand_nibbles(block.quants, 8, 8, 8, out, first / 2);
    for (int v = 0; v < out->kVectors; ++v) read_halves<kWidth>(block.scale, v, &out->scales[first / kPart][v]);
  }
};

struct Q4_1 {
  static constexpr int kInputs = 32, kPart = 32;
  static constexpr bool kLeast = true;
  Unit scale, least, quants[8];

  template <int kWidth>
  SPECDEC_BODY void expand(const Q4_1& block, int64_t first, Expanded<kWidth>* out) {
    expand_nibbles(block.quants, 8, 0, 8, out, first / 2);
    for (int v = 0; v < out->kVectors; ++v) {
      read_halves<kWidth>(block.scale, v, &out->scales[first / kPart][v]);
      read_halves<kWidth>(block.least, v, &out->leasts[first / kPart][v]);
    }
  }
};

struct Q8_0 {
  static constexpr int kInputs = 32, kPart = 32;
  static constexpr bool kLeast = false;
  Unit scale, quants[16];

  template <int kWidth>
  SPECDEC_BODY void expand(const Q8_0& block, int64_t first, Expanded<kWidth>* out) {
    for (int v = 0; v < out->kVectors; ++v) {
      for (int i = 0; i < 16; ++i) widen_bytes<kWidth, int8_t>(block.quants[i], v, &out->integers[first / 2 + i][v]);
      read_halves<kWidth>(block.scale, v, &out->scales[first / kPart][v]);
    }
  }
};

struct Q4_K {
  static constexpr int kInputs = 256, kPart = 32;
  static constexpr bool kLeast = true;
  Unit scale, least;
  Unit factors[6];  // 12 bytes: of eight parts 6 bits of scale and 6 of least
  Unit quants[64];  // four times 32 bytes, whose lower halves are a part, and their upper ones the next

  template <int kWidth>
  SPECDEC_BODY void expand(const Q4_K& block, int64_t, Expanded<kWidth>* out) {
    using Floats = typename OfRows<kWidth>::Floats;
    for (int i = 0; i < 4; ++i) expand_nibbles(block.quants + 16 * i, 16, 0, 16, out, 32 * i);
    for (int v = 0; v < out->kVectors; ++v) {
      Floats scale, least;
      read_halves<kWidth>(block.scale, v, &scale);
      read_halves<kWidth>(block.least, v, &least);
      // The first four factors of scale and of least are 6 bits of bytes 0 to 7; of the others these have the upper 2
      // bits, and bytes 8 to 11 the lower 4.
      for (int i = 0; i < 4; ++i) {
        typename OfRows<kWidth>::Ints first, second, both;
        read_bytes<kWidth>(block.factors, i, v, &first);
        read_bytes<kWidth>(block.factors, 4 + i, v, &second);
        read_bytes<kWidth>(block.factors, 8 + i, v, &both);
        out->scales[i][v] = scale * __builtin_convertvector(first & 63, Floats);
        out->leasts[i][v] = least * __builtin_convertvector(-(second & 63), Floats);
        out->scales[4 + i][v] = scale * __builtin_convertvector((both & 15) | first >> 6 << 4, Floats);
        out->leasts[4 + i][v] = least * __builtin_convertvector(-(both >> 4 | second >> 6 << 4), Floats);
      }
    }
  }
};

struct Q6_K {
  static constexpr int kInputs = 256, kPart = 16;
  static constexpr bool kLeast = false;
  Unit lower[64];   // two times 64 bytes: 128 inputs' lower 4 bits, the lower halves before the upper ones
  Unit upper[32];   // two times 32 bytes: their upper 2 bits, 32 inputs' after another's
  Unit factors[8];  // of each part's scale
  Unit scale;

  template <int kWidth>
  SPECDEC_BODY void expand(const Q6_K& block, int64_t, Expanded<kWidth>* out) {
    for (int half = 0; half < 2; ++half) {
      expand_nibbles(block.lower + 32 * half, 32, 32, 32, out, 64 * half);
      for (int i = 0; i < 16; ++i) {
        for (int v = 0; v < out->kVectors; ++v) {
          typename OfRows<kWidth>::Pairs upper;
          widen_bytes<kWidth, uint8_t>(block.upper[16 * half + i], v, &upper);
          for (int quarter = 0; quarter < 4; ++quarter)
            out->integers[64 * half + 16 * quarter + i][v] += (upper >> 2 * quarter & 3) << 4;
        }
      }
    }
    for (int v = 0; v < out->kVectors; ++v) {
      typename OfRows<kWidth>::Floats scale;
      read_halves<kWidth>(block.scale, v, &scale);
      for (int i = 0; i < 16; ++i) {
        typename OfRows<kWidth>::Ints factor;
        read_bytes<kWidth>(block.factors, i, v, &factor);
        out->scales[i][v] = scale * __builtin_convertvector(factor << 24 >> 24, typename OfRows<kWidth>::Floats);
      }
    }
  }
};

}  // namespace specdec::cpu
