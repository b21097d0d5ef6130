// The CPU kernels of layers as torch's operations.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#define SPECDEC_PACKAGE "specdec_layers"

#include <exception>
#include <string>
#include <vector>

#include "../common/extension.h"
#include "cpu/attend.h"
#include "cpu/elementwise.h"
#include "cpu/linear.h"
#include "cpu/stored_rows.h"
#include "program.h"
#include "recurrent_arguments.h"

namespace specdec::cpu {
namespace {

// What a layer's weights are stored as, whose tensor is of this dtype.
Stored stored_as(ScalarType dtype, int64_t packing) {
  STD_TORCH_CHECK(packing == 0 || block_size(Stored{packing}).inputs > 1, "specdec_layers: packing is ", packing,
                  ", which is none that there is");
  if (packing != 0) return Stored{packing};
  return dtype == ScalarType::BFloat16 ? Stored::kBFloat16
         : dtype == ScalarType::Half   ? Stored::kFloat16
                                       : Stored::kFloat32;
}

void check_weight(const Tensor& weight, int64_t inputs, Stored stored) {
  const BlockSize size = block_size(stored);
  STD_TORCH_CHECK(inputs % size.inputs == 0, "specdec_layers: weight is packed in blocks of ", size.inputs,
                  " inputs, and x has ", inputs);
  const bool packed = size.inputs > 1;
  const ScalarType dtype = packed                        ? ScalarType::Byte
                           : stored == Stored::kBFloat16 ? ScalarType::BFloat16
                           : stored == Stored::kFloat16  ? ScalarType::Half
                                                         : ScalarType::Float;
  check_shape(weight, {weight.size(0), packed ? inputs / size.inputs * size.bytes : inputs}, dtype, "weight");
}

std::vector<Tensor> linear_op(const Tensor& x, const std::vector<Tensor>& weights,
                              const std::vector<std::optional<Tensor>>& biases, const std::vector<int64_t>& packings) {
  STD_TORCH_CHECK(x.dim() == 3, "specdec_layers: x has a wrong shape");
  STD_TORCH_CHECK(weights.size() == biases.size(), "specdec_layers: there are other biases than weights");
  STD_TORCH_CHECK(weights.size() == packings.size(), "specdec_layers: there are other packings than weights");
  const int64_t rows = x.size(0) * x.size(1), inputs = x.size(2);
  check_shape(x, {x.size(0), x.size(1), inputs}, ScalarType::Float, "x");
  const Tensor dense_x = dense(x);
  const auto floats = [](const Tensor& tensor) { return static_cast<const float*>(tensor.const_data_ptr()); };
  std::vector<Tensor> held, found;  // what was made dense, and the results
  std::vector<LinearParams> layers;
  for (size_t i = 0; i < weights.size(); ++i) {
    const int64_t outputs = weights[i].size(0);
    const Stored stored = stored_as(weights[i].scalar_type(), packings[i]);
    check_weight(weights[i], inputs, stored);
    held.push_back(dense(weights[i]));
    LinearParams layer = {floats(dense_x), bytes(held.back()), stored, nullptr, nullptr, rows, inputs, outputs};
    if (biases[i]) {
      check_shape(*biases[i], {outputs}, ScalarType::Float, "bias");
      held.push_back(dense(*biases[i]));
      layer.bias = floats(held.back());
    }
    found.push_back(result_on(x, {x.size(0), x.size(1), outputs}, ScalarType::Float));
    layer.y = static_cast<float*>(found.back().mutable_data_ptr());
    layers.push_back(layer);
  }
  linear(layers.data(), static_cast<int64_t>(layers.size()));
  return found;
}

Tensor stored_rows_op(const Tensor& weight, const Tensor& rows, int64_t packing) {
  const Stored stored = stored_as(weight.scalar_type(), packing);
  const BlockSize size = block_size(stored);
  STD_TORCH_CHECK(weight.dim() == 2 && weight.size(1) % (packing == 0 ? 1 : size.bytes) == 0,
                  "specdec_layers: weight has a wrong shape");
  const int64_t inputs = packing == 0 ? weight.size(1) : weight.size(1) / size.bytes * size.inputs;
  check_weight(weight, inputs, stored);
  STD_TORCH_CHECK(rows.scalar_type() == ScalarType::Long, "specdec_layers: rows has a wrong dtype");
  const Tensor dense_weight = dense(weight), dense_rows = dense(rows);
  const auto shape = rows.sizes();
  std::vector<int64_t> of_result(shape.begin(), shape.end());
  of_result.push_back(inputs);
  Tensor y = result_on(weight, of_result, ScalarType::Float);
  const bool found = stored_rows({
      .weight = bytes(dense_weight),
      .stored = stored,
      .rows = dense_rows.const_data_ptr<int64_t>(),
      .y = static_cast<float*>(y.mutable_data_ptr()),
      .size = weight.size(0),
      .count = rows.numel(),
      .inputs = inputs,
  });
  STD_TORCH_CHECK(found, "specdec_layers: rows has a number that is no row of weight");
  return y;
}

Tensor attend_op(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& seen, double scale, double cap,
                 const std::optional<Tensor>& sinks) {
  STD_TORCH_CHECK(q.dim() == 4 && k.dim() == 4 && v.dim() == 4 && seen.dim() == 3,
                  "specdec_layers: q, k, v or seen has a wrong shape");
  const int64_t rows = q.size(0), heads = q.size(1), queries = q.size(2), size = q.size(3);
  const int64_t key_heads = k.size(1), slots = k.size(2), value_size = v.size(3);
  const bool half = k.scalar_type() == ScalarType::BFloat16;
  const ScalarType stored = half ? ScalarType::BFloat16 : ScalarType::Float;
  check_shape(q, {rows, heads, queries, size}, ScalarType::Float, "q");
  check_shape(k, {rows, key_heads, slots, size}, stored, "k");
  check_shape(v, {rows, key_heads, slots, value_size}, stored, "v");
  check_shape(seen, {rows, queries, seen.size(2)}, ScalarType::Long, "seen");
  if (sinks) check_shape(*sinks, {heads}, ScalarType::Float, "sinks");
  STD_TORCH_CHECK(key_heads > 0 && heads % key_heads == 0 && seen.size(2) >= 2,
                  "specdec_layers: the heads do not divide into key heads, or seen has fewer than two columns");
  const Tensor dense_q = with_dense_rows(q), dense_k = with_dense_rows(k), dense_v = with_dense_rows(v);
  const Tensor dense_seen = dense(seen);
  const std::optional<Tensor> dense_sinks = sinks ? std::optional(dense(*sinks)) : std::nullopt;
  Tensor out = result_on(q, {rows, queries, heads, value_size}, ScalarType::Float);
  attend({
      .q = static_cast<const float*>(dense_q.const_data_ptr()),
      .k = dense_k.const_data_ptr(),
      .v = dense_v.const_data_ptr(),
      .dtype = half ? Dtype::kBFloat16 : Dtype::kFloat32,
      .seen = dense_seen.const_data_ptr<int64_t>(),
      .out = static_cast<float*>(out.mutable_data_ptr()),
      .rows = rows,
      .heads = heads,
      .key_heads = key_heads,
      .queries = queries,
      .slots = slots,
      .size = size,
      .value_size = value_size,
      .columns = seen.size(2),
      .q_strides = {dense_q.stride(0), dense_q.stride(1), dense_q.stride(2)},
      .k_strides = {dense_k.stride(0), dense_k.stride(1), dense_k.stride(2)},
      .v_strides = {dense_v.stride(0), dense_v.stride(1), dense_v.stride(2)},
      .scale = static_cast<float>(scale),
      .cap = static_cast<float>(cap),
      .sinks = dense_sinks ? static_cast<const float*>(dense_sinks->const_data_ptr()) : nullptr,
  });
  return out;
}

Tensor rms_norm_op(const Tensor& x, const std::optional<Tensor>& weight, double epsilon, double offset) {
  STD_TORCH_CHECK(x.scalar_type() == ScalarType::Float && x.dim() >= 1, "specdec_layers: x has a wrong shape or dtype");
  const int64_t size = x.size(x.dim() - 1);
  if (weight) check_shape(*weight, {size}, ScalarType::Float, "weight");
  const Tensor dense_x = dense(x);
  const std::optional<Tensor> dense_weight = weight ? std::optional(dense(*weight)) : std::nullopt;
  Tensor y = result_on(x, x.sizes(), ScalarType::Float);
  rms_norm({
      .x = static_cast<const float*>(dense_x.const_data_ptr()),
      .weight = dense_weight ? static_cast<const float*>(dense_weight->const_data_ptr()) : nullptr,
      .y = static_cast<float*>(y.mutable_data_ptr()),
      .rows = size == 0 ? 0 : x.numel() / size,
      .size = size,
      .epsilon = static_cast<float>(epsilon),
      .offset = static_cast<float>(offset),
  });
  return y;
}

Tensor rotate_op(const Tensor& x, const Tensor& cos, const Tensor& sin) {
  STD_TORCH_CHECK(x.dim() == 4 && cos.dim() == 3, "specdec_layers: x or cos has a wrong shape");
  const int64_t rows = x.size(0), heads = x.size(1), queries = x.size(2), size = x.size(3);
  const int64_t angles = cos.size(0);
  STD_TORCH_CHECK((angles == rows || angles == 1) && size % 2 == 0,
                  "specdec_layers: cos has other rows than x, or x has an odd size");
  check_shape(x, {rows, heads, queries, size}, ScalarType::Float, "x");
  check_shape(cos, {angles, queries, size}, ScalarType::Float, "cos");
  check_shape(sin, {angles, queries, size}, ScalarType::Float, "sin");
  const Tensor dense_x = with_dense_rows(x), dense_cos = dense(cos), dense_sin = dense(sin);
  Tensor y = result_on(x, {rows, heads, queries, size}, ScalarType::Float);
  rotate({
      .x = static_cast<const float*>(dense_x.const_data_ptr()),
      .cos = static_cast<const float*>(dense_cos.const_data_ptr()),
      .sin = static_cast<const float*>(dense_sin.const_data_ptr()),
      .y = static_cast<float*>(y.mutable_data_ptr()),
      .rows = rows,
      .heads = heads,
      .queries = queries,
      .size = size,
      .x_strides = {dense_x.stride(0), dense_x.stride(1), dense_x.stride(2)},
      .angle_stride = angles == 1 ? 0 : queries * size,
  });
  return y;
}

std::tuple<Tensor, Tensor> rope_angles_op(const Tensor& positions, const Tensor& frequencies, double scale) {
  STD_TORCH_CHECK(positions.dim() == 2 && frequencies.dim() == 1,
                  "specdec_layers: positions or frequencies has a wrong shape");
  const int64_t rows = positions.size(0), tokens = positions.size(1), half = frequencies.size(0);
  check_shape(positions, {rows, tokens}, ScalarType::Long, "positions");
  check_shape(frequencies, {half}, ScalarType::Float, "frequencies");
  const Tensor dense_positions = dense(positions), dense_frequencies = dense(frequencies);
  Tensor cos = result_on(frequencies, {rows, tokens, 2 * half}, ScalarType::Float);
  Tensor sin = result_on(frequencies, {rows, tokens, 2 * half}, ScalarType::Float);
  angles({
      .positions = dense_positions.const_data_ptr<int64_t>(),
      .frequencies = static_cast<const float*>(dense_frequencies.const_data_ptr()),
      .cos = static_cast<float*>(cos.mutable_data_ptr()),
      .sin = static_cast<float*>(sin.mutable_data_ptr()),
      .tokens = rows * tokens,
      .half = half,
      .scale = static_cast<float>(scale),
  });
  return {cos, sin};
}

Tensor gated_op(const Tensor& gate, const Tensor& up, bool gelu) {
  STD_TORCH_CHECK(gate.dim() == 3 && up.dim() == 3, "specdec_layers: gate or up has a wrong shape");
  const int64_t rows = gate.size(0), tokens = gate.size(1), size = gate.size(2);
  check_shape(gate, {rows, tokens, size}, ScalarType::Float, "gate");
  check_shape(up, {rows, tokens, size}, ScalarType::Float, "up");
  const Tensor dense_gate = dense(gate), dense_up = dense(up);
  Tensor y = result_on(gate, {rows, tokens, size}, ScalarType::Float);
  gated({
      .gate = static_cast<const float*>(dense_gate.const_data_ptr()),
      .up = static_cast<const float*>(dense_up.const_data_ptr()),
      .y = static_cast<float*>(y.mutable_data_ptr()),
      .rows = rows * tokens,
      .size = size,
      .activation = gelu ? Activation::kGeluTanh : Activation::kSilu,
  });
  return y;
}

Tensor add_op(const Tensor& x, const Tensor& y) {
  STD_TORCH_CHECK(x.scalar_type() == ScalarType::Float, "specdec_layers: x has a wrong dtype");
  const auto shape = x.sizes(), other = y.sizes();
  STD_TORCH_CHECK(
      y.scalar_type() == ScalarType::Float && std::equal(shape.begin(), shape.end(), other.begin(), other.end()),
      "specdec_layers: y has another shape or dtype than x");
  const Tensor dense_x = dense(x), dense_y = dense(y);
  Tensor sum = result_on(x, shape, ScalarType::Float);
  add({
      .x = static_cast<const float*>(dense_x.const_data_ptr()),
      .y = static_cast<const float*>(dense_y.const_data_ptr()),
      .sum = static_cast<float*>(sum.mutable_data_ptr()),
      .size = x.numel(),
  });
  return sum;
}

Tensor reshaped_op(const Tensor& x, const std::vector<int64_t>& shape) {
  int64_t count = 1;
  for (const int64_t size : shape) count *= size;
  STD_TORCH_CHECK(x.dim() >= 1 && x.dim() <= 4, "specdec_layers: x has more than four dimensions, or none");
  STD_TORCH_CHECK(count == x.numel(), "specdec_layers: shape has another number of numbers than x");
  const Tensor rows = with_dense_rows(x);
  Tensor y = result_on(x, shape, x.scalar_type());
  if (count == 0) return y;
  const int64_t bytes_each = x.element_size(), outer = x.dim() - 1;
  CopyParams params{.x = bytes(rows),
                    .y = static_cast<char*>(y.mutable_data_ptr()),
                    .sizes = {1, 1, 1},
                    .strides = {},
                    .row_bytes = rows.size(outer) * bytes_each};
  for (int64_t i = 0; i < outer; ++i) {
    params.sizes[i] = rows.size(i);
    params.strides[i] = rows.stride(i) * bytes_each;
  }
  copy(params);
  return y;
}

void write_rows_op(const Tensor& target, const Tensor& rows, const Tensor& source) {
  STD_TORCH_CHECK(target.dim() == 2 && target.is_contiguous(), "specdec_layers: target has a wrong shape or strides");
  STD_TORCH_CHECK(rows.dim() == 1, "specdec_layers: rows has a wrong shape");
  check_shape(rows, {rows.size(0)}, ScalarType::Long, "rows");
  check_shape(source, {rows.size(0), target.size(1)}, target.scalar_type(), "source");
  const Tensor dense_rows = dense(rows), dense_source = dense(source);
  const bool written = write_rows({
      .source = bytes(dense_source),
      .rows = dense_rows.const_data_ptr<int64_t>(),
      .target = static_cast<char*>(target.mutable_data_ptr()),
      .count = rows.size(0),
      .size = target.size(0),
      .row_bytes = target.size(1) * static_cast<int64_t>(target.element_size()),
  });
  STD_TORCH_CHECK(written, "specdec_layers: rows has a number that is no row of target");
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(specdec_layers, CPU, m) {
  m.impl("linear", SPECDEC_KEEPABLE(linear_op));
  m.impl("stored_rows", SPECDEC_KEEPABLE(stored_rows_op));
  m.impl("rms_norm", SPECDEC_KEEPABLE(rms_norm_op));
  m.impl("rotate", SPECDEC_KEEPABLE(rotate_op));
  m.impl("rope_angles", SPECDEC_KEEPABLE(rope_angles_op));
  m.impl("gated", SPECDEC_KEEPABLE(gated_op));
  m.impl("add", SPECDEC_KEEPABLE(add_op));
  m.impl("reshaped", SPECDEC_KEEPABLE(reshaped_op));
  m.impl("write_rows", SPECDEC_KEEPABLE(write_rows_op));
  m.impl("attend", SPECDEC_KEEPABLE(attend_op));
  m.impl("conv_window", SPECDEC_KEEPABLE(conv_window_op));
  m.impl("delta_step", SPECDEC_KEEPABLE(delta_step_op));
  m.impl("ssd_step", SPECDEC_KEEPABLE(ssd_step_op));
}

// No tensor need say on which device this is.
STABLE_TORCH_LIBRARY_IMPL(specdec_layers, CompositeExplicitAutograd, m) {
  m.impl("keep_results", TORCH_BOX(&keep_results));
}

}  // namespace specdec::cpu

namespace {

// Programs belong to Python, as capsules, and are run apart from torch's dispatcher: what looks at operations must
// neither see nor repeat that one is made, run or freed.
constexpr const char* kProgram = "specdec_layers.program";

specdec::Program* program_of(PyObject* capsule) {
  return static_cast<specdec::Program*>(PyCapsule_GetPointer(capsule, kProgram));
}

PyObject* new_program(PyObject*, PyObject*) {
  return PyCapsule_New(new specdec::Program, kProgram, [](PyObject* capsule) { delete program_of(capsule); });
}

PyObject* keep_next(PyObject*, PyObject* capsule) {
  if (capsule == Py_None) {
    specdec::keeping = {};
    Py_RETURN_NONE;
  }
  specdec::keeping.program = program_of(capsule);
  if (specdec::keeping.program == nullptr) return nullptr;
  Py_RETURN_NONE;
}

PyObject* run_program(PyObject*, PyObject* capsule) {
  const specdec::Program* program = program_of(capsule);
  if (program == nullptr) return nullptr;
  std::string error;
  bool failed = false;
  Py_BEGIN_ALLOW_THREADS;
  try {
    for (const auto& call : *program) call();
  } catch (const std::exception& raised) {
    failed = true;
    error = raised.what();
  }
  Py_END_ALLOW_THREADS;
  if (failed) return PyErr_Format(PyExc_RuntimeError, "%s", error.c_str());
  Py_RETURN_NONE;
}

PyMethodDef methods[] = {
    SPECDEC_METHODS,
    {"new_program", new_program, METH_NOARGS, "an empty program"},
    {"keep_next", keep_next, METH_O, "makes a program keep this thread's next call of an operation; None: it is run"},
    {"run_program", run_program, METH_O, "runs the calls that a program keeps"},
    {nullptr, nullptr, 0, nullptr}};
PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, methods, nullptr, nullptr, nullptr, nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__C() { return specdec::cpu::share_threads() ? PyModule_Create(&module) : nullptr; }
