// Launches on a stream of the current device. On GPUs of compute capability 9.0 and newer, a launch after one of ours
// begins while that one ends (programmatic dependent launch), and waits for it where it needs its results.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "grid.h"

namespace specdec::cuda {

inline void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  throw std::runtime_error(std::string("specdec: ") + what + ": " + cudaGetErrorString(error));
}

class Launch {
 public:
  explicit Launch(void* stream) : stream_(static_cast<cudaStream_t>(stream)) {
    int device, major;
    check(cudaGetDevice(&device), "cudaGetDevice");
    check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "cudaDeviceGetAttribute");
    overlaps_ = major >= 9;
  }

  template <class Params>
  void operator()(void (*kernel)(Params), const Params& params, const Grid& grid) const {
    constexpr int64_t kWithoutAsking = 48 << 10;
    if (grid.shared > kWithoutAsking) {
      check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(grid.shared)),
            "the kernel needs too much shared memory for rows of this size");
    }
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(static_cast<unsigned>(grid.x), static_cast<unsigned>(grid.y), static_cast<unsigned>(grid.z));
    config.blockDim = dim3(static_cast<unsigned>(grid.threads));
    config.dynamicSmemBytes = static_cast<size_t>(grid.shared);
    config.stream = stream_;
    config.attrs = &attribute;
    config.numAttrs = overlaps_ && grid.after_ours ? 1 : 0;
    check(cudaLaunchKernelEx(&config, kernel, params), "launch");
  }

 private:
  cudaStream_t stream_;
  bool overlaps_;
};

}  // namespace specdec::cuda
