// Selective state-space models: a head's state, [size, numbers], is decayed and added to by every token, and read by it.
// With a decay for each number and heads of size 1 it is Mamba-1, otherwise Mamba-2.
#include <vector>

#include "../core/softmax.h"
#include "parallel.h"
#include "recurrence.h"
#include "recurrent.h"

namespace specdec::cpu {
namespace {

// The numbers of a state are padded to whole vectors in the scratch memory of a thread.
template <int kWidth>
SPECDEC_BODY int64_t padded(int64_t numbers) {
  return (numbers + kWidth - 1) / kWidth * kWidth;
}

// Takes one token into one head's state S [size, padded numbers], and reads it into `out` [size] unless c is null.
// `a`: its decays' factors, [padded numbers] or one.
template <int kWidth>
SPECDEC_BODY void take(const SsdStepParams& p, const float* x, float dt, const float* b, const float* c, const float* a,
                       float d, float* S, float* scratch, float* out) {
  typedef float Vector __attribute__((vector_size(kWidth * sizeof(float))));
  const int64_t stride = padded<kWidth>(p.numbers);
  float *decay = scratch, *own_b = decay + stride, *own_c = own_b + stride;
  if (p.by_number) {
    for (int64_t n = 0; n < stride; ++n) decay[n] = exp2_fast(dt * a[n] * kLog2e);
  } else {
    std::fill(decay, decay + stride, exp2_fast(dt * a[0] * kLog2e));
  }
  std::memcpy(own_b, b, p.numbers * sizeof(float));
  if (c) std::memcpy(own_c, c, p.numbers * sizeof(float));
  for (int64_t i = 0; i < p.size; ++i) {
    const float added = dt * x[i];
    Vector sum = {};
    for (int64_t n = 0; n < stride; n += kWidth) {
      Vector s, e, bs, cs;
      std::memcpy(&s, S + i * stride + n, sizeof(s));
      std::memcpy(&e, decay + n, sizeof(e));
      std::memcpy(&bs, own_b + n, sizeof(bs));
      std::memcpy(&cs, own_c + n, sizeof(cs));
      s = s * e + bs * added;
      std::memcpy(S + i * stride + n, &s, sizeof(s));
      sum += s * cs;
    }
    if (!c) continue;
    float lanes[kWidth];
    std::memcpy(lanes, &sum, sizeof(sum));
    for (int half = kWidth / 2; half > 0; half /= 2) {
      for (int lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
    }
    out[i] = lanes[0] + d * x[i];
  }
}

template <int kWidth>
SPECDEC_BODY void head_of(const SsdStepParams& p, int64_t row, int64_t head, const FedRow& fed, float* scratch) {
  const int64_t stride = padded<kWidth>(p.numbers), group = head / (p.heads / p.groups);
  float *a = scratch, *numbers = a + stride, *S = numbers + 3 * stride;
  float* state = p.state + ((p.feed.first_row + row) * p.heads + head) * p.size * p.numbers;
  std::memcpy(a, p.a + head * (p.by_number ? p.numbers : 1), (p.by_number ? p.numbers : 1) * sizeof(float));
  std::fill(S, S + p.size * stride, 0.0f);
  if (!fed.from_nothing) {
    for (int64_t i = 0; i < p.size; ++i) std::memcpy(S + i * stride, state + i * p.numbers, p.numbers * sizeof(float));
  }
  const auto token = [&](bool from_window, int64_t index) __attribute__((always_inline)) {
    const int64_t fed_at = row * p.feed.columns + index;
    const int64_t at = from_window ? (p.feed.first_row + row) * p.feed.places + index : fed_at;
    const float* x = (from_window ? p.window_x : p.x) + (at * p.heads + head) * p.size;
    const float* b = (from_window ? p.window_b : p.b) + (at * p.groups + group) * p.numbers;
    const float* c = from_window ? nullptr : p.c + (at * p.groups + group) * p.numbers;
    const float dt = (from_window ? p.window_dt : p.dt)[at * p.heads + head];
    float* out = p.out + (fed_at * p.heads + head) * p.size;
    take<kWidth>(p, x, dt, b, c, a, p.d ? p.d[head] : 0.0f, S, numbers, out);
  };
  const auto commit = [&]() __attribute__((always_inline)) {
    if (!p.keep && fed.commit == fed.begin) return;
    for (int64_t i = 0; i < p.size; ++i) std::memcpy(state + i * p.numbers, S + i * stride, p.numbers * sizeof(float));
  };
  each_token(p.feed, fed, p.feed.valid + row * p.feed.columns, p.keep, token, commit);
}

// Tasks are heads, row by row.
template <int kWidth>
SPECDEC_BODY void ssd_heads(const SsdStepParams& p, int64_t begin, int64_t end) {
  std::vector<float> scratch((p.size + 4) * padded<kWidth>(p.numbers));  // its padding is never anything but 0
  const auto body = [&](int64_t row, int64_t head, const FedRow& fed) __attribute__((always_inline)) {
    head_of<kWidth>(p, row, head, fed, scratch.data());
  };
  each_head(p.feed, p.base, p.heads, p.size, p.out, begin, end, body);
}

SPECDEC_BY_INSTRUCTION_SET(ssd_heads, SsdStepParams)

}  // namespace

void ssd_step(const SsdStepParams& params) {
  const auto run = ssd_heads_in_use();
  const int64_t work = params.size * params.numbers * params.feed.columns;
  parallel_for(params.feed.rows * params.heads, kGrainNumbers / std::max<int64_t>(work, 1) + 1,
               [&](int64_t begin, int64_t end) { run(params, begin, end); });
  if (!params.keep) {
    store(params.feed, params.x, params.window_x, params.heads * params.size);
    store(params.feed, params.dt, params.window_dt, params.heads);
    store(params.feed, params.b, params.window_b, params.groups * params.numbers);
  }
  advance(params.feed, params.base, params.keep);
}

}  // namespace specdec::cpu
