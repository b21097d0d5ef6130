// Vectors of kWidth floats, of one width for each instruction set, what several kernels do with them, and the choice of
// a kernel.
#pragma once

#include <cstring>
#include <type_traits>
#include <utility>

#include "../../common/floats.h"
#include "../../common/instruction_set.h"

namespace specdec::cpu {

template <int kWidth>
struct Lanes {
  typedef float Vector __attribute__((vector_size(kWidth * sizeof(float))));
  typedef uint32_t Bits __attribute__((vector_size(kWidth * sizeof(uint32_t))));
  typedef int32_t Ints __attribute__((vector_size(kWidth * sizeof(int32_t))));
};

// The compiler takes these numbers from a register from here on, and not again from memory.
template <class Numbers>
SPECDEC_BODY void keep_in_register(Numbers* numbers) {
#if defined(__x86_64__)
  asm("" : "+v"(*numbers));
#elif defined(__aarch64__)
  asm("" : "+w"(*numbers));
#endif
}

// Asks for weights that are needed soon, once.
SPECDEC_BODY void read_ahead(const char* weights, int64_t bytes, bool to_second_cache) {
  for (int64_t line = 0; line < bytes; line += 64) {
    if (to_second_cache) {
      __builtin_prefetch(weights + line, 0, 2);
    } else {
      __builtin_prefetch(weights + line, 0, 0);
    }
  }
}

// Of two vectors whose lanes are groups of kGroup, the lower (kUpper = 0) or the upper half of every group.
template <int kWidth, int kGroup, int kUpper, class Vector, size_t... kLane>
SPECDEC_BODY void halves(const Vector& a, const Vector& b, Vector* out, std::index_sequence<kLane...>) {
  constexpr int kHalf = kGroup / 2;
  *out = __builtin_shufflevector(a, b, (kLane / kHalf * kGroup + kUpper * kHalf + kLane % kHalf)...);
}

// Adds up the lanes of each of kWidth vectors, halves first. The sum of vector i becomes lane i of the first.
template <int kWidth, int kGroup = kWidth, class Vector>
SPECDEC_BODY void add_lanes(Vector* vectors) {
  if constexpr (kGroup > 1) {
#pragma GCC unroll 8
    for (int i = 0; i < kGroup / 2; ++i) {
      Vector lower, upper;
      const auto lanes = std::make_index_sequence<kWidth>();
      halves<kWidth, kGroup, 0>(vectors[2 * i], vectors[2 * i + 1], &lower, lanes);
      halves<kWidth, kGroup, 1>(vectors[2 * i], vectors[2 * i + 1], &upper, lanes);
      vectors[i] = lower + upper;
    }
    add_lanes<kWidth, kGroup / 2>(vectors);
  }
}

// kWidth narrow numbers as ones of 32 bits. GCC converts vectors piece by piece, so there the instruction is named.
template <int kWidth, class Narrow, class Vector>
SPECDEC_BODY void convert_lanes(const Narrow* numbers, Vector* out) {
  typedef Narrow Stored __attribute__((vector_size(kWidth * sizeof(Narrow))));
#if defined(__x86_64__) && !defined(__clang__)
  struct Memory {
    Narrow numbers[kWidth];
  };
  if constexpr (kWidth > 4) {
    const Memory& memory = *reinterpret_cast<const Memory*>(numbers);
    if constexpr (std::is_same_v<Narrow, int8_t>) asm("vpmovsxbd %1, %0" : "=v"(*out) : "m"(memory));
    if constexpr (std::is_same_v<Narrow, uint8_t>) asm("vpmovzxbd %1, %0" : "=v"(*out) : "m"(memory));
    if constexpr (std::is_same_v<Narrow, uint16_t>) asm("vpmovzxwd %1, %0" : "=v"(*out) : "m"(memory));
    if constexpr (std::is_same_v<Narrow, _Float16>) asm("vcvtph2ps %1, %0" : "=v"(*out) : "m"(memory));
    return;
  }
#endif
  Stored stored;
  std::memcpy(&stored, numbers, sizeof(stored));
  *out = __builtin_convertvector(stored, Vector);
}

// kWidth stored numbers, as floats.
template <int kWidth, class Vector>
SPECDEC_BODY void widen(const float* numbers, Vector* out) {
  std::memcpy(out, numbers, sizeof(Vector));
}

template <int kWidth, class Vector>
SPECDEC_BODY void widen(const BFloat16* numbers, Vector* out) {
  typename Lanes<kWidth>::Bits bits;
  convert_lanes<kWidth>(&numbers->bits, &bits);
  bits <<= 16;
  std::memcpy(out, &bits, sizeof(Vector));
}

template <int kWidth, class Vector>
SPECDEC_BODY void widen(const Float16* numbers, Vector* out) {
  if constexpr (kWidth > 4) {
    convert_lanes<kWidth>(reinterpret_cast<const _Float16*>(numbers), out);
  } else {  // without F16C
    float floats[kWidth];
    for (int i = 0; i < kWidth; ++i) floats[i] = to_float(numbers[i]);
    std::memcpy(out, floats, sizeof(Vector));
  }
}

// The same of fewer than kWidth numbers; the other lanes are 0.
template <int kWidth, class Stored, class Vector>
SPECDEC_BODY void widen_some(const Stored* numbers, int64_t n, Vector* out) {
  Stored padded[kWidth] = {};
  std::memcpy(padded, numbers, n * sizeof(Stored));
  widen<kWidth>(padded, out);
}

// A kernel for each instruction set, by its number of float lanes: SPECDEC_BODY functions are compiled in that of their
// caller.
#if defined(__x86_64__)
#define SPECDEC_BY_INSTRUCTION_SET(body, Params)                                                                \
  void body##_baseline(const Params& params, int64_t begin, int64_t end) { body<4>(params, begin, end); }       \
  __attribute__((target("avx2,fma,f16c"))) void body##_avx2(const Params& params, int64_t begin, int64_t end) { \
    body<8>(params, begin, end);                                                                                \
  }                                                                                                             \
  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"))) void body##_avx512(               \
      const Params& params, int64_t begin, int64_t end) {                                                       \
    body<16>(params, begin, end);                                                                               \
  }                                                                                                             \
  auto body##_in_use() {                                                                                        \
    const InstructionSet set = instruction_set();                                                               \
    return set == InstructionSet::kAvx512 ? body##_avx512                                                       \
           : set == InstructionSet::kAvx2 ? body##_avx2                                                         \
                                          : body##_baseline;                                                    \
  }
#else
#define SPECDEC_BY_INSTRUCTION_SET(body, Params)                                                          \
  void body##_baseline(const Params& params, int64_t begin, int64_t end) { body<4>(params, begin, end); } \
  auto body##_in_use() { return body##_baseline; }
#endif

// The same of range<kWidth, Kind>, as a function for each kind, since compilers keep fewer sums in registers in a
// larger one.
#define SPECDEC_RANGE_OF(name, Kind, Params)                                 \
  template <int kWidth>                                                      \
  SPECDEC_BODY void name(const Params& params, int64_t begin, int64_t end) { \
    range<kWidth, Kind>(params, begin, end);                                 \
  }                                                                          \
  SPECDEC_BY_INSTRUCTION_SET(name, Params)

}  // namespace specdec::cpu
