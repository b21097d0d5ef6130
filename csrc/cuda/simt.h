// Every word of the machine that kernels use, with two meanings: on a GPU its instruction; on a host a twin that runs
// threads as fibers, so that tests execute unchanged kernel bodies (tests/simt/). Kernels name nothing else of the
// machine, and inline PTX stands here alone.
//
// Blocks have one dimension; a cluster is as many blocks as `launch` says, and a grid is a number of clusters.
#pragma once

#include "../core/hd.h"

#if defined(__CUDACC__)
#include <cuda_runtime.h>

#define SPECDEC_DEVICE __device__ __forceinline__
// A kernel of one struct of parameters, for blocks of at most `threads`.
#define SPECDEC_KERNEL(name, threads, Params) \
  __global__ void __launch_bounds__(threads, 1) name(const __grid_constant__ Params params)
#else
#include "../../tests/simt/machine.h"

#define SPECDEC_DEVICE inline
#define SPECDEC_KERNEL(name, threads, Params) inline void name(const Params& params)
#endif

namespace specdec::simt {

constexpr int kWarp = 32;

// In shared memory: knows when the bulk copies that were begun with it have come. Its rounds alternate between 0 and 1.
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

// ---- Barriers: what was written before is seen after, by the threads that meet

SPECDEC_DEVICE void sync_warp() { __syncwarp(); }
SPECDEC_DEVICE void sync_block() { __syncthreads(); }

SPECDEC_DEVICE void sync_cluster() {
#if __CUDA_ARCH__ >= 900
  // Not .aligned: lanes may have gone different ways before.
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
#else
  __syncthreads();
#endif
}

// ---- Words of a warp, whose threads all take part

template <class T>
SPECDEC_DEVICE T shuffle(T value, int lane) {
  return __shfl_sync(0xffffffffu, value, lane);
}

SPECDEC_DEVICE uint32_t ballot(bool value) { return __ballot_sync(0xffffffffu, value); }

// combine(x of all lanes), in halves: the same on every lane.
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

// Returns what was there. Integers, so that the order of additions does not matter.
SPECDEC_DEVICE uint32_t add(uint32_t* place, uint32_t value) { return atomicAdd(place, value); }
SPECDEC_DEVICE uint64_t add(uint64_t* place, uint64_t value) {
  return atomicAdd(reinterpret_cast<unsigned long long*>(place), static_cast<unsigned long long>(value));
}

// ---- Logits, in device memory or in the shared memory of any block of the cluster

// 16 aligned bytes.
SPECDEC_DEVICE Bytes16 load16(const void* place) {
  const uint4 bytes = *static_cast<const uint4*>(place);
  return {{bytes.x, bytes.y, bytes.z, bytes.w}};
}

#if __CUDA_ARCH__ >= 900

SPECDEC_DEVICE uint32_t shared_address(const void* place) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(place));
}

// By the thread that begins its copies.
SPECDEC_DEVICE void init(Arrival* arrival) {
  asm volatile(
      "mbarrier.init.shared::cta.b64 [%0], 1;\nfence.mbarrier_init.release.cluster;" ::"r"(shared_address(arrival))
      : "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Begins a copy of aligned bytes, a multiple of 16, from device to shared memory. One at a time an arrival.
SPECDEC_DEVICE void copy_bulk(void* to, const void* from, int bytes, Arrival* arrival) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(arrival)), "r"(bytes)
               : "memory");
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)),
               "l"(__cvta_generic_to_global(from)), "r"(bytes), "r"(shared_address(arrival))
               : "memory");
}

// By every thread that reads what the copy of this round (0, 1, 0, ...) brings.
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

#else  // the thread copies, and `launch` does not ask for it

SPECDEC_DEVICE void init(Arrival*) {}
SPECDEC_DEVICE void copy_bulk(void* to, const void* from, int bytes, Arrival*) {
  for (int i = 0; i < bytes / 16; ++i) static_cast<uint4*>(to)[i] = static_cast<const uint4*>(from)[i];
}
SPECDEC_DEVICE void wait(Arrival*, int) { __syncwarp(); }

#endif

// The same address, of which the compiler knows nothing.
SPECDEC_DEVICE char* opaque(char* place) {
  asm("" : "+l"(place));
  return place;
}

// ---- Arithmetic

// 2^x, with a relative error of 2^-22; 0 below 2^-126.
SPECDEC_DEVICE float exp2_of(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// Of a float16, by its 16 bits.
SPECDEC_DEVICE float half_to_float(uint32_t bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(static_cast<uint16_t>(bits)));
  return value;
}

#else

SPECDEC_DEVICE Bytes16 load16(const void* place) {
  Bytes16 bytes;
  look_at(place, sizeof(bytes));
  memcpy(&bytes, place, sizeof(bytes));
  return bytes;
}

#endif

}  // namespace specdec::simt
