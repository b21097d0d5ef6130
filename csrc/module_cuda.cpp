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

bool is_aligned(const Tensor& tensor) { return reinterpret_cast<uintptr_t>(bytes(tensor)) % 16 == 0; }

// The tensor, copied unless it is dense and begins where 16 bytes can be loaded.
Tensor aligned(const Tensor& tensor) {
  const Tensor whole = dense(tensor);
  return is_aligned(whole) ? whole : torch::stable::clone(whole);
}

void check_device(const Tensor& tensor, const Tensor& x, const char* name) {
  STD_TORCH_CHECK(tensor.is_cuda() && tensor.get_device_index() == x.get_device_index(), "specdec_kernels: ", name,
                  " is on another device than the others");
}

int size_of(int64_t size) {
  STD_TORCH_CHECK(size <= INT32_MAX, "specdec_kernels: x or weight has ", size, " rows or columns, which are too many");
  return static_cast<int>(size);
}

// How far the rows of x [B, q, inputs] are apart, in numbers; 0 if a kernel cannot read them where they are.
int64_t apart(const Tensor& x) {
  const int64_t stride = x.stride(x.size(1) == 1 ? 0 : 1);
  const bool even = x.size(0) == 1 || x.size(1) == 1 || x.stride(0) == x.size(1) * stride;
  return even && x.stride(2) == 1 && stride % 8 == 0 && is_aligned(x) ? stride : 0;
}

std::vector<Tensor> linear_op(const Tensor& x, const std::vector<Tensor>& weights,
                              const std::vector<MaybeTensor>& biases, const std::vector<int64_t>& packings) {
  const ScalarType dtype = x.scalar_type();
  STD_TORCH_CHECK(dtype == ScalarType::BFloat16 || dtype == ScalarType::Half,
                  "specdec_kernels: x must be bfloat16 or float16 on a GPU");
  STD_TORCH_CHECK(x.dim() == 3 && x.size(2) % 32 == 0,
                  "specdec_kernels: x must be [B, q, inputs], on a GPU with a multiple of 32 inputs");
  STD_TORCH_CHECK(weights.size() == biases.size() && weights.size() == packings.size(),
                  "specdec_kernels: there are other biases or packings than weights");
  check_device(x, x, "x");
  const int64_t rows = x.size(0) * x.size(1), inputs = x.size(2);
  const torch::stable::accelerator::DeviceGuard guard(x.get_device_index());
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(x.get_device_index(), &stream));
  const int64_t stride = apart(x);
  const Tensor own_x = stride > 0 ? x : aligned(x);
  std::vector<Tensor> found;
  for (size_t i = 0; i < weights.size(); ++i) {
    STD_TORCH_CHECK(packings[i] == 0, "specdec_kernels: packing is ", packings[i], ", and there is none on a GPU");
    const int64_t outputs = weights[i].size(0);
    check_shape(weights[i], {outputs, inputs}, dtype, "weight");
    check_device(weights[i], x, "weight");
    if (biases[i]) check_device(*biases[i], x, "bias");
    const Tensor weight = aligned(weights[i]);
    MaybeTensor bias = biases[i];
    prepare(bias, {outputs}, dtype, "bias");
    found.push_back(empty_on(x, {x.size(0), x.size(1), outputs}, dtype));
    linear({.x = bytes(own_x),
            .weight = bytes(weight),
            .bias = bias ? bytes(*bias) : nullptr,
            .y = static_cast<char*>(found.back().mutable_data_ptr()),
            .dtype = dtype_of(x),
            .rows = size_of(rows),
            .inputs = size_of(inputs),
            .outputs = size_of(outputs),
            .x_stride = (stride > 0 ? stride : inputs) * static_cast<int64_t>(x.element_size())},
           stream);
  }
  return found;
}

STABLE_TORCH_LIBRARY_IMPL(specdec_kernels, CUDA, m) {
  m.impl("linear", TORCH_BOX(&linear_op));
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
