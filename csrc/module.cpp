// Registers the CPU kernels with torch. Schemas and fakes are in specdec_kernels/ops.py.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <optional>
#include <string>
#include <tuple>

#include "cpu/draft_step.h"
#include "cpu/parallel.h"
#include "cpu/speculative_step.h"
#include "torch_glue.h"

namespace specdec::cpu {

void parallel_for_erased(int64_t tasks, int64_t grain, void (*run)(const void* function, int64_t begin, int64_t end),
                         const void* function) {
  torch::stable::parallel_for(0, tasks, grain, [&](int64_t begin, int64_t end) { run(function, begin, end); });
}

}  // namespace specdec::cpu

namespace specdec {
namespace {

cpu::Dtype dtype_of(const Tensor& logits) {
  switch (logits.scalar_type()) {
    case ScalarType::Float:
      return cpu::Dtype::kFloat32;
    case ScalarType::BFloat16:
      return cpu::Dtype::kBFloat16;
    case ScalarType::Half:
      return cpu::Dtype::kFloat16;
    default:
      STD_TORCH_CHECK(false, "specdec_kernels: logits must be float32, bfloat16 or float16");
  }
}

const char* bytes(const Tensor& tensor) { return static_cast<const char*>(tensor.const_data_ptr()); }

int64_t stride_in_bytes(const Tensor& tensor, int64_t dim) {
  return tensor.stride(dim) * static_cast<int64_t>(tensor.element_size());
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> draft_step(Tensor logits, Tensor temperature, Tensor seed,
                                                              Tensor position, int64_t offset) {
  STD_TORCH_CHECK(logits.dim() == 2 && logits.size(1) > 0, "specdec_kernels: logits must be [B, V]");
  const int64_t batch = logits.size(0);
  check_shape(temperature, {batch}, ScalarType::Float, "temperature");
  check_shape(seed, {batch}, ScalarType::Long, "seed");
  check_shape(position, {batch}, ScalarType::Long, "position");
  logits = with_dense_rows(logits);
  temperature = dense(temperature), seed = dense(seed), position = dense(position);
  Tensor tokens = empty_on(logits, {batch}, ScalarType::Long);
  Tensor log_q = empty_on(logits, {batch}, ScalarType::Float);
  Tensor cutoff = empty_on(logits, {batch}, ScalarType::Float);
  Tensor lse = empty_on(logits, {batch}, ScalarType::Float);
  Tensor status = empty_on(logits, {batch}, ScalarType::Int);
  cpu::draft_step({
      .logits = bytes(logits),
      .dtype = dtype_of(logits),
      .row_stride = stride_in_bytes(logits, 0),
      .batch = batch,
      .vocabulary = logits.size(1),
      .temperature = temperature.const_data_ptr<float>(),
      .seed = seed.const_data_ptr<int64_t>(),
      .position = position.const_data_ptr<int64_t>(),
      .offset = offset,
      .tokens = tokens.mutable_data_ptr<int64_t>(),
      .log_q = log_q.mutable_data_ptr<float>(),
      .cutoff = cutoff.mutable_data_ptr<float>(),
      .lse = lse.mutable_data_ptr<float>(),
      .status = status.mutable_data_ptr<int32_t>(),
  });
  return {tokens, log_q, cutoff, lse, status};
}

std::tuple<Tensor, Tensor, Tensor> speculative_step(Tensor target_logits, Tensor draft_tokens,
                                                    std::optional<Tensor> draft_logits, std::optional<Tensor> draft_lse,
                                                    std::optional<Tensor> num_drafts, Tensor temperature, Tensor seed,
                                                    Tensor position) {
  STD_TORCH_CHECK(target_logits.dim() == 3 && target_logits.size(1) > 0 && target_logits.size(2) > 0,
                  "specdec_kernels: target_logits must be [B, K+1, V]");
  const int64_t batch = target_logits.size(0), k = target_logits.size(1) - 1, vocabulary = target_logits.size(2);
  check_shape(draft_tokens, {batch, k}, ScalarType::Long, "draft_tokens");
  check_shape(temperature, {batch}, ScalarType::Float, "temperature");
  check_shape(seed, {batch}, ScalarType::Long, "seed");
  check_shape(position, {batch}, ScalarType::Long, "position");
  target_logits = with_dense_rows(target_logits);
  draft_tokens = dense(draft_tokens);
  temperature = dense(temperature), seed = dense(seed), position = dense(position);
  cpu::LogitRows draft = {};
  if (draft_logits) {
    check_shape(*draft_logits, {batch, k, vocabulary}, draft_logits->scalar_type(), "draft_logits");
    draft_logits = with_dense_rows(*draft_logits);
    draft = {bytes(*draft_logits), dtype_of(*draft_logits), stride_in_bytes(*draft_logits, 0),
             stride_in_bytes(*draft_logits, 1)};
  }
  if (draft_lse) {
    check_shape(*draft_lse, {batch, k}, ScalarType::Float, "draft_lse");
    draft_lse = dense(*draft_lse);
  }
  if (num_drafts) {
    check_shape(*num_drafts, {batch}, ScalarType::Long, "num_drafts");
    num_drafts = dense(*num_drafts);
  }
  Tensor tokens = empty_on(target_logits, {batch, k + 1}, ScalarType::Long);
  Tensor num_accepted = empty_on(target_logits, {batch}, ScalarType::Int);
  Tensor status = empty_on(target_logits, {batch}, ScalarType::Int);
  cpu::speculative_step({
      .target = {bytes(target_logits), dtype_of(target_logits), stride_in_bytes(target_logits, 0),
                 stride_in_bytes(target_logits, 1)},
      .draft = draft,
      .draft_tokens = draft_tokens.const_data_ptr<int64_t>(),
      .draft_lse = draft_lse ? draft_lse->const_data_ptr<float>() : nullptr,
      .num_drafts = num_drafts ? num_drafts->const_data_ptr<int64_t>() : nullptr,
      .temperature = temperature.const_data_ptr<float>(),
      .seed = seed.const_data_ptr<int64_t>(),
      .position = position.const_data_ptr<int64_t>(),
      .batch = batch,
      .num_drafts_max = k,
      .vocabulary = vocabulary,
      .tokens = tokens.mutable_data_ptr<int64_t>(),
      .num_accepted = num_accepted.mutable_data_ptr<int32_t>(),
      .status = status.mutable_data_ptr<int32_t>(),
  });
  return {tokens, num_accepted, status};
}

}  // namespace
}  // namespace specdec

STABLE_TORCH_LIBRARY_IMPL(specdec_kernels, CPU, m) {
  m.impl("draft_step", TORCH_BOX(&specdec::draft_step));
  m.impl("speculative_step", TORCH_BOX(&specdec::speculative_step));
}

namespace {

#define SPECDEC_STRING_(x) #x
#define SPECDEC_STRING(x) SPECDEC_STRING_(x)

PyObject* build(PyObject*, PyObject*) {
  const std::string text = std::string("compiler=" __VERSION__ ";abi_target=" SPECDEC_STRING(SPECDEC_ABI_TARGET)) +
                           ";instruction_set=" + specdec::cpu::block_kernels().instruction_set;
  return PyUnicode_FromStringAndSize(text.data(), static_cast<Py_ssize_t>(text.size()));
}

PyMethodDef methods[] = {{"build", build, METH_NOARGS, "key=value pairs, separated by ';'"},
                         {nullptr, nullptr, 0, nullptr}};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__C() { return PyModule_Create(&module); }
