// The operations of recurrent layers: from torch's tensors to the kernels' parameters.
#pragma once

#include "cpu/recurrent.h"
#include "program.h"

namespace specdec::cpu {

// A dense tensor, or none, which becomes what the parameters have.
struct Argument {
  MaybeTensor tensor;
  void* data;
  const char* name;

  operator float*() const { return static_cast<float*>(checked()); }
  operator const float*() const { return static_cast<const float*>(checked()); }

 private:
  void* checked() const {
    STD_TORCH_CHECK(!tensor || tensor->scalar_type() == ScalarType::Float, "specdec_layers: ", name,
                    " has a wrong shape or dtype");
    return data;
  }
};

// A tensor that an operation writes. A copy would be lost.
inline Argument written(const Tensor& tensor, std::initializer_list<int64_t> shape, ScalarType dtype,
                        const char* name) {
  check_shape(tensor, shape, dtype, name);
  STD_TORCH_CHECK(tensor.is_contiguous(), "specdec_layers: ", name, " is not contiguous");
  return {tensor, tensor.mutable_data_ptr(), name};
}

inline int64_t* written_base(Tensor& base, int64_t held) {
  return static_cast<int64_t*>(written(base, {held}, ScalarType::Long, "base").data);
}

inline Argument read(const MaybeTensor& tensor, std::initializer_list<int64_t> shape, const char* name) {
  if (!tensor) return {};
  check_shape(*tensor, shape, tensor->scalar_type(), name);
  const Tensor own = dense(*tensor);
  return {own, const_cast<void*>(own.const_data_ptr()), name};
}

// Keeps the dense tensors that the kernels' Feed points into.
struct FeedArguments {
  Tensor start, commit, valid;
  MaybeTensor parents;
  Feed feed;

