// The CUDA kernels as torch's operations. They are a separate module, which is loaded only if torch has CUDA.
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <cuda_runtime_api.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>

#include "arguments.h"
#include "cuda/operations.h"
#include "cuda/recurrent.h"
#include "recurrent_arguments.h"

namespace specdec::cuda {
namespace {

// Calls operation(stream) on the tensor's device with its current stream.
template <class Operation>
void run_on(const Tensor& tensor, const Operation& operation) {
  const torch::stable::accelerator::DeviceGuard guard(tensor.get_device_index());
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
  operation(stream);
}

// The same with memory that it may ask for.
template <class Params>
void run_on(const Tensor& tensor, const Params& params, void (*operation)(const Params&, void*, const Allocate&)) {
  std::optional<Tensor> scratch;  // torch's allocator reuses its memory in the order of the stream
  run_on(tensor, [&](void* stream) {
    operation(params, stream, [&](int64_t bytes) {
      scratch = empty_on(tensor, {bytes}, ScalarType::Byte);
      return static_cast<char*>(scratch->mutable_data_ptr());
    });
  });
}

void run_draft_step(const DraftStepParams& params, const Tensor& logits) { run_on(logits, params, draft_step); }
void run_speculative_step(const SpeculativeStepParams& params, const Tensor& logits) {
  run_on(logits, params, speculative_step);
}
void run_draft_children(const DraftChildrenParams& params, const Tensor& logits) {
  run_on(logits, params, draft_children);
}
void run_verify_tree(const VerifyTreeParams& params, const Tensor& logits) { run_on(logits, params, verify_tree); }
void run_conv_window(const ConvWindowParams& params, const Tensor& x) {
  run_on(x, [&](void* stream) { conv_window(params, stream); });
}
void run_delta_step(const DeltaStepParams& params, const Tensor& q) {
  run_on(q, [&](void* stream) { delta_step(params, stream); });
}
void run_ssd_step(const SsdStepParams& params, const Tensor& x) {
  run_on(x, [&](void* stream) { ssd_step(params, stream); });
}

STABLE_TORCH_LIBRARY_IMPL(specdec_kernels, CUDA, m) {
  m.impl("draft_step", TORCH_BOX(&specdec::draft_step<run_draft_step>));
  m.impl("speculative_step", TORCH_BOX(&specdec::speculative_step<run_speculative_step>));
  m.impl("draft_children", TORCH_BOX(&specdec::draft_children<run_draft_children>));
  m.impl("verify_tree", TORCH_BOX(&specdec::verify_tree<run_verify_tree>));
  m.impl("conv_window", TORCH_BOX(&specdec::conv_window<run_conv_window>));
  m.impl("delta_step", TORCH_BOX(&specdec::delta_step<run_delta_step>));
  m.impl("ssd_step", TORCH_BOX(&specdec::ssd_step<run_ssd_step>));
}

#define SPECDEC_STRING_(x) #x
#define SPECDEC_STRING(x) SPECDEC_STRING_(x)

PyObject* build(PyObject*, PyObject*) {
  return PyUnicode_FromString(
      "runtime=" SPECDEC_STRING(CUDART_VERSION) ";architectures=" SPECDEC_STRING(SPECDEC_CUDA_ARCHITECTURES));
}

PyObject* launch_as(PyObject*, PyObject* name) {
  const std::pair<const char*, Launches> known[] = {
      {"planned", Launches::kPlanned}, {"fused", Launches::kFused}, {"split", Launches::kSplit}};
  for (const auto& [allowed, value] : known) {
    if (!PyUnicode_Check(name) || PyUnicode_CompareWithASCIIString(name, allowed) != 0) continue;
    launches = value, blocks_asked = 0;
    Py_RETURN_NONE;
  }
  if (const long blocks = PyLong_Check(name) ? PyLong_AsLong(name) : 0; blocks >= 1 && blocks <= 16) {
    launches = Launches::kPlanned, blocks_asked = static_cast<int>(blocks);
    Py_RETURN_NONE;
  }
  PyErr_Clear();
  return PyErr_Format(PyExc_ValueError, "launches: got %R, allowed: planned, fused, split, or 1 to 16", name);
}

PyMethodDef methods[] = {
    {"build", build, METH_NOARGS, "key=value pairs, separated by ';'"},
    {"launch_as", launch_as, METH_O,
     "how later calls launch: planned, fused, split, or the number of blocks that decide a sequence"},
    {nullptr, nullptr, 0, nullptr}};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C_cuda", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace
}  // namespace specdec::cuda

PyMODINIT_FUNC PyInit__C_cuda() { return PyModule_Create(&specdec::cuda::module); }
