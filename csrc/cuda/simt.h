// All that kernels use of the GPU, implemented twice: for a GPU by its instructions, and for a host by functions that
// run threads as fibers, so that tests execute unchanged kernel bodies (tests/simt/). Kernels use nothing else of the
// GPU, and this is the only file with inline PTX.
//
// Blocks have one dimension. A launch chooses the number of blocks in a cluster, and a grid is a number of clusters.
#pragma once

#include "../core/hd.h"

#if defined(__CUDACC__)
#include <cuda_runtime.h>

#define SPECDEC_DEVICE __device__ __forceinline__
// A kernel with one struct as its argument, for blocks of at most `threads` threads, of which a multiprocessor has room
// for `blocks`.
#define SPECDEC_KERNEL_OF(name, threads, blocks, Params) \
  __global__ void __launch_bounds__(threads, blocks) name(const __grid_constant__ Params params)
#else
#include "../../tests/simt/machine.h"

#define SPECDEC_DEVICE inline
#define SPECDEC_KERNEL_OF(name, threads, blocks, Params) inline void name(const Params& params)
#endif
#define SPECDEC_KERNEL(name, threads, Params) SPECDEC_KERNEL_OF(name, threads, 1, Params)

namespace specdec::simt {

constexpr int kWarp = 32;

// In shared memory: tracks the bulk copies that were begun with it. Its rounds are numbered 0, 1, 0, 1, ...
using Arrival = uint64_t;

struct alignas(16) Bytes16 {
  uint32_t word[4];
};

#if defined(__CUDACC__)

// ---- Where a thread is

SPECDEC_DEVICE int thread() { return static_cast<int>(threadIdx.x); }
SPECDEC_DEVICE int num_threads() { return static_cast<int>(blockDim.x); }

SPECDEC_DEVICE int block_in_cluster() {
#if __CUDA_ARCH__ >= 900
  uint32_t rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return static_cast<int>(rank);
#else
  return 0;
#endif
}

SPECDEC_DEVICE int blocks_in_cluster() {
#if __CUDA_ARCH__ >= 900
  uint32_t size;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  return static_cast<int>(size);
#else
  return 1;
#endif
}

SPECDEC_DEVICE int64_t cluster() { return static_cast<int64_t>(blockIdx.x) / blocks_in_cluster(); }

// ---- Barriers: after one, its threads see what all of them wrote before it

SPECDEC_DEVICE void sync_warp() { __syncwarp(); }
SPECDEC_DEVICE void sync_block() { __syncthreads(); }

// The two halves of a cluster's barrier, between which a thread does what others need not see. `arrive_only` says that
// the thread came here, and nothing of what it wrote, which spares a fence. A thread may end without the wait.
// Without .aligned, since the lanes of a warp may have diverged.
SPECDEC_DEVICE void arrive_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release;" ::: "memory");
#endif
}
SPECDEC_DEVICE void arrive_only() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed;" ::: "memory");
#endif
}
SPECDEC_DEVICE void wait_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.acquire;" ::: "memory");
#else
  __syncthreads();
#endif
}

SPECDEC_DEVICE void sync_cluster() {
  arrive_cluster();
  wait_cluster();
}

// ---- Launches that overlap: the next one in the stream, if it is launched as a dependent one (csrc/cuda/launch.h)

// Lets the blocks of the next launch begin once every block of this one has called this.
SPECDEC_DEVICE void start_next_launch() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Waits for the end of the launch before, and until what it wrote can be seen.
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

// Combines the values of all lanes pairwise; every lane gets the same result.
template <class T, class Combine>
SPECDEC_DEVICE T reduce(T value, Combine combine) {
#pragma unroll
  for (int distance = kWarp / 2; distance > 0; distance /= 2) {
    value = combine(value, __shfl_xor_sync(0xffffffffu, value, distance));
  }
  return value;
}

// ---- Shared memory

SPECDEC_DEVICE char* shared_memory() {
  extern __shared__ __align__(128) char memory[];
  return memory;
}

// The same place in the shared memory of another block of the cluster.
template <class T>
SPECDEC_DEVICE T* in_block(T* place, int block) {
#if __CUDA_ARCH__ >= 900
  uint64_t there;
  asm("mapa.u64 %0, %1, %2;" : "=l"(there) : "l"(place), "r"(block));
  return reinterpret_cast<T*>(there);
#else
  return place;
#endif
}

template <class T>
SPECDEC_DEVICE T read(const T* place) {
  return *place;
}

template <class T>
SPECDEC_DEVICE void write(T* place, T value) {
  *place = value;
}

