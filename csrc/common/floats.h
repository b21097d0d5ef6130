// Numbers of 16 bits as float32. Inlined, so compiled for the caller's instruction set.
#pragma once

#include "../core/hd.h"

namespace specdec::cpu {

#define SPECDEC_BODY static inline __attribute__((always_inline))

SPECDEC_BODY float to_float(float value) { return value; }

struct BFloat16 {
  uint16_t bits;
};
SPECDEC_BODY float to_float(BFloat16 value) { return as_float(uint32_t{value.bits} << 16); }

struct Float16 {
  uint16_t bits;
};
SPECDEC_BODY float to_float(Float16 value) {
  // The exponent is re-biased by a multiplication, which also normalises subnormal numbers.
  const uint32_t magnitude = value.bits & 0x7fffu;
  const uint32_t finite = as_bits(as_float(magnitude << 13) * 0x1p112f);
  const uint32_t special = (magnitude << 13) | 0x7f800000u;
  return as_float((magnitude >= 0x7c00u ? special : finite) | (uint32_t{value.bits} & 0x8000u) << 16);
}

}  // namespace specdec::cpu
