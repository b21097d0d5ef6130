// A libcuda.so.1 without a GPU: every call that Triton's launchers make succeeds and does nothing (bench_calls.py).
#include <cuda.h>
#include <string.h>

#define NOTHING(name, ...) \
  CUresult name(__VA_ARGS__) { return CUDA_SUCCESS; }
#define GIVES(name, type, result, ...) \
  CUresult name(type* found, ##__VA_ARGS__) { return *found = (type)(result), CUDA_SUCCESS; }

NOTHING(cuInit, unsigned flags)
NOTHING(cuCtxSetCurrent, CUcontext context)
NOTHING(cuCtxPushCurrent, CUcontext context)
NOTHING(cuCtxSetLimit, CUlimit limit, size_t size)
NOTHING(cuFuncSetAttribute, CUfunction function, CUfunction_attribute what, int value)
NOTHING(cuFuncSetCacheConfig, CUfunction function, CUfunc_cache config)
NOTHING(cuModuleUnload, CUmodule module)
NOTHING(cuLaunchKernelEx, const CUlaunchConfig* config, CUfunction function, void** parameters, void** extra)
GIVES(cuDriverGetVersion, int, CUDA_VERSION)
GIVES(cuDeviceGetCount, int, 1)
GIVES(cuDeviceGet, CUdevice, ordinal, int ordinal)
GIVES(cuDevicePrimaryCtxRetain, CUcontext, 16, CUdevice device)
GIVES(cuCtxGetCurrent, CUcontext, 16)
GIVES(cuCtxPopCurrent, CUcontext, 16)
GIVES(cuCtxGetDevice, CUdevice, 0)
GIVES(cuCtxGetLimit, size_t, 0, CUlimit limit)
GIVES(cuFuncGetAttribute, int, 1024, CUfunction_attribute what, CUfunction function)
GIVES(cuOccupancyMaxActiveClusters, int, 1, CUfunction function, const CUlaunchConfig* config)
GIVES(cuModuleLoadData, CUmodule, 16, const void* image)
GIVES(cuModuleGetFunction, CUfunction, 16, CUmodule module, const char* name)
GIVES(cuDeviceGetAttribute, int, what == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR ? 9 : 0xe000,
      CUdevice_attribute what, CUdevice device)

CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus* status) {
  return *status = CU_STREAM_CAPTURE_STATUS_NONE, CUDA_SUCCESS;
}
CUresult cuGetErrorString(CUresult error, const char** text) { return *text = "an error", CUDA_SUCCESS; }
CUresult cuPointerGetAttribute(void* found, CUpointer_attribute what, CUdeviceptr pointer) {
  return memcpy(found, &pointer, sizeof pointer), CUDA_SUCCESS;
}
