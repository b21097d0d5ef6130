// The same as arguments.h for the operations on trees.
#pragma once

#include "arguments.h"

namespace specdec {

template <void (*run)(const DraftChildrenParams&, const Tensor&)>
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> draft_children(
    Tensor logits, Tensor temperature, MaybeTensor filters, MaybeTensor penalties, MaybeTensor table_ids,
    MaybeTensor table_bias, MaybeTensor table_in_prompt, MaybeTensor table_count, MaybeTensor ends,
    MaybeTensor first_end, MaybeTensor drafts, MaybeTensor d2t, Tensor seed, Tensor position, Tensor offset,
    int64_t width, bool sampled) {
  STD_TORCH_CHECK(logits.dim() == 2 && logits.size(1) > 0, "specdec_kernels: logits must be [B, V]");
  STD_TORCH_CHECK(width > 0, "specdec_kernels: width must be positive");
  const int64_t batch = logits.size(0), depth = drafts && drafts->dim() == 2 ? drafts->size(1) : 0;
  SamplingTensors sampling = {temperature, filters, penalties, table_ids, table_bias, table_in_prompt,
                              table_count, ends,    first_end, seed,      position};
  const SamplingArguments sampling_arguments = sampling.prepared(batch);
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
      .dtype = dtype_of(logits),
      .row_stride = stride_in_bytes(logits, 0),
      .batch = batch,
      .vocabulary = logits.size(1),
      .sampling = sampling_arguments,
      .drafts = data_of<int64_t>(drafts),
      .depth = depth,
      .d2t = data_of<int64_t>(d2t),
      .seed = sampling.seed.const_data_ptr<int64_t>(),
      .position = sampling.position.const_data_ptr<int64_t>(),
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
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> verify_tree(
    Tensor target_logits, Tensor node_tokens, Tensor parents, MaybeTensor draft_logits, MaybeTensor d2t,
    MaybeTensor num_nodes, Tensor temperature, MaybeTensor filters, MaybeTensor penalties, MaybeTensor table_ids,
    MaybeTensor table_bias, MaybeTensor table_in_prompt, MaybeTensor table_count, MaybeTensor ends,
    MaybeTensor first_end, Tensor seed, Tensor position, int64_t rule, int64_t depth) {
  STD_TORCH_CHECK(target_logits.dim() == 3 && target_logits.size(1) > 0 && target_logits.size(2) > 0,
                  "specdec_kernels: target_logits must be [B, N+1, V]");
  STD_TORCH_CHECK(rule >= 0 && rule < kNumTreeRules, "specdec_kernels: rule must be an index in ops.TREE_RULES");
  STD_TORCH_CHECK((rule == kTreeWalk) != draft_logits.has_value() && depth >= 0,
                  "specdec_kernels: every rule but walk needs draft_logits, and depth must not be negative");
  const int64_t batch = target_logits.size(0), nodes = target_logits.size(1) - 1, vocabulary = target_logits.size(2);
  SamplingTensors sampling = {temperature, filters, penalties, table_ids, table_bias, table_in_prompt,
                              table_count, ends,    first_end, seed,      position};
  const SamplingArguments sampling_arguments = sampling.prepared(batch);
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
      .seed = sampling.seed.const_data_ptr<int64_t>(),
      .position = sampling.position.const_data_ptr<int64_t>(),
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
