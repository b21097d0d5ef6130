// How a thread reads and writes a model's numbers. It reads the bits of all that it needs, and widens them then, so
// that it waits for memory once.
#pragma once

#include "recurrent.h"
#include "simt.h"

namespace specdec::cuda {

using simt::kWarp;

// The bits of the numbers at `first` and every `step` further, of which `count` exist; of others 0.
template <int kCount>
SPECDEC_DEVICE void read_bits(const Numbers& from, int64_t first, int step, int count, uint32_t (&bits)[kCount]) {
  if (from.dtype == Dtype::kFloat32) {
    const uint32_t* place = reinterpret_cast<const uint32_t*>(from.data) + first;
#pragma unroll
    for (int i = 0; i < kCount; ++i) bits[i] = i < count ? place[i * step] : 0;
  } else {
    const uint16_t* place = reinterpret_cast<const uint16_t*>(from.data) + first;
#pragma unroll
    for (int i = 0; i < kCount; ++i) bits[i] = i < count ? place[i * step] : 0;
  }
}

template <int kCount>
SPECDEC_DEVICE void widen(Dtype dtype, const uint32_t (&bits)[kCount], float (&numbers)[kCount]) {
  if (dtype == Dtype::kFloat16) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) numbers[i] = simt::half_to_float(bits[i]);
  } else {
    const int shift = dtype == Dtype::kBFloat16 ? 16 : 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) numbers[i] = as_float(bits[i] << shift);
  }
}

SPECDEC_DEVICE uint32_t read_bits(const Numbers& from, int64_t at, bool there = true) {
  uint32_t bits[1];
  read_bits(from, at, 1, there, bits);
  return bits[0];
}

SPECDEC_DEVICE float widen(Dtype dtype, uint32_t bits) {
  const uint32_t one[1] = {bits};
  float number[1];
  widen(dtype, one, number);
  return number[0];
}

SPECDEC_DEVICE float number_at(const Numbers& from, int64_t at) { return widen(from.dtype, read_bits(from, at)); }

SPECDEC_DEVICE void write_bits(const Numbers& to, int64_t at, uint32_t bits) {
  if (to.dtype == Dtype::kFloat32) {
    reinterpret_cast<uint32_t*>(to.data)[at] = bits;
  } else {
    reinterpret_cast<uint16_t*>(to.data)[at] = static_cast<uint16_t>(bits);
  }
}

// The bits of the nearest number, the even one of two.
SPECDEC_DEVICE uint32_t narrow(Dtype dtype, float number) {
  const uint32_t bits = as_bits(number);
  if (dtype == Dtype::kFloat32) return bits;
  if (dtype == Dtype::kFloat16) return simt::float_to_half(number);
  return number != number ? 0x7fffu : (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
}

// Four neighbouring floats of a state, of which `count` exist. `aligned`: they are a whole vector, if they exist.
SPECDEC_DEVICE void read4(const float* from, int count, bool aligned, float (&to)[4]) {
  simt::Bytes16 bytes = {};
  if (aligned) {
    if (count > 0) bytes = simt::load16(from);
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] = as_float(bytes.word[i]);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] = i < count ? from[i] : 0.0f;
  }
}

SPECDEC_DEVICE void write4(float* to, int count, bool aligned, const float (&from)[4]) {
  if (aligned) {
    if (count > 0) simt::store16(to, {{as_bits(from[0]), as_bits(from[1]), as_bits(from[2]), as_bits(from[3])}});
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (i < count) to[i] = from[i];
    }
  }
}

// Whether rows of so many floats are whole vectors.
SPECDEC_DEVICE bool aligned(const float* state, int64_t floats) {
  return floats % 4 == 0 && reinterpret_cast<uintptr_t>(state) % sizeof(simt::Bytes16) == 0;
}

// Sums each of kCount numbers over the lanes whose indices differ only in bits from kDistance down to kLast. At each
// distance a lane gives away half of the numbers, the upper ones if its bit is 0, until it has one, x[0]: its number is
// what its bits spell, the first being the highest. Any lanes add in the same order.
template <int kCount, int kDistance, int kLast, int kSize>
SPECDEC_DEVICE void sum_over_lanes(float (&x)[kSize]) {
  const int lane = simt::thread() % kWarp;
  if constexpr (kCount == 1) {
    x[0] += simt::shuffle(x[0], lane ^ kDistance);
  } else {
    const bool upper = (lane & kDistance) != 0;
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      const float low = x[i], high = x[i + kCount / 2];
      x[i] = (upper ? high : low) + simt::shuffle(upper ? low : high, lane ^ kDistance);
    }
  }
  if constexpr (kDistance > kLast) sum_over_lanes<(kCount > 1 ? kCount / 2 : 1), kDistance / 2, kLast>(x);
}

}  // namespace specdec::cuda
