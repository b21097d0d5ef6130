// The state of a batch's rows before and after a step (specdec_kernels/row_state.py): so little work that each of these
// is one function of tensors.
#pragma once

#include <algorithm>
#include <tuple>

#include "../common/torch_glue.h"

namespace specdec::cpu {

inline std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> place_rows(Tensor known, Tensor room, Tensor wanted,
                                                                     int64_t num_drafts, int64_t trash) {
  STD_TORCH_CHECK(known.dim() == 1 && num_drafts >= 0, "specdec_kernels: known must be [n], num_drafts >= 0");
  const int64_t rows = known.size(0), columns = num_drafts + 2;
  for (const Tensor* tensor : {&known, &room, &wanted}) {
    check_shape(*tensor, {rows}, ScalarType::Long, "known, room or wanted");
  }
  known = dense(known), room = dense(room), wanted = dense(wanted);
  Tensor lengths = empty_on(known, {rows}, ScalarType::Long);
  Tensor positions = empty_on(known, {rows, columns}, ScalarType::Long);
  Tensor slots = empty_on(known, {rows, columns}, ScalarType::Long);
  Tensor allowed = empty_on(known, {rows}, ScalarType::Long);
  Tensor live = empty_on(known, {rows}, ScalarType::Bool);
  for (int64_t b = 0; b < rows; ++b) {
    const int64_t first = known.const_data_ptr<int64_t>()[b] - 2, left = room.const_data_ptr<int64_t>()[b];
    const int64_t drafts = std::clamp(std::min(wanted.const_data_ptr<int64_t>()[b], left - 1), int64_t{0}, num_drafts);
    lengths.mutable_data_ptr<int64_t>()[b] = std::max(first + 1, int64_t{0});
    allowed.mutable_data_ptr<int64_t>()[b] = drafts;
    live.mutable_data_ptr<bool>()[b] = left > 0;
    int64_t* const position = positions.mutable_data_ptr<int64_t>() + b * columns;
    int64_t* const slot = slots.mutable_data_ptr<int64_t>() + b * columns;
    for (int64_t i = 0; i < columns; ++i) {
      const bool counts = left > 0 && i < drafts + 2 && first + i >= 0;
      position[i] = counts ? first + i : 0;
      slot[i] = counts ? first + i : trash;
    }
  }
  return {lengths, positions, slots, allowed, live};
}

inline Tensor advance_rows(Tensor state, Tensor tokens, Tensor num_emitted, Tensor status, int64_t faults) {
  constexpr int64_t kKnown = 0, kRoom = 1, kLastTwo = 3, kEnds = 5;
  STD_TORCH_CHECK(state.dim() == 2 && state.size(0) >= kEnds && state.scalar_type() == ScalarType::Long &&
                      (state.size(1) <= 1 || state.stride(1) == 1),
                  "specdec_kernels: state must be [5 + E, n] int64, with dense rows");
  const int64_t num_ends = state.size(0) - kEnds, rows = state.size(1), pitch = state.stride(0);
  const int64_t width = tokens.dim() == 2 ? tokens.size(1) : 0;
  check_shape(tokens, {rows, width}, ScalarType::Long, "tokens");
  check_shape(num_emitted, {rows}, ScalarType::Int, "num_emitted");
  check_shape(status, {rows}, ScalarType::Int, "status");
  tokens = dense(tokens), num_emitted = dense(num_emitted), status = dense(status);
  Tensor counts = empty_on(state, {rows}, ScalarType::Long);
  for (int64_t b = 0; b < rows; ++b) {
    int64_t* const mine = state.mutable_data_ptr<int64_t>() + b;
    const int64_t* const emitted = tokens.const_data_ptr<int64_t>() + b * width;
    int64_t &known = mine[kKnown * pitch], &room = mine[kRoom * pitch];
    int64_t &second = mine[kLastTwo * pitch], &last = mine[(kLastTwo + 1) * pitch];
    const auto ends = [&](int64_t token) {
      for (int64_t e = 0; e < num_ends; ++e) {
        if (mine[(kEnds + e) * pitch] == token) return true;
      }
      return false;
    };
    const int64_t most = std::min<int64_t>(num_emitted.const_data_ptr<int32_t>()[b], width);
    int64_t count = 0;
    bool ended = (status.const_data_ptr<int32_t>()[b] & faults) != 0;
    if (room > 0) {
      while (count < most) {
        const int64_t token = emitted[count++];
        second = last, last = token;
        if (ends(token)) {
          ended = true;
          break;
        }
      }
    }
    known += count;
    room = ended ? 0 : room - count;
    counts.mutable_data_ptr<int64_t>()[b] = count;
  }
  return counts;
}

}  // namespace specdec::cpu
