// What both extensions for tensors on an NVIDIA GPU have.
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <cuda_runtime_api.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>

#include "torch_glue.h"

#define SPECDEC_STRING_(x) #x
#define SPECDEC_STRING(x) SPECDEC_STRING_(x)

namespace specdec::cuda {

// Makes a tensor's device the current one, and finds the stream on which its work is submitted.
class OnDevice {
 public:
  explicit OnDevice(const Tensor& tensor) : guard_(tensor.get_device_index()) {
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
  }

  void* stream = nullptr;

 private:
  torch::stable::accelerator::DeviceGuard guard_;
};

inline PyObject* build(PyObject*, PyObject*) {
  return PyUnicode_FromString(
      "runtime=" SPECDEC_STRING(CUDART_VERSION) ";architectures=" SPECDEC_STRING(SPECDEC_CUDA_ARCHITECTURES));
}

inline PyMethodDef methods[] = {{"build", build, METH_NOARGS, "key=value pairs, separated by ';'"},
                                {nullptr, nullptr, 0, nullptr}};
inline PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_C_cuda", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace specdec::cuda

PyMODINIT_FUNC PyInit__C_cuda() { return PyModule_Create(&specdec::cuda::module); }
