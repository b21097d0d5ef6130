// The gated delta rule. A thread takes some columns of one head's state into its nearest cache, where all tokens of the
// forward pass over them; the columns do not depend on each other. So a state is read once, and written once.
#include <cmath>
#include <vector>

#include "../core/softmax.h"
#include "parallel.h"
#include "recurrence.h"
#include "recurrent.h"

namespace specdec::cpu {
namespace {

constexpr int kVectors = 4;  // of a slice: their sums, even and odd ones, hide the latency of an addition

template <int kWidth>
struct Slice {
  typedef float Vector __attribute__((vector_size(kWidth * sizeof(float))));
  static constexpr int kColumns = kVectors * kWidth;
};

// x / sqrt(|x|^2 + 1e-6) * scale, or x * scale.
SPECDEC_BODY void scaled(const float* x, int64_t n, bool normalize, float scale, float* out) {
  float sums[16] = {};
  if (normalize) {
    for (int64_t i = 0; i < n; ++i) sums[i % 16] += x[i] * x[i];
    for (int half = 8; half > 0; half /= 2) {
      for (int i = 0; i < half; ++i) sums[i] += sums[i + half];
    }
    scale /= std::sqrt(sums[0] + 1e-6f);
  }
  for (int64_t i = 0; i < n; ++i) out[i] = x[i] * scale;
}

struct Token {
  const float *q, *k, *v, *g, *beta;  // of one head; q is null if nothing is read
};

SPECDEC_BODY Token token_of(const DeltaStepParams& p, int64_t row, int64_t head, bool from_window, int64_t index) {
  const int64_t key_head = head / (p.heads / p.key_heads), decays = p.by_channel ? p.dk : 1;
  const int64_t at = from_window ? (p.feed.first_row + row) * p.feed.places + index : row * p.feed.columns + index;
  const float* k = from_window ? p.window_k : p.k;
  const float* v = from_window ? p.window_v : p.v;
  const float* g = from_window ? p.window_g : p.g;
  const float* beta = from_window ? p.window_beta : p.beta;
  return {from_window ? nullptr : p.q + (at * p.key_heads + key_head) * p.dk,
          k + (at * p.key_heads + key_head) * p.dk,
          v + (at * p.heads + head) * p.dv,
          g + (at * p.heads + head) * decays,
          beta + at * p.heads + head};
}

// Takes one token into the slice S [dk, kColumns], of which `columns` count, and reads it.
template <int kWidth>
SPECDEC_BODY void take(const DeltaStepParams& p, const Token& token, int64_t first, int64_t columns, float* S,
                       float* numbers, float* out) {
  using Vector = typename Slice<kWidth>::Vector;
  constexpr int kColumns = Slice<kWidth>::kColumns;
  float *k = numbers, *q = k + p.dk, *decay = q + p.dk;
  scaled(token.k, p.dk, p.normalize, 1.0f, k);
  if (token.q) scaled(token.q, p.dk, p.normalize, 1.0f / std::sqrt(static_cast<float>(p.dk)), q);
  if (p.by_channel) {
    for (int64_t i = 0; i < p.dk; ++i) decay[i] = exp2_fast(token.g[i] * kLog2e);
  } else {
    std::fill(decay, decay + p.dk, exp2_fast(token.g[0] * kLog2e));
  }
  Vector v[kVectors] = {}, even[kVectors] = {}, odd[kVectors] = {};
  std::memcpy(v, token.v + first, columns * sizeof(float));
  const auto pass = [&](int64_t i, Vector* sums) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) {
      Vector s;
      std::memcpy(&s, S + i * kColumns + j * kWidth, sizeof(s));
      sums[j] += s * (decay[i] * k[i]);
    }
  };
  int64_t i = 0;
  for (; i + 2 <= p.dk; i += 2) pass(i, even), pass(i + 1, odd);
  if (i < p.dk) pass(i, even);
  Vector u[kVectors];
#pragma GCC unroll 4
  for (int j = 0; j < kVectors; ++j) {
    u[j] = (v[j] - (even[j] + odd[j])) * token.beta[0];
    even[j] = odd[j] = Vector{};
  }
  const auto update = [&](int64_t i, Vector* sums) __attribute__((always_inline)) {
    const float read = token.q ? q[i] : 0.0f;
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) {
      Vector s;
      float* place = S + i * kColumns + j * kWidth;
      std::memcpy(&s, place, sizeof(s));
      s = s * decay[i] + u[j] * k[i];
      std::memcpy(place, &s, sizeof(s));
      sums[j] += s * read;
    }
  };
  for (i = 0; i + 2 <= p.dk; i += 2) update(i, even), update(i + 1, odd);
  if (i < p.dk) update(i, even);
  if (!token.q) return;
