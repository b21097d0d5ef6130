// Launches the kernels of an operation: one that measures and one that decides, on GPUs with clusters by the number of
// blocks per sequence that finishes soonest. Where a sequence needs more memory than a block can have, and on other
// GPUs, what a cluster keeps for its blocks is in global memory.
#pragma once

#include <map>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>

#include "operations.h"
#include "plan.h"
#include "statistics.h"

namespace specdec::cuda {

inline void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  throw std::runtime_error(std::string("specdec_kernels: ") + what + ": " + cudaGetErrorString(error));
}

inline cudaLaunchConfig_t config_of(int64_t blocks, int threads, int64_t shared, cudaLaunchAttribute* cluster,
                                    int blocks_in_cluster) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared);
  cluster->id = cudaLaunchAttributeClusterDimension;
  cluster->val.clusterDim = {static_cast<unsigned>(blocks_in_cluster), 1, 1};
  config.attrs = cluster;
  config.numAttrs = blocks_in_cluster > 0 ? 1 : 0;
  return config;
}

template <class Kernel>
Machine machine_of(Kernel* kernel, int device, int threads) {
  const auto attribute = [&](cudaDeviceAttr which) {
    int value;
    check(cudaDeviceGetAttribute(&value, which, device), "cudaDeviceGetAttribute");
    return value;
  };
  Machine machine = {};
  machine.multiprocessors = attribute(cudaDevAttrMultiProcessorCount);
  machine.has_clusters = attribute(cudaDevAttrComputeCapabilityMajor) >= 9;
  if (!machine.has_clusters) return machine;
  const int shared = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  machine.shared_memory = shared;
  machine.half_of_it =
      attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor) / 2 - attribute(cudaDevAttrReservedSharedMemoryPerBlock);
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared), "cudaFuncSetAttribute");
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1), "cudaFuncSetAttribute");
  for (int blocks = 1; blocks <= kMostBlocks; ++blocks) {
    cudaLaunchAttribute cluster;
    const cudaLaunchConfig_t config = config_of(blocks, threads, shared, &cluster, blocks);
    // A size that does not fit on this GPU is not an error.
    if (cudaOccupancyMaxActiveClusters(&machine.places[blocks], kernel, &config) != cudaSuccess) {
      machine.places[blocks] = 0;
      cudaGetLastError();
    }
  }
  return machine;
}

// The same for the current device; each device is asked once. `threads`: of the kernel's blocks, at most.
template <class Kernel>
Machine current_machine(Kernel* kernel, int threads) {
  static std::mutex mutex;
  static std::map<std::pair<Kernel*, int>, Machine> known;
  int device;
  check(cudaGetDevice(&device), "cudaGetDevice");
  const std::lock_guard<std::mutex> lock(mutex);
  const auto key = std::make_pair(kernel, device);
  if (known.count(key) == 0) known.emplace(key, machine_of(kernel, device, threads));
  return known.at(key);
}

template <class Params>
void launch_one(void (*kernel)(Params), const Params& params, const cudaLaunchConfig_t& config, void* stream) {
  cudaLaunchConfig_t on_stream = config;
  on_stream.stream = static_cast<cudaStream_t>(stream);
  check(cudaLaunchKernelEx(&on_stream, kernel, params), "launch");
}

// By clusters, which measure the rows or, if a launch before does that, overlap with it.
template <class Work>
void launch_clusters(void (*decide)(Work), const Work& work, const Plan& plan, void* stream) {
  cudaLaunchAttribute attributes[2];
  cudaLaunchConfig_t config =
      config_of(work.params.batch * plan.blocks, plan.threads, plan.shared, attributes, plan.blocks);
  if (work.measured != nullptr) {
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    config.numAttrs = 2;
  }
  launch_one(decide, work, config, stream);
}

void launch_statistics(const StatisticsParams& params, void* stream);

// Measures by many small blocks, then decides by clusters. Returns whether the operation can be launched so.
template <class Params, class Memory>
bool launch_measured(void (*decide)(Work<Params, Memory>), const Params& params, const Items& items,
                     const Machine& machine, void* stream, const Allocate& allocate) {
  std::optional<StatisticsParams> rows = Memory::to_measure(params);
  if (!rows || rows->launched() > INT32_MAX) return false;
  Work<Params, Memory> work = {params, {}, items.own_copy};
  const auto cut = [&](Cut cut) {
    Arena arena;
    cut.measured = true;
    work.pieces = Memory::cut(arena, params, items, cut);
    return arena.size();
  };
  const Plan plan = plan_of(machine, params.batch, Memory::deciding(params, items), cut, blocks_asked);
  if (plan.blocks == 0) return false;
  const Statistics statistics = work.pieces.statistics();
  rows->memory = allocate(params.batch * statistics.size), rows->stride = statistics.size;
  rows->mass_at = statistics.mass_at;
  work.measured = rows->memory, work.stride = rows->stride;
  launch_statistics(*rows, stream);
  launch_clusters(decide, work, plan, stream);
  return true;
}

// `measure`: null if `decide` measures, also where it has one block.
template <class Params, class Memory>
void launch(void (*measure)(Work<Params, Memory>), void (*decide)(Work<Params, Memory>), const Params& params,
            void* stream, const Allocate& allocate) {
  if (params.batch == 0) return;
  const Items items = Memory::items(params);
  const Machine machine = current_machine(decide, items.warps * kWarp);
  const Launches how = launches;
  if constexpr (requires { Memory::to_measure(params); }) {
    // With more sequences than multiprocessors, one measures while another decides, and one launch is faster.
    if (how == Launches::kPlanned && machine.has_clusters && params.batch <= machine.multiprocessors &&
        launch_measured(decide, params, items, machine, stream, allocate)) {
      return;
    }
  }
  Work<Params, Memory> work = {params, {}, items.own_copy};
  const auto cut = [&](const Cut& cut) {
    Arena arena;
    work.pieces = Memory::cut(arena, params, items, cut);
    return arena.size();
  };
  const Plan plan = how == Launches::kSplit ? Plan{} : plan_of(machine, params.batch, items, cut, blocks_asked);
  if (plan.blocks > 0) return launch_clusters(decide, work, plan, stream);
  work.stride = cut(Cut{kSplitWarps, kSplitWarps, 0});
  work.scratch = allocate(params.batch * work.stride);
  work.blocks = measuring_blocks(machine, params.batch, items);
  const int64_t own_copies = kSplitWarps * items.own_copy;
  cudaLaunchAttribute none;
  if (measure != nullptr) {
    launch_one(measure, work, config_of(params.batch * work.blocks, kSplitThreads, own_copies, &none, 0), stream);
  }
  launch_one(decide, work, config_of(params.batch, kSplitThreads, own_copies, &none, 0), stream);
}

}  // namespace specdec::cuda
