// Every row, and every number, is computed by itself: PyTorch computes what is left over of a vector by other
// functions, so that a token's bits depend on how many it is fed with.
#include "elementwise.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "../../common/parallel.h"
#include "../../core/softmax.h"
#include "lanes.h"

namespace specdec::cpu {
namespace {

constexpr int64_t kGrainNumbers = 16 * 1024;  // are worth a thread
constexpr int64_t kGrainAngles = 512;         // likewise

template <int kWidth>
SPECDEC_BODY void norm_rows(const RmsNormParams& p, int64_t begin, int64_t end) {
  constexpr int kSums = 4 * kWidth;
  for (int64_t row = begin; row < end; ++row) {
    const float* x = p.x + row * p.size;
    float* y = p.y + row * p.size;
    float sums[kSums] = {};
    int64_t i = 0;
    for (; i + kSums <= p.size; i += kSums) {
      for (int j = 0; j < kSums; ++j) sums[j] += x[i + j] * x[i + j];
    }
    for (int j = 0; i + j < p.size; ++j) sums[j] += x[i + j] * x[i + j];
    for (int half = kSums / 2; half > 0; half /= 2) {
      for (int j = 0; j < half; ++j) sums[j] += sums[j + half];
    }
    const float scale = 1.0f / std::sqrt(sums[0] / static_cast<float>(p.size) + p.epsilon);
    if (p.weight) {
      for (i = 0; i < p.size; ++i) y[i] = x[i] * scale * (p.weight[i] + p.offset);
    } else {
      for (i = 0; i < p.size; ++i) y[i] = x[i] * scale;
    }
  }
}

template <int kWidth>
SPECDEC_BODY void rotate_rows(const RotateParams& p, int64_t begin, int64_t end) {
  const int64_t half = p.size / 2;
  for (int64_t task = begin; task < end; ++task) {
    const int64_t query = task % p.queries, head = task / p.queries % p.heads, row = task / p.queries / p.heads;
    const float* x = p.x + row * p.x_strides[0] + head * p.x_strides[1] + query * p.x_strides[2];
    const float *cos = p.cos + row * p.angle_stride + query * p.size, *sin = p.sin + (cos - p.cos);
    float* y = p.y + task * p.size;
    for (int64_t i = 0; i < half; ++i) y[i] = x[i] * cos[i] - x[i + half] * sin[i];
    for (int64_t i = half; i < p.size; ++i) y[i] = x[i] * cos[i] + x[i - half] * sin[i];
  }
}

// x / (1 + exp(-z)); exp2_fast is for exponents up to 0.
SPECDEC_BODY float sigmoid_times(float z, float x) {
  const float power = exp2_fast(-kLog2e * std::fabs(z));
  return x * ((z < 0.0f ? power : 1.0f) / (1.0f + power));
}

template <int kWidth>
SPECDEC_BODY void gated_rows(const GatedParams& p, int64_t begin, int64_t end) {
  constexpr float kTwice = 1.5957691216f, kCubed = 0.044715f;  // 2 sqrt(2 / pi)
  for (int64_t row = begin; row < end; ++row) {
    const float *gate = p.gate + row * p.size, *up = p.up + row * p.size;
    float* y = p.y + row * p.size;
    if (p.activation == Activation::kSilu) {
      for (int64_t i = 0; i < p.size; ++i) y[i] = sigmoid_times(gate[i], gate[i]) * up[i];
    } else {  // (1 + tanh(z)) / 2 = 1 / (1 + exp(-2 z))
      for (int64_t i = 0; i < p.size; ++i) {
        y[i] = sigmoid_times(kTwice * gate[i] * (1.0f + kCubed * gate[i] * gate[i]), gate[i]) * up[i];
      }
    }
  }
}

template <int kWidth>
SPECDEC_BODY void add_numbers(const AddParams& p, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) p.sum[i] = p.x[i] + p.y[i];
}

SPECDEC_BY_INSTRUCTION_SET(norm_rows, RmsNormParams)
SPECDEC_BY_INSTRUCTION_SET(rotate_rows, RotateParams)
SPECDEC_BY_INSTRUCTION_SET(gated_rows, GatedParams)
SPECDEC_BY_INSTRUCTION_SET(add_numbers, AddParams)

}  // namespace

void rms_norm(const RmsNormParams& params) {
  const auto run = norm_rows_in_use();
  parallel_for(params.rows, kGrainNumbers / std::max<int64_t>(params.size, 1) + 1,
               [&](int64_t begin, int64_t end) { run(params, begin, end); });
}

void rotate(const RotateParams& params) {
  const auto run = rotate_rows_in_use();
  parallel_for(params.rows * params.heads * params.queries, kGrainNumbers / std::max<int64_t>(params.size, 1) + 1,
               [&](int64_t begin, int64_t end) { run(params, begin, end); });
}

void angles(const AnglesParams& params) {
  parallel_for(params.tokens, kGrainAngles / std::max<int64_t>(params.half, 1) + 1, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      float *cos = params.cos + token * 2 * params.half, *sin = params.sin + token * 2 * params.half;
      for (int64_t i = 0; i < params.half; ++i) {
        const double angle = static_cast<float>(params.positions[token]) * params.frequencies[i];
        cos[i] = cos[i + params.half] = static_cast<float>(std::cos(angle)) * params.scale;
        sin[i] = sin[i + params.half] = static_cast<float>(std::sin(angle)) * params.scale;
      }
    }
  });
}

void gated(const GatedParams& params) {
  const auto run = gated_rows_in_use();
  parallel_for(params.rows, kGrainNumbers / std::max<int64_t>(params.size, 1) + 1,
               [&](int64_t begin, int64_t end) { run(params, begin, end); });
}

void add(const AddParams& params) {
  const auto run = add_numbers_in_use();
  parallel_for(params.size, kGrainNumbers, [&](int64_t begin, int64_t end) { run(params, begin, end); });
}

void copy(const CopyParams& p) {
  char* y = p.y;
  for (int64_t i = 0; i < p.sizes[0]; ++i) {
    for (int64_t j = 0; j < p.sizes[1]; ++j) {
      for (int64_t k = 0; k < p.sizes[2]; ++k, y += p.row_bytes) {
        std::memcpy(y, p.x + i * p.strides[0] + j * p.strides[1] + k * p.strides[2], p.row_bytes);
      }
    }
  }
}

bool write_rows(const WriteRowsParams& p) {
  if (std::any_of(p.rows, p.rows + p.count, [&](int64_t row) { return row < 0 || row >= p.size; })) return false;
  for (int64_t i = 0; i < p.count; ++i) {
    std::memcpy(p.target + p.rows[i] * p.row_bytes, p.source + i * p.row_bytes, p.row_bytes);
  }
  return true;
}

}  // namespace specdec::cpu