  FeedArguments(const Tensor& starts, const Tensor& commits, const Tensor& valids, const MaybeTensor& above,
                int64_t first_row, int64_t rows_held, int64_t places)
      : start(dense(starts)), commit(dense(commits)), valid(dense(valids)) {
    STD_TORCH_CHECK(valid.dim() == 2, "specdec_layers: valid has a wrong shape");
    const int64_t rows = valid.size(0), columns = valid.size(1);
    check_shape(start, {rows}, ScalarType::Long, "start");
    check_shape(commit, {rows}, ScalarType::Long, "commit");
    check_shape(valid, {rows, columns}, ScalarType::Bool, "valid");
    STD_TORCH_CHECK(first_row >= 0 && first_row + rows <= rows_held && places > 0,
                    "specdec_layers: first_row is out of range, or a window has no place");
    if (above) {
      check_shape(*above, {rows, columns}, ScalarType::Long, "parents");
      parents = dense(*above);
    }
    feed = {start.const_data_ptr<int64_t>(),
            commit.const_data_ptr<int64_t>(),
            valid.const_data_ptr<bool>(),
            parents ? parents->const_data_ptr<int64_t>() : nullptr,
            rows,
            columns,
            first_row,
            places};
  }
};

inline Tensor conv_window_op(Tensor window, Tensor x, Tensor weight, MaybeTensor bias, bool silu, Tensor start,
                             Tensor valid, MaybeTensor parents, int64_t first_row) {
  STD_TORCH_CHECK(window.dim() == 3 && x.dim() == 3 && weight.dim() == 2, "specdec_layers: x has a wrong shape");
  const int64_t held = window.size(0), places = window.size(1), channels = window.size(2), taps = weight.size(1);
  const FeedArguments at(start, start, valid, parents, first_row, held, places);
  STD_TORCH_CHECK(taps >= 1 && taps <= places && taps <= kMostTaps,
                  "specdec_layers: weight has more taps than the window has places, or than 16");
  Tensor y = result_on(x, {at.feed.rows, at.feed.columns, channels}, x.scalar_type());
  conv_window(ConvWindowParams{
      .window = written(window, {held, places, channels}, x.scalar_type(), "window"),
      .x = read(x, {at.feed.rows, at.feed.columns, channels}, "x"),
      .weight = read(weight, {channels, taps}, "weight"),
      .bias = read(bias, {channels}, "bias"),
      .y = Argument{y, y.mutable_data_ptr(), "y"},
      .feed = at.feed,
      .channels = channels,
      .taps = taps,
      .silu = silu,
  });
  return y;
}

inline Tensor delta_step_op(Tensor state, Tensor base, Tensor window_k, Tensor window_v, Tensor window_g,
                            Tensor window_beta, Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor start,
                            Tensor commit, Tensor valid, MaybeTensor parents, int64_t first_row, bool keep,
                            bool normalize) {
  STD_TORCH_CHECK(state.dim() == 4 && window_k.dim() == 4 && (g.dim() == 3 || g.dim() == 4),
                  "specdec_layers: state, window_k or g has a wrong shape");
  const int64_t held = state.size(0), heads = state.size(1), dk = state.size(2), dv = state.size(3);
  const int64_t places = window_k.size(1), key_heads = window_k.size(2);
  STD_TORCH_CHECK(key_heads > 0 && heads % key_heads == 0, "specdec_layers: the heads do not divide into key heads");
  const FeedArguments at(start, commit, valid, parents, first_row, held, places);
  const int64_t rows = at.feed.rows, columns = at.feed.columns;
  const bool by_channel = g.dim() == 4;
  Tensor out = result_on(q, {rows, columns, heads, dv}, ScalarType::Float);
  delta_step(DeltaStepParams{
      .state = written(state, {held, heads, dk, dv}, ScalarType::Float, "state"),
      .base = written_base(base, held),
      .window_k = written(window_k, {held, places, key_heads, dk}, k.scalar_type(), "window_k"),
      .window_v = written(window_v, {held, places, heads, dv}, v.scalar_type(), "window_v"),
      .window_g = by_channel ? written(window_g, {held, places, heads, dk}, g.scalar_type(), "window_g")
                             : written(window_g, {held, places, heads}, g.scalar_type(), "window_g"),
      .window_beta = written(window_beta, {held, places, heads}, beta.scalar_type(), "window_beta"),
      .q = read(q, {rows, columns, key_heads, dk}, "q"),
      .k = read(k, {rows, columns, key_heads, dk}, "k"),
      .v = read(v, {rows, columns, heads, dv}, "v"),
      .g = by_channel ? read(g, {rows, columns, heads, dk}, "g") : read(g, {rows, columns, heads}, "g"),
      .beta = read(beta, {rows, columns, heads}, "beta"),
      .out = Argument{out, out.mutable_data_ptr(), "out"},
      .feed = at.feed,
      .heads = heads,
      .key_heads = key_heads,
      .dk = dk,
      .dv = dv,
      .by_channel = by_channel,
      .keep = keep,
      .normalize = normalize,
  });
  return out;
}

inline Tensor ssd_step_op(Tensor state, Tensor base, Tensor window_x, Tensor window_dt, Tensor window_b, Tensor x,
                          Tensor dt, Tensor b, Tensor c, Tensor a, MaybeTensor d, Tensor start, Tensor commit,
                          Tensor valid, MaybeTensor parents, int64_t first_row, bool keep) {
  STD_TORCH_CHECK(state.dim() == 4 && window_b.dim() == 4 && (a.dim() == 1 || a.dim() == 2),
                  "specdec_layers: state, window_B or A has a wrong shape");
  const int64_t held = state.size(0), heads = state.size(1), size = state.size(2), numbers = state.size(3);
  const int64_t places = window_b.size(1), groups = window_b.size(2);
  STD_TORCH_CHECK(groups > 0 && heads % groups == 0, "specdec_layers: the heads do not divide into groups");
  const FeedArguments at(start, commit, valid, parents, first_row, held, places);
  const int64_t rows = at.feed.rows, columns = at.feed.columns;
  const bool by_number = a.dim() == 2;
  Tensor out = result_on(x, {rows, columns, heads, size}, ScalarType::Float);
  ssd_step(SsdStepParams{
      .state = written(state, {held, heads, size, numbers}, ScalarType::Float, "state"),
      .base = written_base(base, held),
      .window_x = written(window_x, {held, places, heads, size}, x.scalar_type(), "window_x"),
      .window_dt = written(window_dt, {held, places, heads}, dt.scalar_type(), "window_dt"),
      .window_b = written(window_b, {held, places, groups, numbers}, b.scalar_type(), "window_B"),
      .x = read(x, {rows, columns, heads, size}, "x"),
      .dt = read(dt, {rows, columns, heads}, "dt"),
      .b = read(b, {rows, columns, groups, numbers}, "B"),
      .c = read(c, {rows, columns, groups, numbers}, "C"),
      .a = by_number ? read(a, {heads, numbers}, "A") : read(a, {heads}, "A"),
      .d = read(d, {heads}, "D"),
      .out = Argument{out, out.mutable_data_ptr(), "out"},
      .feed = at.feed,
      .heads = heads,
      .size = size,
      .groups = groups,
      .numbers = numbers,
      .by_number = by_number,
      .keep = keep,
  });
  return out;
}

}  // namespace specdec::cpu
