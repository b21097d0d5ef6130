// The CUDA kernels of layers as torch's operations. They are a separate module, which is loaded only if torch has CUDA.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#define SPECDEC_PACKAGE "specdec_layers"

#include <vector>

#include "../common/extension_cuda.h"
#include "cuda/operations.h"

namespace specdec::cuda {
namespace {

bool is_aligned(const Tensor& tensor) { return reinterpret_cast<uintptr_t>(bytes(tensor)) % 16 == 0; }

// The tensor, copied unless it is dense and begins where 16 bytes can be loaded.
Tensor aligned(const Tensor& tensor) {
  const Tensor whole = dense(tensor);
  return is_aligned(whole) ? whole : torch::stable::clone(whole);
}

void check_device(const Tensor& tensor, const Tensor& x, const char* name) {
  STD_TORCH_CHECK(tensor.is_cuda() && tensor.get_device_index() == x.get_device_index(), "specdec_layers: ", name,
                  " is on another device than the others");
}

int size_of(int64_t size) {
  STD_TORCH_CHECK(size <= INT32_MAX, "specdec_layers: x or weight has ", size, " rows or columns, which are too many");
  return static_cast<int>(size);
}

// How far the rows of x [B, q, inputs] are apart, in numbers; 0 if a kernel cannot read them where they are.
int64_t apart(const Tensor& x) {
  const int64_t stride = x.stride(x.size(1) == 1 ? 0 : 1);
  const bool even = x.size(0) == 1 || x.size(1) == 1 || x.stride(0) == x.size(1) * stride;
  return even && x.stride(2) == 1 && stride % 8 == 0 && is_aligned(x) ? stride : 0;
}

constexpr int64_t kInt8 = 256;  // Packing.INT8

// x [B, q, inputs] of products, as their kernel reads it.
class Rows {
 public:
  explicit Rows(const Tensor& x) : x_(x) {
    const ScalarType dtype = x.scalar_type();
    STD_TORCH_CHECK(dtype == ScalarType::BFloat16 || dtype == ScalarType::Half,
                    "specdec_layers: x must be bfloat16 or float16 on a GPU");
    STD_TORCH_CHECK(x.dim() == 3 && x.size(2) % 32 == 0,
                    "specdec_layers: x must be [B, q, inputs], on a GPU with a multiple of 32 inputs");
    check_device(x, x, "x");
    const int64_t stride = apart(x);
    if (stride == 0) x_ = aligned(x);
    stride_ = (stride > 0 ? stride : inputs()) * static_cast<int64_t>(x.element_size());
  }

  int64_t inputs() const { return x_.size(2); }

  // A tensor that goes with x, checked.
  Tensor of(const Tensor& tensor, std::initializer_list<int64_t> shape, const char* name) const {
    check_shape(tensor, shape, x_.scalar_type(), name);
    check_device(tensor, x_, name);
    return aligned(tensor);
  }

  // Weights [of_output * outputs, inputs] as x, or as bytes (Packing.INT8).
  Tensor weights(const Tensor& weight, int64_t outputs, int64_t of_output) const {
    if (weight.scalar_type() != ScalarType::Byte) return of(weight, {of_output * outputs, inputs()}, "weight");
    STD_TORCH_CHECK(outputs % 8 == 0 && inputs() % 64 == 0, "specdec_layers: weight has ", outputs, " outputs of ",
                    inputs(), " inputs, and must have a multiple of 8 outputs and of 64 inputs where it is of bytes");
    check_shape(weight, {of_output * outputs, inputs() + 4}, ScalarType::Byte, "weight");
    check_device(weight, x_, "weight");
    return aligned(weight);
  }

  // Of weights of of_output * outputs, and biases of as many. `more`: what is computed besides.
  Tensor times(const Tensor& weight, const MaybeTensor& bias, LinearParams more = {}) const {
    const int64_t of_output = more.gated ? 2 : 1, outputs = weight.size(0) / of_output;
    const OnDevice on(x_);
    const Tensor own_weight = weights(weight, outputs, of_output);
    const MaybeTensor own_bias = bias ? MaybeTensor(of(*bias, {of_output * outputs}, "bias")) : std::nullopt;
    Tensor y = empty_on(x_, {x_.size(0), x_.size(1), outputs}, x_.scalar_type());
    more.x = bytes(x_);
    more.weight = bytes(own_weight);
    more.bias = own_bias ? bytes(*own_bias) : nullptr;
    more.y = static_cast<char*>(y.mutable_data_ptr());
    more.dtype = dtype_of(x_, "x");
    more.rows = size_of(x_.size(0) * x_.size(1));
    more.inputs = size_of(inputs());
    more.outputs = size_of(weight.size(0)) / static_cast<int>(of_output);
    more.x_stride = stride_;
    more.int8 = weight.scalar_type() == ScalarType::Byte;
    linear(more, on.stream);
    return y;
  }

 private:
  Tensor x_;
  int64_t stride_;  // in bytes
};

std::vector<Tensor> linear_op(const Tensor& x, const std::vector<Tensor>& weights,
                              const std::vector<MaybeTensor>& biases, const std::vector<int64_t>& packings) {
  STD_TORCH_CHECK(weights.size() == biases.size() && weights.size() == packings.size(),
                  "specdec_layers: there are other biases or packings than weights");
  const Rows rows(x);
  std::vector<Tensor> found;
  for (size_t i = 0; i < weights.size(); ++i) {
    const bool is_int8 = packings[i] == kInt8;
    STD_TORCH_CHECK(packings[i] == 0 || is_int8, "specdec_layers: packing is ", packings[i],
                    ", allowed on a GPU: ", kInt8, " or none");
    STD_TORCH_CHECK(is_int8 == (weights[i].scalar_type() == ScalarType::Byte),
                    "specdec_layers: weight has a wrong shape or dtype");
    found.push_back(rows.times(weights[i], biases[i]));
  }
  return found;
}

Tensor norm_linear_op(const Tensor& x, const Tensor& norm_weight, double epsilon, double offset, bool round_first,
                      const Tensor& weight, const MaybeTensor& bias, int64_t gate) {
  STD_TORCH_CHECK(gate >= 0 && gate <= 2, "specdec_layers: gate must be 0, 1 or 2");
  const Rows rows(x);
  const Tensor norm = rows.of(norm_weight, {rows.inputs()}, "norm_weight");
  LinearParams more = {};
  more.norm = bytes(norm);
  more.epsilon = static_cast<float>(epsilon);
  more.offset = static_cast<float>(offset);
  more.round_first = round_first;
  more.gated = gate > 0;
  more.gelu = gate == 2;
  return rows.times(weight, bias, more);
}

Tensor add_linear_op(const Tensor& base, const Tensor& x, const Tensor& weight, const MaybeTensor& bias) {
  const Rows rows(x);
  const Tensor own_base = rows.of(base, {x.size(0), x.size(1), weight.size(0)}, "base");
  LinearParams more = {};
  more.base = bytes(own_base);
  return rows.times(weight, bias, more);
}

STABLE_TORCH_LIBRARY_IMPL(specdec_layers, CUDA, m) {
  m.impl("linear", TORCH_BOX(&linear_op));
  m.impl("norm_linear", TORCH_BOX(&norm_linear_op));
  m.impl("add_linear", TORCH_BOX(&add_linear_op));
}

}  // namespace
}  // namespace specdec::cuda
