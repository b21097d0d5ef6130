// How draft_step and draft_children begin: with a sequence's row of logits, and the statistics of its blocks.
#pragma once

#include "row_draws.h"

namespace specdec::cuda {

// `masked`: whether only some tokens may follow.
template <class Params>
Items items_of_drafting(const Params& params, bool masked) {
  const LogitRows rows = {params.logits, params.dtype, params.row_stride, params.row_stride, params.vocabulary};
  return {blocks_of(params.vocabulary), block_bytes(rows),
          own_copy_of(params.sampling, masked, aligned(rows), block_bytes(rows))};
}

// The row of sequence b. `depth`: how many drafts come before it.
template <class Params>
SPECDEC_DEVICE Row row_to_draft_from(const Params& params, int64_t b, int64_t depth, const Ring& ring, char* own_copy,
                                     const AllowedRows* masks = nullptr) {
  const bool counted = params.drafts != nullptr;
  return {params.logits + b * params.row_stride,
          params.dtype,
          params.vocabulary,
          params.d2t,
          &params.sampling,
          b,
          params.position[b],
          counted ? params.drafts + b * depth : nullptr,
          counted ? depth : 0,
          ring.kept(),
          0,
          own_copy,
          masks,
          static_cast<int>(b)};
}

// Computes the statistics of every block of the row. `s`: what every thread of the cluster knows of its sequence.
template <class Sequence>
SPECDEC_DEVICE void measure_row(const Sequence& s, const Place& place) {
  const int n = s.memory.blocks.n;
  const Measured measured = {{s.row.data, 0, s.row.size, s.row.dtype}, {}, n, n};
  simt::arrive_only();
  begin_copies(s.memory.ring, measured, place);
  simt::wait_cluster();  // now all blocks run, and may write to each other's memory
  measure(measured, s.memory.ring, place, {s.memory.blocks.max, s.memory.blocks.mass, false, nullptr, nullptr, n, 0},
          s.params.sampling.has_table || s.row.allowed().words != nullptr, s.inverse_temperature,
          [&](int) { return s.row; });
}

}  // namespace specdec::cuda
