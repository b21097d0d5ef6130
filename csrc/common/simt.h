// All that kernels use of the GPU, implemented twice: for a GPU by its instructions, and for a host by functions that
// run threads as fibers, so that tests execute unchanged kernel bodies (tests/simt/). Kernels use nothing else of the
// GPU, and this is the only file with inline PTX.
#pragma once

#include "../core/hd.h"

#if defined(__CUDACC__)
#include <cuda_runtime.h>

#define SPECDEC_DEVICE __device__ __forceinline__
// A kernel with one struct as its argument, for blocks of at most `threads` threads, of which a multiprocessor has room
// for `blocks`.
#define SPECDEC_KERNEL(name, threads, blocks, Params) \
  __global__ void __launch_bounds__(threads, blocks) name(const __grid_constant__ Params params)
#else
#include "../../tests/simt/machine.h"

#define SPECDEC_DEVICE inline
#define SPECDEC_KERNEL(name, threads, blocks, Params) inline void name(const Params& params)
#endif

namespace specdec::simt {

constexpr int kWarp = 32;

struct alignas(16) Bytes16 {
  uint32_t word[4];
};

#if defined(__CUDACC__)

// ---- Where a thread is: in its block, and its block in the grid

SPECDEC_DEVICE int thread() { return static_cast<int>(threadIdx.x); }
SPECDEC_DEVICE int num_threads() { return static_cast<int>(blockDim.x); }
SPECDEC_DEVICE int block_x() { return static_cast<int>(blockIdx.x); }
SPECDEC_DEVICE int block_y() { return static_cast<int>(blockIdx.y); }
SPECDEC_DEVICE int block_z() { return static_cast<int>(blockIdx.z); }
SPECDEC_DEVICE int blocks_x() { return static_cast<int>(gridDim.x); }

// ---- Barriers: after one, its threads see what all of them wrote before it

SPECDEC_DEVICE void sync_warp() { __syncwarp(); }
SPECDEC_DEVICE void sync_block() { __syncthreads(); }

// ---- Launches that overlap: the next one in the stream, if it is launched as a dependent one (launch.h)

// Lets the blocks of the next launch begin once every block of this one has called this.
SPECDEC_DEVICE void start_next_launch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Waits for the end of the launch before, and until what it wrote can be seen. By every thread, also by those that have
// nothing to do: only so does the end of this launch tell the next one that the launch before it has ended.
SPECDEC_DEVICE void wait_for_launch_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// ---- Operations of a warp, in which all its threads take part

template <class T>
SPECDEC_DEVICE T shuffle(T value, int lane) {
  return __shfl_sync(0xffffffffu, value, lane);
}

SPECDEC_DEVICE uint32_t ballot(bool value) { return __ballot_sync(0xffffffffu, value); }

// The sum and the largest of the values of all lanes.
SPECDEC_DEVICE uint32_t total(uint32_t value) { return __reduce_add_sync(0xffffffffu, value); }
SPECDEC_DEVICE uint32_t largest(uint32_t value) { return __reduce_max_sync(0xffffffffu, value); }

// Combines the values of lanes pairwise, first of those at distance `first`, then of twice that, up to `last`. Lanes
// whose indices differ in these bits only get the same result.
template <int first = 1, int last = kWarp / 2, class T, class Combine>
SPECDEC_DEVICE T reduce(T value, Combine combine) {
#pragma unroll
  for (int distance = first; distance <= last; distance *= 2) {
    value = combine(value, __shfl_xor_sync(0xffffffffu, value, distance));
  }
  return value;
}

// ---- Memory

SPECDEC_DEVICE char* shared_memory() {
  extern __shared__ __align__(128) char memory[];
  return memory;
}

// Of shared memory, and of device memory that this launch writes.
template <class T>
SPECDEC_DEVICE T read(const T* place) {
  return *place;
}

template <class T>
SPECDEC_DEVICE void write(T* place, T value) {
  *place = value;
}

// What an earlier launch, or an earlier phase of this block, wrote to device memory.
template <class T>
SPECDEC_DEVICE T fresh(const T* place) {
  T value;
  if constexpr (sizeof(T) == 16) {
    const uint4 bits = __ldcg(reinterpret_cast<const uint4*>(place));
    memcpy(&value, &bits, sizeof(T));
  } else if constexpr (sizeof(T) == 8) {
    const uint2 bits = __ldcg(reinterpret_cast<const uint2*>(place));
    memcpy(&value, &bits, sizeof(T));
  } else {
    const uint32_t bits = __ldcg(reinterpret_cast<const uint32_t*>(place));
    memcpy(&value, &bits, sizeof(T));
  }
  return value;
}

// Adds to shared memory, atomically; returns the old value. For integers only, so that the order of additions does not
// matter, and of 32 bits, since GPUs add 64 bits to shared memory in a loop.
SPECDEC_DEVICE uint32_t add(uint32_t* place, uint32_t value) { return atomicAdd(place, value); }

// 16 aligned bytes of logits, which no kernel of a step writes and which need not stay in a cache.
SPECDEC_DEVICE Bytes16 load16(const void* place) {
  Bytes16 bytes;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(bytes.word[0]), "=r"(bytes.word[1]), "=r"(bytes.word[2]), "=r"(bytes.word[3])
               : "l"(__cvta_generic_to_global(place)));
  return bytes;
}

