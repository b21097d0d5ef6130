// Functions of core/ compile for the host and for a GPU. No torch, no CUDA runtime, no allocation.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define SPECDEC_HD __host__ __device__ __forceinline__
#else
// Always inlined, so that a caller compiled for AVX2 or AVX-512 gets this code in its own instruction set.
#define SPECDEC_HD inline __attribute__((always_inline))
#endif

namespace specdec {

SPECDEC_HD float as_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

SPECDEC_HD uint32_t as_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

}  // namespace specdec
