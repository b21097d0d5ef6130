// The host's implementation of csrc/common/simt.h: a thread is a fiber, which meets the others of its block at
// barriers. Fibers take turns, also at accesses to memory, in a random order that a seed determines. Every access to
// shared memory and to the memory between launches is checked: it must lie there, what it reads must have been written
// before, and a barrier must separate it from what other threads of the block do there. No block may read what another
// one of the same launch writes, nor write there.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "../../csrc/core/hd.h"

namespace specdec::simt {

// Counts of the barriers that a thread has passed.
struct Passed {
  uint32_t warp = 0, block = 0;
};

struct Fiber {
  int thread;
  Passed passed = {};
  void* stack_pointer = nullptr;
  void* stack = nullptr;
  bool done = false;
};

enum class Access { kRead, kWrite, kAdd };

// The fiber that runs.
extern thread_local Fiber* current;

int thread();
int num_threads();
int block_x();
int block_y();
int block_z();
int blocks_x();
void sync_warp();
void sync_block();
char* shared_memory();
void access(const void* place, int size, Access kind);  // another fiber may run first
void count_load();
// What threads have done.
struct Counts {
  int64_t loads;            // of 16 bytes of logits or weights
  int64_t additions, most;  // atomic additions, and how many of a run were to one word
  int64_t launches, blocks;
};
Counts take_counts();  // since the last call
// Every thread of the warp contributes 16 bytes. Returns all [32][16], which stay valid until the next exchange but
// one.
const char* exchange(const void* bytes, int size);

// The memory between launches, which all launches until the next call see; nothing in it has been written.
void use_scratch(char* memory, int64_t size);

struct GridSize {
  int64_t x, y, z;
};

// Runs body() in every thread of a grid, in an order that `seed` determines. Returns the first fault, or "".
std::string run(GridSize grid, int threads, int64_t shared, uint64_t seed, const std::function<void()>& body);

template <class T>
T shuffle(T value, int lane) {
  T result;
  memcpy(&result, exchange(&value, sizeof(T)) + 16 * lane, sizeof(T));
  return result;
}

inline uint32_t ballot(bool value) {
  const char* all = exchange(&value, sizeof(value));
  uint32_t bits = 0;
  for (int lane = 0; lane < 32; ++lane) bits |= uint32_t{all[16 * lane] != 0} << lane;
  return bits;
}

// Pairs lanes at `first`, then at twice that distance each time, as on a GPU.
template <int first = 1, int last = 16, class T, class Combine>
T reduce(T value, Combine combine) {
  const char* all = exchange(&value, sizeof(T));
  T of[32];
  for (int lane = 0; lane < 32; ++lane) memcpy(&of[lane], all + 16 * lane, sizeof(T));
  for (int distance = first; distance <= last; distance *= 2) {
    T next[32];
    for (int lane = 0; lane < 32; ++lane) next[lane] = combine(of[lane], of[lane ^ distance]);
    memcpy(of, next, sizeof(of));
  }
  return of[thread() % 32];
}

inline uint32_t total(uint32_t value) {
  return reduce(value, [](uint32_t a, uint32_t b) { return a + b; });
}

inline uint32_t largest(uint32_t value) {
  return reduce(value, [](uint32_t a, uint32_t b) { return a > b ? a : b; });
}

template <class T>
T read(const T* place) {
  access(place, sizeof(T), Access::kRead);
  return *place;
}

template <class T>
void write(T* place, T value) {
  access(place, sizeof(T), Access::kWrite);
  *place = value;
}

template <class T>
T fresh(const T* place) {
  return read(place);
}

inline void start_next_launch() {}  // launches do not overlap here
inline void wait_for_launch_before() {}

inline float half_to_float(uint32_t bits) {
  const uint32_t magnitude = bits & 0x7fffu;
  const uint32_t finite = as_bits(as_float(magnitude << 13) * 0x1p112f);
  return as_float((magnitude >= 0x7c00u ? (magnitude << 13) | 0x7f800000u : finite) | (bits & 0x8000u) << 16);
}

inline uint16_t nearest_bfloat16(float value) {
  const uint32_t bits = as_bits(value);
  return value != value ? 0x7fffu : (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
}

inline uint16_t nearest_float16(float value) {
  const uint32_t sign = as_bits(value) >> 16 & 0x8000u, bits = as_bits(value) & 0x7fffffffu;
  const float magnitude = as_float(bits);
  if (value != value) return 0x7fffu;
  if (magnitude >= 65520.0f) return sign | 0x7c00u;
  if (magnitude < 0x1p-14f) return sign | static_cast<uint32_t>(nearbyintf(magnitude * 0x1p24f));  // these are even
  return sign | (bits - (112u << 23) + 0xfffu + (bits >> 13 & 1u)) >> 13;
}

inline uint32_t nearest_bfloat16(float first, float second) {
  return nearest_bfloat16(first) | uint32_t{nearest_bfloat16(second)} << 16;
}
inline uint32_t nearest_float16(float first, float second) {
  return nearest_float16(first) | uint32_t{nearest_float16(second)} << 16;
}

inline uint32_t centred_bfloat16(uint32_t integers) {
  const auto of = [](uint32_t u) { return nearest_bfloat16((static_cast<float>(u) - 128.0f) / 64.0f); };
  return of(integers & 0xffffu) | uint32_t{of(integers >> 16)} << 16;
}
inline uint32_t centred_float16(uint32_t integers) {
  const auto of = [](uint32_t u) { return nearest_float16((static_cast<float>(u) - 128.0f) / 512.0f); };
  return of(integers & 0xffffu) | uint32_t{of(integers >> 16)} << 16;
}

template <int kFirst>
uint32_t spread(uint32_t bytes) {
  return (bytes >> 8 * kFirst & 0xffu) | (bytes >> 8 * (kFirst + 1) & 0xffu) << 16;
}

// As a GPU's fragments lie: element k of row r of `a` in lane 4 (r % 8) + k % 8 / 2, of column c of `b` in lane 4 c +
// k % 8 / 2. Products are exact, and rounded once with the sum.
template <class ToFloat>
void multiply_add(float (&sum)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], const ToFloat& to_float) {
  uint32_t all_a[32][4];
  memcpy(all_a, exchange(a, sizeof(a)), sizeof(all_a));
  const char* all_b = exchange(b, sizeof(b));
  for (int e = 0; e < 4; ++e) {
    const int row = thread() % 32 / 4 + e / 2 * 8, column = thread() % 4 * 2 + e % 2;
    double total = sum[e];
    for (int k = 0; k < 16; ++k) {
      uint32_t of_b;
      memcpy(&of_b, all_b + 16 * (4 * column + k % 8 / 2) + 4 * (k / 8), sizeof(of_b));
      const uint32_t of_a = all_a[4 * (row % 8) + k % 8 / 2][row / 8 + k / 8 * 2];
      total += double{to_float(of_a >> 16 * (k % 2) & 0xffffu)} * to_float(of_b >> 16 * (k % 2) & 0xffffu);
    }
    sum[e] = static_cast<float>(total);
  }
}
inline void multiply_add_bfloat16(float (&sum)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  multiply_add(sum, a, b, [](uint32_t bits) { return as_float(bits << 16); });
}
inline void multiply_add_float16(float (&sum)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  multiply_add(sum, a, b, [](uint32_t bits) { return half_to_float(bits); });
}

inline float larger(float a, float b) { return a != a ? a : b != b ? b : a > b ? a : b; }

template <class ToFloat>
uint32_t larger_halves(uint32_t a, uint32_t b, const ToFloat& to_float) {
  uint32_t result = 0;
  for (int shift : {0, 16}) {
    const uint32_t one = a >> shift & 0xffffu, other = b >> shift & 0xffffu;
    const float x = to_float(one), y = to_float(other);
    result |= (x != x || y != y ? 0x7fffu : x > y ? one : other) << shift;
  }
  return result;
}
inline uint32_t larger_bfloat16(uint32_t a, uint32_t b) {
  return larger_halves(a, b, [](uint32_t bits) { return as_float(bits << 16); });
}
inline uint32_t larger_float16(uint32_t a, uint32_t b) {
  return larger_halves(a, b, [](uint32_t bits) { return half_to_float(bits); });
}

inline int count_bits(uint32_t bits) { return __builtin_popcount(bits); }
inline int lowest_bit(uint32_t bits) { return __builtin_ctz(bits); }

inline float exp2_of(float x) { return x < -126.0f ? 0.0f : exp2f(x); }

inline float inverse_root(float x) { return 1.0f / sqrtf(x); }

inline float quotient(float a, float b) { return a / b; }
inline float reciprocal(float x) { return 1.0f / x; }

inline uint32_t add(uint32_t* place, uint32_t value) {
  access(place, sizeof(value), Access::kAdd);
  const uint32_t before = *place;
  *place += value;
  return before;
}

}  // namespace specdec::simt
