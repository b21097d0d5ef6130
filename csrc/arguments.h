// Turns the operations' arguments, torch tensors, into structs of raw pointers for native code on any device. Schemas
// and fakes are in specdec_kernels/ops.py.
#pragma once

#include <optional>
#include <tuple>

#include "core/params.h"
#include "torch_glue.h"

namespace specdec {

inline Dtype dtype_of(const Tensor& logits) {
  switch (logits.scalar_type()) {
    case ScalarType::Float:
      return Dtype::kFloat32;
    case ScalarType::BFloat16:
      return Dtype::kBFloat16;
    case ScalarType::Half:
      return Dtype::kFloat16;
    default:
      STD_TORCH_CHECK(false, "specdec_kernels: logits must be float32, bfloat16 or float16");
  }
}

inline const char* bytes(const Tensor& tensor) { return static_cast<const char*>(tensor.const_data_ptr()); }

inline int64_t stride_in_bytes(const Tensor& tensor, int64_t dim) {
  return tensor.stride(dim) * static_cast<int64_t>(tensor.element_size());
}

using MaybeTensor = std::optional<Tensor>;

template <class T>
const T* data_of(const MaybeTensor& tensor) {
  return tensor ? tensor->const_data_ptr<T>() : nullptr;
}

// Checks a tensor, if there is one, and makes it dense.
inline void prepare(MaybeTensor& tensor, std::initializer_list<int64_t> shape, ScalarType dtype, const char* name) {
  if (!tensor) return;
  check_shape(*tensor, shape, dtype, name);
  tensor = dense(*tensor);
}

inline void prepare(Tensor& tensor, std::initializer_list<int64_t> shape, ScalarType dtype, const char* name) {
  check_shape(tensor, shape, dtype, name);
  tensor = dense(tensor);
}

// The arguments that all operations share: `_SAMPLING` in ops.py, and where a sequence's random numbers begin.
struct SamplingTensors {
  Tensor temperature;
  MaybeTensor filters, penalties, table_ids, table_bias, table_in_prompt, table_count, ends, first_end;
  Tensor seed, position;