// Atomic; returns the old value. For integers only, so that the order of additions does not matter, and of 32 bits,
// since GPUs add 64 bits to shared memory in a loop.
SPECDEC_DEVICE uint32_t add(uint32_t* place, uint32_t value) { return atomicAdd(place, value); }

// ---- 16 aligned bytes of device memory, or, to be read, of the shared memory of any block of the cluster

SPECDEC_DEVICE Bytes16 load16(const void* place) {
  const uint4 bytes = *static_cast<const uint4*>(place);
  return {{bytes.x, bytes.y, bytes.z, bytes.w}};
}

SPECDEC_DEVICE void store16(void* place, const Bytes16& bytes) {
  *static_cast<uint4*>(place) = make_uint4(bytes.word[0], bytes.word[1], bytes.word[2], bytes.word[3]);
}

#if __CUDA_ARCH__ >= 900

SPECDEC_DEVICE uint32_t shared_address(const void* place) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(place));
}

// By the thread that will begin its copies.
SPECDEC_DEVICE void init(Arrival* arrival) {
  asm volatile(
      "mbarrier.init.shared::cta.b64 [%0], 1;\nfence.mbarrier_init.release.cluster;" ::"r"(shared_address(arrival))
      : "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Begins a copy of 16-byte aligned memory, a multiple of 16 bytes that may be 0, from device to shared memory. An
// arrival tracks one copy at a time.
SPECDEC_DEVICE void copy_bulk(void* to, const void* from, int bytes, Arrival* arrival) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(arrival)), "r"(bytes)
               : "memory");
  if (bytes == 0) return;
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)),
               "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(shared_address(arrival))
               : "memory");
}

// By every thread that reads the copied bytes: waits for the copy of this round (0, 1, 0, ...).
SPECDEC_DEVICE void wait(Arrival* arrival, int round) {
  uint32_t done = 0;
  while (done == 0) {
    asm volatile(
        "{\n.reg .pred done;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
        "selp.u32 %0, 1, 0, done;\n}"
        : "=r"(done)
        : "r"(shared_address(arrival)), "r"(round)
        : "memory");
  }
}

#else  // without bulk copies the thread copies; plans for such GPUs have no slots

SPECDEC_DEVICE void init(Arrival*) {}
SPECDEC_DEVICE void copy_bulk(void* to, const void* from, int bytes, Arrival*) {
  for (int i = 0; i < bytes / 16; ++i) static_cast<uint4*>(to)[i] = static_cast<const uint4*>(from)[i];
}
SPECDEC_DEVICE void wait(Arrival*, int) { __syncwarp(); }

#endif

// Has a line of device memory brought to the L2 cache.
SPECDEC_DEVICE void prefetch(const void* place) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(place)));
}

// The same for 16-byte aligned memory, a multiple of 16 bytes that may be 0.
SPECDEC_DEVICE void prefetch(const char* place, int bytes) {
#if __CUDA_ARCH__ >= 900
  if (bytes == 0) return;
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(__cvta_generic_to_global(place)), "r"(bytes));
#else
  for (int at = 0; at < bytes; at += 128) prefetch(place + at);
#endif
}

// Returns the address, hiding from the compiler how it was computed.
SPECDEC_DEVICE char* opaque(char* place) {
  asm("" : "+l"(place));
  return place;
}

// ---- Arithmetic

// 2^x, with a relative error of 2^-22; results below 2^-126 are 0.
SPECDEC_DEVICE float exp2_of(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// 1 / sqrt(x), with a relative error of 2^-22.
SPECDEC_DEVICE float inverse_sqrt(float x) { return rsqrtf(x); }

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

// How many bits are 1.
SPECDEC_DEVICE uint32_t count_bits(uint32_t bits) { return static_cast<uint32_t>(__popc(bits)); }

// The value of a float16, given by its 16 bits.
SPECDEC_DEVICE float half_to_float(uint32_t bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(static_cast<uint16_t>(bits)));
  return value;
}

// The bits of the float16 that is nearest, the even one of two.
SPECDEC_DEVICE uint32_t float_to_half(float value) {
  uint16_t bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

#else

SPECDEC_DEVICE Bytes16 load16(const void* place) {
  Bytes16 bytes;
  look_at(place, sizeof(bytes));
  memcpy(&bytes, place, sizeof(bytes));
  return bytes;
}

SPECDEC_DEVICE void store16(void* place, const Bytes16& bytes) {
  look_at(place, sizeof(bytes), Access::kWrite);
  memcpy(place, &bytes, sizeof(bytes));
}

#endif

}  // namespace specdec::simt
