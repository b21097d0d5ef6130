// The host's implementation of csrc/cuda/simt.h: a thread is a fiber, which meets the others at barriers. Fibers take
// turns, also at accesses to shared memory, in a random order that a seed determines. Every such access is checked: it
// must lie in a block's memory, the memory must have been written before, and a barrier must separate it from what
// other threads do there.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "../../csrc/core/hd.h"

namespace specdec::simt {

// Counts of the barriers that a thread has passed. A cluster's barrier has two halves: what a thread does between them
// is ordered by the next one only. Barriers at which threads only arrive order nothing, and are not counted.
struct Passed {
  uint32_t warp = 0, block = 0, arrived = 0, cluster = 0;
};

struct Meeting;
struct Block;

struct Fiber {
  Block* block;
  int thread;
  Passed passed = {};
  std::map<const uint64_t*, int> waited = {};  // how many copies of each arrival
  int meetings = 0;                            // barriers of the cluster that the thread has left
  bool arrived = false, releases = false;      // at one that it has not left; as one of those that order
  void* stack_pointer = nullptr;
  void* stack = nullptr;
  bool done = false;
};

enum class Access { kRead, kWrite, kAdd, kCopy };

// The fiber that runs.
extern thread_local Fiber* current;

int thread();
int num_threads();
int block_in_cluster();
int blocks_in_cluster();
int64_t cluster();
void sync_warp();
void sync_block();
void arrive_cluster();
void arrive_only();
void wait_cluster();
void sync_cluster();
char* shared_memory();
char* in_block(char* place, int block);
void access(const void* place, int size, Access kind);  // another fiber may run first
// The same if it is shared memory or scratch.
void look_at(const void* place, int size, Access kind = Access::kRead);
// A copy arrives at some time before a wait for it ends. Until then its bytes may have any value.
void init(uint64_t* arrival);
void copy_bulk(void* to, const void* from, int bytes, uint64_t* arrival);
void wait(uint64_t* arrival, int round);
// What threads have done.
struct Counts {
  int64_t copies, copied;                    // bulk copies begun, and their bytes
  int64_t loads;                             // of 16 bytes of logits
  int64_t from_device, from_shared;          // bytes of these
  int64_t additions, most;                   // atomic additions, and how many of a run were to one word
  int64_t block_barriers, cluster_barriers;  // that the first thread of the last cluster passed
};
Counts take_counts();  // since the last call
// Every thread of the warp contributes 16 bytes. Returns all [32][16], which stay valid until the next exchange but
// one.
const char* exchange(const void* bytes, int size);

// Runs body() in every thread of a grid, in an order that `seed` determines. `scratch` is device memory that is checked
// like shared memory, except against other clusters and launches. Returns the first fault, or "".
std::string run(int64_t clusters, int blocks, int threads, int shared, uint64_t seed, const std::function<void()>& body,
                char* scratch = nullptr, int64_t scratch_size = 0);

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

// Pairs lanes at half the distance each time, as on a GPU.
template <class T, class Combine>
T reduce(T value, Combine combine) {
  const char* all = exchange(&value, sizeof(T));
  T of[32];
  for (int lane = 0; lane < 32; ++lane) memcpy(&of[lane], all + 16 * lane, sizeof(T));
  for (int distance = 16; distance > 0; distance /= 2) {
    T next[32];
    for (int lane = 0; lane < 32; ++lane) next[lane] = combine(of[lane], of[lane ^ distance]);
    memcpy(of, next, sizeof(of));
  }
  return of[thread() % 32];
}

template <class T>
T* in_block(T* place, int block) {
  return reinterpret_cast<T*>(in_block(reinterpret_cast<char*>(place), block));
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

inline void prefetch(const void*) {}
inline void prefetch(const char*, int) {}
inline void start_next_launch() {}  // launches do not overlap here
inline void wait_for_launch_before() {}

inline char* opaque(char* place) { return place; }

inline float half_to_float(uint32_t bits) {
  const uint32_t magnitude = bits & 0x7fffu;
  const uint32_t finite = as_bits(as_float(magnitude << 13) * 0x1p112f);
  return as_float((magnitude >= 0x7c00u ? (magnitude << 13) | 0x7f800000u : finite) | (bits & 0x8000u) << 16);
}

inline uint32_t float_to_half(float value) {
  const uint32_t bits = as_bits(value), magnitude = bits & 0x7fffffffu, sign = bits >> 16 & 0x8000u;
  if (magnitude > 0x7f800000u) return 0x7fffu;
  if (magnitude >= 0x477ff000u) return sign | 0x7c00u;
  if (magnitude < 0x38800000u) return sign | static_cast<uint32_t>(nearbyintf(as_float(magnitude) * 0x1p24f));
  return sign | (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
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

inline uint32_t count_bits(uint32_t bits) { return static_cast<uint32_t>(__builtin_popcount(bits)); }

inline float exp2_of(float x) { return x < -126.0f ? 0.0f : exp2f(x); }

inline float inverse_sqrt(float x) { return 1.0f / sqrtf(x); }

inline uint32_t add(uint32_t* place, uint32_t value) {
  access(place, sizeof(value), Access::kAdd);
  const uint32_t before = *place;
  *place += value;
  return before;
}

}  // namespace specdec::simt
