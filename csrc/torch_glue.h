// Checks and views of stable-ABI tensors. Apart from arguments.h and the modules, no other file knows torch.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>
#include <torch/headeronly/util/HeaderOnlyArrayRef.h>

#include <algorithm>
#include <span>

namespace specdec {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// The public Python functions validate their arguments. This keeps direct calls of torch.ops from reading out of
// bounds.
inline void check_shape(const Tensor& tensor, std::initializer_list<int64_t> shape, ScalarType dtype,
                        const char* name) {
  bool right = tensor.dim() == static_cast<int64_t>(shape.size()) && tensor.scalar_type() == dtype;
  int64_t i = 0;
  for (int64_t size : shape) right = right && tensor.size(i++) == size;
  STD_TORCH_CHECK(right, "specdec_kernels: ", name, " has a wrong shape or dtype");
}

inline Tensor dense(const Tensor& tensor) {
  return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
}

// The tensor, copied unless its last dimension is dense. Other strides may be anything.
inline Tensor with_dense_rows(const Tensor& tensor) {
  const int64_t last = tensor.dim() - 1;
  return tensor.size(last) <= 1 || tensor.stride(last) == 1 ? tensor : torch::stable::contiguous(tensor);
}

// Tensors that the operation which runs on this thread is to write its results to, in their order (program.h).
inline thread_local std::span<const Tensor> given_results;

// A new dense tensor on the device of `like`, or the next one that was given. torch::stable::new_empty would look the
// operation up by its name, which takes several times as long as the allocation.
inline Tensor empty_on(const Tensor& like, torch::headeronly::IntHeaderOnlyArrayRef shape, ScalarType dtype) {
  if (!given_results.empty()) {
    const Tensor given = given_results.front();
    given_results = given_results.subspan(1);
    const auto sizes = given.sizes();
    STD_TORCH_CHECK(std::equal(sizes.begin(), sizes.end(), shape.begin(), shape.end()) &&
                        given.scalar_type() == dtype && given.is_contiguous(),
                    "specdec_kernels: a given result has a wrong shape or dtype");
    return given;
  }
  constexpr size_t kMostDimensions = 8;
  STD_TORCH_CHECK(shape.size() <= kMostDimensions, "specdec_kernels: a result has too many dimensions");
  int64_t strides[kMostDimensions], stride = 1;
  for (size_t i = shape.size(); i-- > 0;) {
    strides[i] = stride;
    stride *= std::max<int64_t>(shape.begin()[i], 1);
  }
  int32_t device_type, device_index;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(like.get(), &device_type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(like.get(), &device_index));
  AtenTensorHandle tensor;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      static_cast<int64_t>(shape.size()), shape.begin(), strides,
      torch::stable::detail::to<int32_t>(torch::stable::detail::from(dtype)), device_type, device_index, &tensor));
  return Tensor(tensor);
}

}  // namespace specdec
