// Random words for many consecutive indices. Philox multiplies 32-bit numbers to 64 bits, for which x86 has vector
// instructions that compilers do not find, so these are named here.
#pragma once

#if defined(__x86_64__)
#pragma GCC diagnostic push  // GCC 12 warns of its header's operands that are undefined on purpose
#pragma GCC diagnostic ignored "-Wuninitialized"
#if !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif
#include <immintrin.h>
#pragma GCC diagnostic pop
#endif

#include "load.h"

namespace specdec::cpu {

// Writes the words of the indices first, ..., first + n - 1; both are multiples of kLanes.
using PhiloxWords = void (*)(int64_t first, int64_t n, Noise noise, Stream stream, uint32_t* words);

#if defined(__x86_64__)
// philox of core/random.h in lanes of 64 bits. Only their low halves count: a product's high half is shifted down when
// it is used, and multiplications ignore what is above. Lanes are in the order in which unpacking leaves the four words
// of a call, and the calls, next to each other.
#define SPECDEC_PHILOX_WORDS(attributes, Vector, prefix)                                                       \
  attributes __attribute__((noinline)) void philox_words(int64_t first, int64_t n, Noise noise, Stream stream, \
                                                         uint32_t* words) {                                    \
    typedef uint64_t Lanes __attribute__((vector_size(sizeof(Vector))));                                       \
    constexpr int64_t kCalls = sizeof(Vector) / sizeof(uint64_t);                                              \
    Lanes order;                                                                                               \
    for (int64_t lane = 0; lane < kCalls; ++lane) order[lane] = lane / 2 + lane % 2 * (kCalls / 2);            \
    const Lanes zero = {}, multiplier0 = zero + kPhiloxMultiplier0, multiplier1 = zero + kPhiloxMultiplier1;   \
    for (int64_t i = 0; i < n; i += 4 * kCalls) {                                                              \
      uint32_t k0 = static_cast<uint32_t>(noise.seed), k1 = static_cast<uint32_t>(noise.seed >> 32);           \
      Lanes c0 = order + static_cast<uint64_t>((first + i) / 4), c1 = zero + uint64_t{noise.position};         \
      Lanes c2 = zero + uint64_t{noise.offset}, c3 = zero + uint64_t{stream};                                  \
      for (int round = 0; round < 10; ++round) {                                                               \
        const Lanes product0 = (Lanes)prefix##_mul_epu32((Vector)c0, (Vector)multiplier0);                     \
        const Lanes product1 = (Lanes)prefix##_mul_epu32((Vector)c2, (Vector)multiplier1);                     \
        c0 = (product1 >> 32) ^ c1 ^ uint64_t{k0};                                                             \
        c2 = (product0 >> 32) ^ c3 ^ uint64_t{k1};                                                             \
        c1 = product1, c3 = product0;                                                                          \
        k0 += kPhiloxKey0, k1 += kPhiloxKey1;                                                                  \
      }                                                                                                        \
      const Lanes low = (c0 & 0xffffffffu) | (c1 << 32), high = (c2 & 0xffffffffu) | (c3 << 32);               \
      const Vector halves[2] = {prefix##_unpacklo_epi64((Vector)low, (Vector)high),                            \
                                prefix##_unpackhi_epi64((Vector)low, (Vector)high)};                           \
      std::memcpy(words + i, halves, sizeof(halves));                                                          \
    }                                                                                                          \
  }
#else
#define SPECDEC_PHILOX_WORDS(attributes, Vector, prefix)                                                       \
  attributes __attribute__((noinline)) void philox_words(int64_t first, int64_t n, Noise noise, Stream stream, \
                                                         uint32_t* words) {                                    \
    for (int64_t i = 0; i < n; i += 4) {                                                                       \
      const Words of_call =                                                                                    \
          philox(noise.seed, static_cast<uint32_t>((first + i) / 4), noise.position, noise.offset, stream);    \
      for (int word = 0; word < 4; ++word) words[i + word] = of_call.word[word];                               \
    }                                                                                                          \
  }
#endif

// The same for the indices ids[0], ..., ids[n - 1], in ascending order. Others of a group of indices are computed too,
// in the time that one alone would take.
SPECDEC_BODY void words_of_ids(PhiloxWords philox_words, const int64_t* ids, int64_t n, Noise noise, Stream stream,
                               uint32_t* words) {
  constexpr int64_t kGroup = 4 * kLanes;
  alignas(64) uint32_t of_group[kGroup];
  int64_t group = -1;
  for (int64_t i = 0; i < n; ++i) {
    if (ids[i] / kGroup != group) {
      group = ids[i] / kGroup;
      philox_words(group * kGroup, kGroup, noise, stream, of_group);
    }
    words[i] = of_group[ids[i] % kGroup];
  }
}

}  // namespace specdec::cpu