// 16 aligned bytes of weights, whose row goes on behind them: the second half of their 128 bytes comes along.
SPECDEC_DEVICE Bytes16 stream16(const void* place) {
  Bytes16 bytes;
  asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(bytes.word[0]), "=r"(bytes.word[1]), "=r"(bytes.word[2]), "=r"(bytes.word[3])
               : "l"(__cvta_generic_to_global(place)));
  return bytes;
}

// 16 aligned bytes that other blocks read as well. Compilers keep the order of such loads, which saves registers.
SPECDEC_DEVICE Bytes16 cached16(const void* place) {
  Bytes16 bytes;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(bytes.word[0]), "=r"(bytes.word[1]), "=r"(bytes.word[2]), "=r"(bytes.word[3])
               : "l"(__cvta_generic_to_global(place)));
  return bytes;
}

// ---- Arithmetic

// 2^x, with a relative error of 2^-22; results below 2^-126 are 0.
SPECDEC_DEVICE float exp2_of(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// a / b for b between 2^-126 and 2^126, within 2 units in the last place.
SPECDEC_DEVICE float quotient(float a, float b) { return __fdividef(a, b); }

// 1 / x within a unit in the last place, for x between 2^-126 and 2^126; infinity for 0.
SPECDEC_DEVICE float reciprocal(float x) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// 1 / sqrt(x), with a relative error of 2^-22.
SPECDEC_DEVICE float inverse_root(float x) {
  float result;
  asm("rsqrt.approx.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// The larger one of two numbers; NaN if one of them is NaN.
SPECDEC_DEVICE float larger(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

// The same for each of the two numbers in a word.
SPECDEC_DEVICE uint32_t larger_bfloat16(uint32_t a, uint32_t b) {
  uint32_t result;
  asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}
SPECDEC_DEVICE uint32_t larger_float16(uint32_t a, uint32_t b) {
  uint32_t result;
  asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
  return result;
}

// How many bits are 1, and the index of the lowest of them, of which there must be one.
SPECDEC_DEVICE int count_bits(uint32_t bits) { return __popc(bits); }
SPECDEC_DEVICE int lowest_bit(uint32_t bits) { return __ffs(static_cast<int>(bits)) - 1; }

// The value of a float16, given by its 16 bits.
SPECDEC_DEVICE float half_to_float(uint32_t bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(static_cast<uint16_t>(bits)));
  return value;
}

// The nearest number of these formats, by its bits; of two, the even one.
SPECDEC_DEVICE uint16_t nearest_bfloat16(float value) {
  uint16_t bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}
SPECDEC_DEVICE uint16_t nearest_float16(float value) {
  uint16_t bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

// The same of two numbers, in a word.
SPECDEC_DEVICE uint32_t nearest_bfloat16(float first, float second) {
  uint32_t bits;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(second), "f"(first));
  return bits;
}
SPECDEC_DEVICE uint32_t nearest_float16(float first, float second) {
  uint32_t bits;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(second), "f"(first));
  return bits;
}

// (u - 128) / 64 as bfloat16, or (u - 128) / 512 as float16, of two integers u < 256 in the halves of a word. Their
// bits are those of u times the least number of the format, which is subnormal, so one multiplication and addition does
// it.
SPECDEC_DEVICE uint32_t centred_bfloat16(uint32_t integers) {
  uint32_t numbers;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(numbers) : "r"(integers), "r"(0x7f007f00u), "r"(0xc000c000u));
  return numbers;
}
SPECDEC_DEVICE uint32_t centred_float16(uint32_t integers) {
  uint32_t numbers;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(numbers) : "r"(integers), "r"(0x78007800u), "r"(0xb400b400u));
  return numbers;
}

// Two bytes of a word, the first of which is kFirst, in the halves of a word.
template <int kFirst>
SPECDEC_DEVICE uint32_t spread(uint32_t bytes) {
  return __byte_perm(bytes, 0, 0x4040 + kFirst + (kFirst + 1 << 8));
}

// By a warp: sum += a b, of a [16, 16], b [16, 8] and sum [16, 8], in the fragments of mma.m16n8k16 (PTX ISA, "Matrix
// fragments for mma.m16n8k16 with floating point type"), two numbers in a word.
SPECDEC_DEVICE void multiply_add_bfloat16(float (&sum)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
SPECDEC_DEVICE void multiply_add_float16(float (&sum)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

#else

SPECDEC_DEVICE Bytes16 load16(const void* place) {
  count_load();
  Bytes16 bytes;
  memcpy(&bytes, place, sizeof(bytes));
  return bytes;
}

SPECDEC_DEVICE Bytes16 stream16(const void* place) { return load16(place); }

SPECDEC_DEVICE Bytes16 cached16(const void* place) {
  Bytes16 bytes;
  memcpy(&bytes, place, sizeof(bytes));
  return bytes;
}

#endif

}  // namespace specdec::simt
