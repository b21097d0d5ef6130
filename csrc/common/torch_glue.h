// Checks and views of stable-ABI tensors. Only the modules and what turns their operations' arguments into parameters
// know torch, and this. SPECDEC_PACKAGE, a string, is whose operations they are: errors begin with it.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>
#include <torch/headeronly/util/HeaderOnlyArrayRef.h>

#include <algorithm>
#include <optional>

#include "../core/dtype.h"

namespace specdec {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;

// The public Python functions validate their arguments. This keeps direct calls of torch.ops from reading out of
// bounds.
inline void check_shape(const Tensor& tensor, std::initializer_list<int64_t> shape, ScalarType dtype,
                        const char* name) {
  bool right = tensor.dim() == static_cast<int64_t>(shape.size()) && tensor.scalar_type() == dtype;
  int64_t i = 0;
  for (int64_t size : shape) right = right && tensor.size(i++) == size;
  STD_TORCH_CHECK(right, SPECDEC_PACKAGE ": ", name, " has a wrong shape or dtype");
}

inline Dtype dtype_of(const Tensor& tensor, const char* name) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      return Dtype::kFloat32;
    case ScalarType::BFloat16:
      return Dtype::kBFloat16;
    case ScalarType::Half:
      return Dtype::kFloat16;
    default:
      STD_TORCH_CHECK(false, SPECDEC_PACKAGE ": ", name, " must be float32, bfloat16 or float16");
  }
}

inline const char* bytes(const Tensor& tensor) { return static_cast<const char*>(tensor.const_data_ptr()); }

inline Tensor dense(const Tensor& tensor) {
  return tensor.is_contiguous() ? tensor : torch::stable::contiguous(tensor);
}

// The tensor, copied unless its last dimension is dense. Other strides may be anything.
inline Tensor with_dense_rows(const Tensor& tensor) {
  const int64_t last = tensor.dim() - 1;
  return tensor.size(last) <= 1 || tensor.stride(last) == 1 ? tensor : torch::stable::contiguous(tensor);
}

// A new dense tensor on the device of `like`. torch::stable::new_empty would look the operation up by its name, which
// takes several times as long as the allocation.
inline Tensor empty_on(const Tensor& like, torch::headeronly::IntHeaderOnlyArrayRef shape, ScalarType dtype) {
  constexpr size_t kMostDimensions = 8;
  STD_TORCH_CHECK(shape.size() <= kMostDimensions, SPECDEC_PACKAGE ": a result has too many dimensions");
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