#pragma GCC unroll 4
  for (int j = 0; j < kVectors; ++j) even[j] += odd[j];
  std::memcpy(out + first, even, columns * sizeof(float));
}

// Takes all tokens of a row into one head's columns from `first` on.
template <int kWidth>
SPECDEC_BODY void slice(const DeltaStepParams& p, int64_t row, int64_t head, int64_t first, const FedRow& fed, float* S,
                        float* numbers) {
  constexpr int kColumns = Slice<kWidth>::kColumns;
  const int64_t columns = std::min<int64_t>(p.dv - first, kColumns);
  float* state = p.state + ((p.feed.first_row + row) * p.heads + head) * p.dk * p.dv + first;
  std::fill(S, S + p.dk * kColumns, 0.0f);
  if (!fed.from_nothing) {
    for (int64_t i = 0; i < p.dk; ++i) std::memcpy(S + i * kColumns, state + i * p.dv, columns * sizeof(float));
  }
  const auto token = [&](bool from_window, int64_t index) __attribute__((always_inline)) {
    float* out = p.out + ((row * p.feed.columns + index) * p.heads + head) * p.dv;
    take<kWidth>(p, token_of(p, row, head, from_window, index), first, columns, S, numbers, out);
  };
  const auto commit = [&]() __attribute__((always_inline)) {
    if (!p.keep && fed.commit == fed.begin) return;
    for (int64_t i = 0; i < p.dk; ++i) std::memcpy(state + i * p.dv, S + i * kColumns, columns * sizeof(float));
  };
  each_token(p.feed, fed, p.feed.valid + row * p.feed.columns, p.keep, token, commit);
}

// Tasks are heads, row by row.
template <int kWidth>
SPECDEC_BODY void delta_heads(const DeltaStepParams& p, int64_t begin, int64_t end) {
  constexpr int kColumns = Slice<kWidth>::kColumns;
  std::vector<float> scratch(p.dk * (kColumns + 3));
  float *S = scratch.data(), *numbers = S + p.dk * kColumns;
  for (int64_t task = begin; task < end; ++task) {
    const int64_t row = task / p.heads, head = task % p.heads;
    clear_others(p.feed, row, p.out + head * p.dv, p.heads * p.dv, p.dv);
    if (count_valid(p.feed, row) == 0) continue;
    const int64_t base = p.base[p.feed.first_row + row];
    const FedRow fed = fed_row(base, p.feed.start[row], p.feed.commit[row], p.feed.places);
    for (int64_t first = 0; first < p.dv; first += kColumns) slice<kWidth>(p, row, head, first, fed, S, numbers);
  }
}

SPECDEC_BY_INSTRUCTION_SET(delta_heads, DeltaStepParams)

}  // namespace

void delta_step(const DeltaStepParams& params) {
  const auto run = delta_heads_in_use();
  const int64_t work = params.dk * params.dv * params.feed.columns;
  parallel_for(params.feed.rows * params.heads, kGrainNumbers / std::max<int64_t>(work, 1) + 1,
               [&](int64_t begin, int64_t end) { run(params, begin, end); });
  if (!params.keep) {
    store(params.feed, params.k, params.window_k, params.key_heads * params.dk);
    store(params.feed, params.v, params.window_v, params.heads * params.dv);
    store(params.feed, params.g, params.window_g, params.heads * (params.by_channel ? params.dk : 1));
    store(params.feed, params.beta, params.window_beta, params.heads);
  }
  advance(params.feed, params.base, params.keep);
}

}  // namespace specdec::cpu
