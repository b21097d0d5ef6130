// The CUDA kernels as torch's operations. They are a separate module, which is loaded only if torch has CUDA.
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <cuda_runtime_api.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>

#include "arguments.h"
#include "cuda/operations.h"

namespace specdec::cuda {
namespace {

// Calls operation(params, stream, allocate) on the tensor's device with its current stream.
template <class Params>
void run_on(const Tensor& tensor, const Params& params, void (*operation)(const Params&, void*, const Allocate&)) {
  const torch::stable::accelerator::DeviceGuard guard(tensor.get_device_index());
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
  std::optional<Tensor> scratch;  // torch's allocator reuses its memory in the order of the stream
  operation(params, stream, [&](int64_t bytes) {
    scratch = empty_on(tensor, {bytes}, ScalarType::Byte);
    return static_cast<char*>(scratch->mutable_data_ptr());
  });
}

void run_draft_step(const DraftStepParams& params, const Tensor& logits) { run_on(logits, params, draft_step); }
void run_speculative_step(const SpeculativeStepParams& params, const Tensor& logits) {
  run_on(logits, params, speculative_step);
}

STABLE_TORCH_LIBRARY_IMPL(specdec_kernels, CUDA, m) {
  m.impl("draft_step", TORCH_BOX(&specdec::draft_step<run_draft_step>));
  m.impl("speculative_step", TORCH_BOX(&specdec::speculative_step<run_speculative_step>));
}

#define SPECDEC_STRING_(x) #x
#define SPECDEC_STRING(x) SPECDEC_STRING_(x)

PyObject* build(PyObject*, PyObject*) {
  return PyUnicode_FromString(
      "runtime=" SPECDEC_STRING(CUDART_VERSION) ";architectures=" SPECDEC_STRING(SPECDEC_CUDA_ARCHITECTURES));
}

PyMethodDef methods[] = {{"build", build, METH_NOARGS, "key=value pairs, separated by ';'"},
                         {nullptr, nullptr, 0, nullptr}};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C_cuda", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace
}  // namespace specdec::cuda

PyMODINIT_FUNC PyInit__C_cuda() { return PyModule_Create(&specdec::cuda::module); }
