// Turns the operations' arguments, torch tensors, into structs of raw pointers for native code on any device. Schemas
// and fakes are in specdec_kernels/ops.py.
#pragma once

#include <tuple>
#include <vector>

#include "common/torch_glue.h"
#include "core/params.h"

namespace specdec {

inline int64_t stride_in_bytes(const Tensor& tensor, int64_t dim) {
  return tensor.stride(dim) * static_cast<int64_t>(tensor.element_size());
}

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

// SamplingTensors of ops.py, in its order: the schemas' `sampling`.
using SamplingTensors = std::vector<MaybeTensor>;

// Checks `sampling` and makes its tensors dense. The result points into them.
inline SamplingArguments prepared_sampling(SamplingTensors& sampling, int64_t batch) {
  STD_TORCH_CHECK(sampling.size() == 9 && sampling[0], "specdec_kernels: sampling must be the nine SamplingTensors");
  MaybeTensor &temperature = sampling[0], &filters = sampling[1], &penalties = sampling[2];
  MaybeTensor &ids = sampling[3], &bias = sampling[4], &in_prompt = sampling[5], &count = sampling[6];
  MaybeTensor &ends = sampling[7], &first_end = sampling[8];
  const int64_t size = ids && ids->dim() == 2 ? ids->size(1) : 0;
  const int64_t num_ends = ends && ends->dim() == 2 ? ends->size(1) : 0;
  prepare(temperature, {batch}, ScalarType::Float, "temperature");
  prepare(filters, {batch, 3}, ScalarType::Float, "filters");
  prepare(penalties, {batch, 3}, ScalarType::Float, "penalties");
  prepare(ids, {batch, size}, ScalarType::Long, "table_ids");
  prepare(bias, {batch, size}, ScalarType::Float, "table_bias");
  prepare(in_prompt, {batch, size}, ScalarType::Bool, "table_in_prompt");
  prepare(count, {batch, size}, ScalarType::Int, "table_count");
  prepare(ends, {batch, num_ends}, ScalarType::Long, "ends");
  prepare(first_end, {batch}, ScalarType::Long, "first_end");
  STD_TORCH_CHECK(ids.has_value() == (bias && in_prompt && count),
                  "specdec_kernels: a table has ids, bias, in_prompt and count");
  STD_TORCH_CHECK(ends.has_value() == first_end.has_value() && (ids || (!ends && !penalties)),
                  "specdec_kernels: penalties, ends and first_end belong to a table");
  return {
      .has_table = ids.has_value(),
      .temperature = data_of<float>(temperature),
      .filters = data_of<float>(filters),
      .penalties = data_of<float>(penalties),
      .table_ids = data_of<int64_t>(ids),
      .table_bias = data_of<float>(bias),
      .table_in_prompt = data_of<bool>(in_prompt),
      .table_count = data_of<int32_t>(count),
      .ends = data_of<int64_t>(ends),
      .first_end = data_of<int64_t>(first_end),
      .table_size = size,
      .num_ends = num_ends,
  };
}

// The words that have a bit for each of these tokens.
inline int64_t words_of(int64_t tokens) { return (tokens + 31) / 32; }

// allowed [rows..., W], if there is any, made dense. The result points into it.
inline AllowedRows prepared_allowed(MaybeTensor& allowed, std::initializer_list<int64_t> shape) {
  prepare(allowed, shape, ScalarType::Int, "allowed");
  return {data_of<int32_t>(allowed), shape.end()[-1]};
}

inline LogitRows rows_of(const Tensor& logits) {
  return {bytes(logits), dtype_of(logits, "logits"), stride_in_bytes(logits, 0), stride_in_bytes(logits, 1),
          logits.size(2)};
}

// The draft's logits [B, rows, V], or the length of d2t instead of V, if there are any.
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
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> draft_step(Tensor logits, SamplingTensors sampling,
                                                              MaybeTensor drafts, MaybeTensor d2t, MaybeTensor allowed,
                                                              Tensor seed, Tensor position, int64_t offset,
                                                              int64_t rule) {
  STD_TORCH_CHECK(logits.dim() == 2 && logits.size(1) > 0, "specdec_kernels: logits must be [B, V]");
  STD_TORCH_CHECK(offset >= 0, "specdec_kernels: offset must not be negative");
  const int64_t batch = logits.size(0);
  const SamplingArguments sampling_arguments = prepared_sampling(sampling, batch);
  prepare(seed, {batch}, ScalarType::Long, "seed");
  prepare(position, {batch}, ScalarType::Long, "position");
  prepare(drafts, {batch, offset}, ScalarType::Long, "drafts");
  prepare(d2t, {logits.size(1)}, ScalarType::Long, "d2t");
  const int64_t mapped_words = allowed && allowed->dim() == 2 ? allowed->size(1) : 0;
  const AllowedRows allowed_rows = prepared_allowed(allowed, {batch, d2t ? mapped_words : words_of(logits.size(1))});
  logits = with_dense_rows(logits);
  Tensor tokens = empty_on(logits, {batch}, ScalarType::Long);
  Tensor log_q = empty_on(logits, {batch}, ScalarType::Float);
  Tensor cutoff = empty_on(logits, {batch}, ScalarType::Float);
  Tensor lse = empty_on(logits, {batch}, ScalarType::Float);
  Tensor status = empty_on(logits, {batch}, ScalarType::Int);
  const DraftStepParams params = {
      .logits = bytes(logits),
      .dtype = dtype_of(logits, "logits"),
      .row_stride = stride_in_bytes(logits, 0),
      .batch = batch,
      .vocabulary = logits.size(1),
      .sampling = sampling_arguments,
      .drafts = data_of<int64_t>(drafts),
      .d2t = data_of<int64_t>(d2t),
      .allowed = allowed_rows,
      .seed = seed.const_data_ptr<int64_t>(),
      .position = position.const_data_ptr<int64_t>(),
      .offset = offset,
      .coupled = rule_of(rule) == kRuleCoupled,
      .tokens = tokens.mutable_data_ptr<int64_t>(),
      .log_q = log_q.mutable_data_ptr<float>(),
      .cutoff = cutoff.mutable_data_ptr<float>(),
      .lse = lse.mutable_data_ptr<float>(),
      .status = status.mutable_data_ptr<int32_t>(),
  };
  run(params, logits);
  return {tokens, log_q, cutoff, lse, status};
}

template <void (*run)(const SpeculativeStepParams&, const Tensor&)>
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> speculative_step(
    Tensor target_logits, Tensor draft_tokens, MaybeTensor draft_logits, MaybeTensor draft_cutoff,
    MaybeTensor draft_lse, MaybeTensor d2t, MaybeTensor num_drafts, SamplingTensors sampling, MaybeTensor allowed,
    int64_t masked_drafts, Tensor seed, Tensor position, int64_t rule, bool log_probs) {
  STD_TORCH_CHECK(target_logits.dim() == 3 && target_logits.size(1) > 0 && target_logits.size(2) > 0,
                  "specdec_kernels: target_logits must be [B, K+1, V]");
  const int64_t batch = target_logits.size(0), k = target_logits.size(1) - 1, vocabulary = target_logits.size(2);
  const SamplingArguments sampling_arguments = prepared_sampling(sampling, batch);
  prepare(seed, {batch}, ScalarType::Long, "seed");
  prepare(position, {batch}, ScalarType::Long, "position");
  prepare(draft_tokens, {batch, k}, ScalarType::Long, "draft_tokens");
  prepare(num_drafts, {batch}, ScalarType::Long, "num_drafts");
  prepare(draft_cutoff, {batch, k}, ScalarType::Float, "draft_cutoff");
  prepare(draft_lse, {batch, k}, ScalarType::Float, "draft_lse");
  const AllowedRows allowed_rows = prepared_allowed(allowed, {batch, k + 1, words_of(vocabulary)});
  target_logits = with_dense_rows(target_logits);
  const LogitRows draft = prepared_draft(draft_logits, d2t, batch, k, vocabulary);
  STD_TORCH_CHECK(draft_cutoff.has_value() == draft_lse.has_value() && (draft_logits || (!draft_lse && !d2t)),
                  "specdec_kernels: draft_cutoff, draft_lse and d2t belong to draft_logits");
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
      .num_drafts = data_of<int64_t>(num_drafts),
      .sampling = sampling_arguments,
      .allowed = allowed_rows,
      .masked_drafts = masked_drafts,
      .seed = seed.const_data_ptr<int64_t>(),
      .position = position.const_data_ptr<int64_t>(),
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

template <void (*run)(const DraftChildrenParams&, const Tensor&)>
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> draft_children(Tensor logits, SamplingTensors sampling,
                                                                  MaybeTensor drafts, MaybeTensor d2t, Tensor seed,
                                                                  Tensor position, Tensor offset, int64_t width,
                                                                  bool sampled) {
  STD_TORCH_CHECK(logits.dim() == 2 && logits.size(1) > 0, "specdec_kernels: logits must be [B, V]");
  STD_TORCH_CHECK(width > 0, "specdec_kernels: width must be positive");
  const int64_t batch = logits.size(0), depth = drafts && drafts->dim() == 2 ? drafts->size(1) : 0;
  const SamplingArguments sampling_arguments = prepared_sampling(sampling, batch);
  prepare(seed, {batch}, ScalarType::Long, "seed");
  prepare(position, {batch}, ScalarType::Long, "position");
  prepare(drafts, {batch, depth}, ScalarType::Long, "drafts");
  prepare(d2t, {logits.size(1)}, ScalarType::Long, "d2t");
  prepare(offset, {batch}, ScalarType::Long, "offset");
  logits = with_dense_rows(logits);
  Tensor tokens = empty_on(logits, {batch, width}, ScalarType::Long);
  Tensor log_q = empty_on(logits, {batch, width}, ScalarType::Float);
  Tensor cutoff = empty_on(logits, {batch}, ScalarType::Float);
  Tensor lse = empty_on(logits, {batch}, ScalarType::Float);
  Tensor status = empty_on(logits, {batch}, ScalarType::Int);
  const DraftChildrenParams params = {
      .logits = bytes(logits),
      .dtype = dtype_of(logits, "logits"),
      .row_stride = stride_in_bytes(logits, 0),
      .batch = batch,
      .vocabulary = logits.size(1),
      .sampling = sampling_arguments,
      .drafts = data_of<int64_t>(drafts),
      .depth = depth,
      .d2t = data_of<int64_t>(d2t),
      .seed = seed.const_data_ptr<int64_t>(),
      .position = position.const_data_ptr<int64_t>(),
      .offset = offset.const_data_ptr<int64_t>(),
      .width = width,
      .sampled = sampled,
      .tokens = tokens.mutable_data_ptr<int64_t>(),
      .log_q = log_q.mutable_data_ptr<float>(),
      .cutoff = cutoff.mutable_data_ptr<float>(),
      .lse = lse.mutable_data_ptr<float>(),
      .status = status.mutable_data_ptr<int32_t>(),
  };
  run(params, logits);
  return {tokens, log_q, cutoff, lse, status};
}

template <void (*run)(const VerifyTreeParams&, const Tensor&)>
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> verify_tree(Tensor target_logits, Tensor node_tokens, Tensor parents,
                                                               MaybeTensor draft_logits, MaybeTensor d2t,
                                                               MaybeTensor num_nodes, SamplingTensors sampling,
                                                               Tensor seed, Tensor position, int64_t rule,
                                                               int64_t depth) {
  STD_TORCH_CHECK(target_logits.dim() == 3 && target_logits.size(1) > 0 && target_logits.size(2) > 0,
                  "specdec_kernels: target_logits must be [B, N+1, V]");
  STD_TORCH_CHECK(rule >= 0 && rule < kNumTreeRules, "specdec_kernels: rule must be an index in ops.TREE_RULES");
  STD_TORCH_CHECK((rule == kTreeWalk) != draft_logits.has_value() && depth >= 0,
                  "specdec_kernels: every rule but walk needs draft_logits, and depth must not be negative");
  const int64_t batch = target_logits.size(0), nodes = target_logits.size(1) - 1, vocabulary = target_logits.size(2);
  const SamplingArguments sampling_arguments = prepared_sampling(sampling, batch);
  prepare(seed, {batch}, ScalarType::Long, "seed");
  prepare(position, {batch}, ScalarType::Long, "position");
  prepare(node_tokens, {batch, nodes}, ScalarType::Long, "node_tokens");
  prepare(parents, {batch, nodes}, ScalarType::Long, "parents");
  prepare(num_nodes, {batch}, ScalarType::Long, "num_nodes");
  target_logits = with_dense_rows(target_logits);
  STD_TORCH_CHECK(draft_logits || !d2t, "specdec_kernels: d2t belongs to draft_logits");
  const LogitRows draft = prepared_draft(draft_logits, d2t, batch, nodes + 1, vocabulary);
  Tensor path = empty_on(target_logits, {batch, depth + 1}, ScalarType::Long);
  Tensor tokens = empty_on(target_logits, {batch, depth + 1}, ScalarType::Long);
  Tensor num_accepted = empty_on(target_logits, {batch}, ScalarType::Int);
  Tensor num_emitted = empty_on(target_logits, {batch}, ScalarType::Int);
  Tensor status = empty_on(target_logits, {batch}, ScalarType::Int);
  const VerifyTreeParams params = {
      .target = rows_of(target_logits),
      .node_tokens = node_tokens.const_data_ptr<int64_t>(),
      .parents = parents.const_data_ptr<int64_t>(),
      .draft = draft,
      .d2t = data_of<int64_t>(d2t),
      .num_nodes = data_of<int64_t>(num_nodes),
      .sampling = sampling_arguments,
      .seed = seed.const_data_ptr<int64_t>(),
      .position = position.const_data_ptr<int64_t>(),
      .batch = batch,
      .nodes = nodes,
      .vocabulary = vocabulary,
      .depth = depth,
      .rule = static_cast<TreeRule>(rule),
      .path = path.mutable_data_ptr<int64_t>(),
      .tokens = tokens.mutable_data_ptr<int64_t>(),
      .num_accepted = num_accepted.mutable_data_ptr<int32_t>(),
      .num_emitted = num_emitted.mutable_data_ptr<int32_t>(),
      .status = status.mutable_data_ptr<int32_t>(),
  };
  run(params, target_logits);
  return {path, tokens, num_accepted, num_emitted, status};
}

}  // namespace specdec
