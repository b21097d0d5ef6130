// Functions of core/ compile for host and GPU. They use no torch, no CUDA runtime, and allocate nothing.
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

// a * b, rounded. Compilers contract a product and a sum to an operation that rounds once, which GPUs and some CPUs
// have; this product is such an operation already.
SPECDEC_HD float rounded_product(float a, float b) { return fmaf(a, b, 0.0f); }

}  // namespace specdec