  SamplingArguments prepared(int64_t batch) {
    prepare(temperature, {batch}, ScalarType::Float, "temperature");
    prepare(filters, {batch, 3}, ScalarType::Float, "filters");
    prepare(penalties, {batch, 3}, ScalarType::Float, "penalties");
    const int64_t size = table_ids && table_ids->dim() == 2 ? table_ids->size(1) : 0;
    const int64_t num_ends = ends && ends->dim() == 2 ? ends->size(1) : 0;
    prepare(table_ids, {batch, size}, ScalarType::Long, "table_ids");
    prepare(table_bias, {batch, size}, ScalarType::Float, "table_bias");
    prepare(table_in_prompt, {batch, size}, ScalarType::Bool, "table_in_prompt");
    prepare(table_count, {batch, size}, ScalarType::Int, "table_count");
    prepare(ends, {batch, num_ends}, ScalarType::Long, "ends");
    prepare(first_end, {batch}, ScalarType::Long, "first_end");
    prepare(seed, {batch}, ScalarType::Long, "seed");
    prepare(position, {batch}, ScalarType::Long, "position");
    STD_TORCH_CHECK(table_ids.has_value() == (table_bias && table_in_prompt && table_count),
                    "specdec_kernels: a table has ids, bias, in_prompt and count");
    STD_TORCH_CHECK(ends.has_value() == first_end.has_value() && (table_ids || (!ends && !penalties)),
                    "specdec_kernels: penalties, ends and first_end belong to a table");
    return {
        .has_table = table_ids.has_value(),
        .temperature = temperature.const_data_ptr<float>(),
        .filters = data_of<float>(filters),
        .penalties = data_of<float>(penalties),
        .table_ids = data_of<int64_t>(table_ids),
        .table_bias = data_of<float>(table_bias),
        .table_in_prompt = data_of<bool>(table_in_prompt),
        .table_count = data_of<int32_t>(table_count),
        .ends = data_of<int64_t>(ends),
        .first_end = data_of<int64_t>(first_end),
        .table_size = size,
        .num_ends = num_ends,
    };
  }
};

inline LogitRows rows_of(const Tensor& logits) {
  return {bytes(logits), dtype_of(logits), stride_in_bytes(logits, 0), stride_in_bytes(logits, 1), logits.size(2)};
}

// The draft's logits [B, rows, V], or the length of d2t in the place of V, if there are any.
inline LogitRows prepared_draft(MaybeTensor& logits, MaybeTensor& d2t, int64_t batch, int64_t rows,
                                int64_t vocabulary) {
  if (!logits) return {};
  const int64_t width = d2t && d2t->dim() == 1 ? d2t->size(0) : vocabulary;
  check_shape(*logits, {batch, rows, width}, logits->scalar_type(), "draft_logits");
  prepare(d2t, {width}, ScalarType::Long, "d2t");
  logits = with_dense_rows(*logits);
  return rows_of(*logits);
}

inline Rule rule_of(int64_t rule) {
  STD_TORCH_CHECK(rule >= 0 && rule < kNumRules, "specdec_kernels: rule must be an index in ops.RULES");
  return static_cast<Rule>(rule);
}

template <void (*run)(const DraftStepParams&, const Tensor&)>
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> draft_step(
    Tensor logits, Tensor temperature, MaybeTensor filters, MaybeTensor penalties, MaybeTensor table_ids,
    MaybeTensor table_bias, MaybeTensor table_in_prompt, MaybeTensor table_count, MaybeTensor ends,
    MaybeTensor first_end, MaybeTensor drafts, MaybeTensor d2t, Tensor seed, Tensor position, int64_t offset,
    int64_t rule, int64_t compact) {
  STD_TORCH_CHECK(logits.dim() == 2 && logits.size(1) > 0, "specdec_kernels: logits must be [B, V]");
  STD_TORCH_CHECK(compact >= 0 && offset >= 0, "specdec_kernels: compact and offset must not be negative");
  const int64_t batch = logits.size(0);
  SamplingTensors sampling = {temperature, filters, penalties, table_ids, table_bias, table_in_prompt,
                              table_count, ends,    first_end, seed,      position};
  const SamplingArguments sampling_arguments = sampling.prepared(batch);
  prepare(drafts, {batch, offset}, ScalarType::Long, "drafts");
  prepare(d2t, {logits.size(1)}, ScalarType::Long, "d2t");
  logits = with_dense_rows(logits);
  Tensor tokens = empty_on(logits, {batch}, ScalarType::Long);
  Tensor log_q = empty_on(logits, {batch}, ScalarType::Float);
  Tensor cutoff = empty_on(logits, {batch}, ScalarType::Float);
  Tensor lse = empty_on(logits, {batch}, ScalarType::Float);
  Tensor status = empty_on(logits, {batch}, ScalarType::Int);
  Tensor compact_ids = empty_on(logits, {batch, compact}, ScalarType::Long);
  Tensor compact_log_q = empty_on(logits, {batch, compact}, ScalarType::Float);
  const DraftStepParams params = {
      .logits = bytes(logits),
      .dtype = dtype_of(logits),
      .row_stride = stride_in_bytes(logits, 0),
      .batch = batch,
      .vocabulary = logits.size(1),
      .sampling = sampling_arguments,
      .drafts = data_of<int64_t>(drafts),
      .d2t = data_of<int64_t>(d2t),
      .seed = sampling.seed.const_data_ptr<int64_t>(),
      .position = sampling.position.const_data_ptr<int64_t>(),
      .offset = offset,
      .coupled = rule_of(rule) == kRuleCoupled,
      .compact = compact,
      .tokens = tokens.mutable_data_ptr<int64_t>(),
      .log_q = log_q.mutable_data_ptr<float>(),
      .cutoff = cutoff.mutable_data_ptr<float>(),
      .lse = lse.mutable_data_ptr<float>(),
      .status = status.mutable_data_ptr<int32_t>(),
      .compact_ids = compact_ids.mutable_data_ptr<int64_t>(),
      .compact_log_q = compact_log_q.mutable_data_ptr<float>(),
  };
  run(params, logits);
  return {tokens, log_q, cutoff, lse, status, compact_ids, compact_log_q};
}

template <void (*run)(const SpeculativeStepParams&, const Tensor&)>
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> speculative_step(
    Tensor target_logits, Tensor draft_tokens, MaybeTensor draft_logits, MaybeTensor draft_cutoff,
    MaybeTensor draft_lse, MaybeTensor compact_ids, MaybeTensor compact_log_q, MaybeTensor d2t, MaybeTensor num_drafts,
    Tensor temperature, MaybeTensor filters, MaybeTensor penalties, MaybeTensor table_ids, MaybeTensor table_bias,
    MaybeTensor table_in_prompt, MaybeTensor table_count, MaybeTensor ends, MaybeTensor first_end, Tensor seed,
    Tensor position, int64_t rule, bool log_probs) {
  STD_TORCH_CHECK(target_logits.dim() == 3 && target_logits.size(1) > 0 && target_logits.size(2) > 0,
                  "specdec_kernels: target_logits must be [B, K+1, V]");
  const int64_t batch = target_logits.size(0), k = target_logits.size(1) - 1, vocabulary = target_logits.size(2);
  SamplingTensors sampling = {temperature, filters, penalties, table_ids, table_bias, table_in_prompt,
                              table_count, ends,    first_end, seed,      position};
  const SamplingArguments sampling_arguments = sampling.prepared(batch);
  prepare(draft_tokens, {batch, k}, ScalarType::Long, "draft_tokens");
  prepare(num_drafts, {batch}, ScalarType::Long, "num_drafts");
  prepare(draft_cutoff, {batch, k}, ScalarType::Float, "draft_cutoff");
  prepare(draft_lse, {batch, k}, ScalarType::Float, "draft_lse");
  target_logits = with_dense_rows(target_logits);
  const LogitRows draft = prepared_draft(draft_logits, d2t, batch, k, vocabulary);
  STD_TORCH_CHECK(draft_cutoff.has_value() == draft_lse.has_value() && (draft_logits || (!draft_lse && !d2t)),
                  "specdec_kernels: draft_cutoff, draft_lse and d2t belong to draft_logits");
  const int64_t compact_size = compact_ids && compact_ids->dim() == 3 ? compact_ids->size(2) : 0;
  STD_TORCH_CHECK(compact_ids.has_value() == compact_log_q.has_value() && !(compact_ids && draft_logits),
                  "specdec_kernels: compact_ids and compact_log_q belong together, and replace draft_logits");
  if (compact_log_q && compact_log_q->scalar_type() != ScalarType::Float) {
    compact_log_q = torch::stable::to(*compact_log_q, ScalarType::Float);
  }
  prepare(compact_ids, {batch, k, compact_size}, ScalarType::Long, "compact_ids");
  prepare(compact_log_q, {batch, k, compact_size}, ScalarType::Float, "compact_log_q");
  Tensor tokens = empty_on(target_logits, {batch, k + 1}, ScalarType::Long);
  Tensor num_accepted = empty_on(target_logits, {batch}, ScalarType::Int);
  Tensor status = empty_on(target_logits, {batch}, ScalarType::Int);
  Tensor num_emitted = empty_on(target_logits, {batch}, ScalarType::Int);
  Tensor processed = empty_on(target_logits, {batch, log_probs ? k + 1 : 0}, ScalarType::Float);
  Tensor raw = empty_on(target_logits, {batch, log_probs ? k + 1 : 0}, ScalarType::Float);
  const SpeculativeStepParams params = {
      .target = rows_of(target_logits),
      .draft_tokens = draft_tokens.const_data_ptr<int64_t>(),
      .draft = draft,
      .draft_cutoff = data_of<float>(draft_cutoff),
      .draft_lse = data_of<float>(draft_lse),
      .d2t = data_of<int64_t>(d2t),
      .compact_ids = data_of<int64_t>(compact_ids),
      .compact_log_q = data_of<float>(compact_log_q),
      .compact_size = compact_size,
      .num_drafts = data_of<int64_t>(num_drafts),
      .sampling = sampling_arguments,
      .seed = sampling.seed.const_data_ptr<int64_t>(),
      .position = sampling.position.const_data_ptr<int64_t>(),
      .batch = batch,
      .num_drafts_max = k,
      .vocabulary = vocabulary,
      .rule = rule_of(rule),
      .tokens = tokens.mutable_data_ptr<int64_t>(),
      .num_accepted = num_accepted.mutable_data_ptr<int32_t>(),
      .status = status.mutable_data_ptr<int32_t>(),
      .num_emitted = num_emitted.mutable_data_ptr<int32_t>(),
      .log_probs = log_probs ? processed.mutable_data_ptr<float>() : nullptr,
      .raw_log_probs = log_probs ? raw.mutable_data_ptr<float>() : nullptr,
  };
  run(params, target_logits);
  return {tokens, num_accepted, status, num_emitted, processed, raw};
}

}  // namespace specdec
