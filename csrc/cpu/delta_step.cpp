// The gated delta rule. A thread takes some columns of one head's state into its nearest cache, where all tokens of the
// forward pass over them; the columns do not depend on each other. A pass takes one token into the state, reads it for
// that token's query, and multiplies it by the next token's key.
#include <cmath>
#include <vector>

#include "../core/softmax.h"
#include "parallel.h"
#include "recurrence.h"
#include "recurrent.h"

namespace specdec::cpu {
namespace {

template <int kWidth>
struct Slice {
  typedef float Vector __attribute__((vector_size(kWidth * sizeof(float))));
  static constexpr int kVectors = kWidth == 16 ? 4 : 2;  // whose sums, even and odd ones, fit into the registers
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

// Most slices are whole, and their size is then a constant.
template <int kColumns>
SPECDEC_BODY void copy_line(void* to, const void* from, int64_t columns) {
  if (columns == kColumns) {
    std::memcpy(to, from, kColumns * sizeof(float));
  } else {
    std::memcpy(to, from, columns * sizeof(float));
  }
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

// What the passes over a state need of one token: its normalised key and query, and its decays, [dk] each.
struct Prepared {
  float *k, *q, *decay;
};

SPECDEC_BODY void prepare(const DeltaStepParams& p, const Token& token, const Prepared& out) {
  scaled(token.k, p.dk, p.normalize, 1.0f, out.k);
  if (token.q) {
    scaled(token.q, p.dk, p.normalize, 1.0f / std::sqrt(static_cast<float>(p.dk)), out.q);
  } else {
    std::fill(out.q, out.q + p.dk, 0.0f);
  }
  if (p.by_channel) {
    for (int64_t i = 0; i < p.dk; ++i) out.decay[i] = exp2_fast(token.g[i] * kLog2e);
  } else {
    std::fill(out.decay, out.decay + p.dk, exp2_fast(token.g[0] * kLog2e));
  }
}

template <int kWidth>
struct Sums {
  using Vector = typename Slice<kWidth>::Vector;
  Vector even[Slice<kWidth>::kVectors] = {}, odd[Slice<kWidth>::kVectors] = {};

  SPECDEC_HD void close() {
    for (int j = 0; j < Slice<kWidth>::kVectors; ++j) even[j] += odd[j];
  }
};

// Copies a state's columns to S [dk, kColumns], of which `columns` count, and multiplies them by the first token's key.
// `state` is null for a state of nothing.
template <int kWidth>
SPECDEC_BODY Sums<kWidth> begin_pass(const float* state, int64_t stride, int64_t columns, int64_t dk,
                                     const Prepared& next, float* S) {
  using Vector = typename Slice<kWidth>::Vector;
  constexpr int kVectors = Slice<kWidth>::kVectors, kColumns = Slice<kWidth>::kColumns;
  Sums<kWidth> recalled;
  if (state == nullptr) {
    std::fill(S, S + dk * kColumns, 0.0f);
    return recalled;
  }
  const auto line = [&](int64_t i, Vector* sums) __attribute__((always_inline)) {
    Vector s[kVectors] = {};
    copy_line<kColumns>(s, state + i * stride, columns);
    std::memcpy(S + i * kColumns, s, sizeof(s));
    const float factor = next.decay[i] * next.k[i];
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) sums[j] += s[j] * factor;
  };
  int64_t i = 0;
  for (; i + 2 <= dk; i += 2) line(i, recalled.even), line(i + 1, recalled.odd);
  if (i < dk) line(i, recalled.even);
  recalled.close();
  return recalled;
}

// Takes a token into S, whose product with its key is `recalled`, and reads it into `out`, unless that is null. Returns
// the product with the next token's key.
template <int kWidth>
SPECDEC_BODY Sums<kWidth> pass(const Token& token, const Prepared& own, const Prepared& next, int64_t first,
                               int64_t columns, int64_t dk, const Sums<kWidth>& recalled, float* S, float* out) {
  using Vector = typename Slice<kWidth>::Vector;
  constexpr int kVectors = Slice<kWidth>::kVectors, kColumns = Slice<kWidth>::kColumns;
  Vector u[kVectors] = {};
  copy_line<kColumns>(u, token.v + first, columns);
#pragma GCC unroll 4
  for (int j = 0; j < kVectors; ++j) u[j] = (u[j] - recalled.even[j]) * token.beta[0];
  Sums<kWidth> read, recalls;
  const auto line = [&](int64_t i, Vector* reads, Vector* keys) __attribute__((always_inline)) {
    const float decay = own.decay[i], k = own.k[i], q = own.q[i], factor = next.decay[i] * next.k[i];
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) {
      Vector s;
      float* place = S + i * kColumns + j * kWidth;
      std::memcpy(&s, place, sizeof(s));
      s = s * decay + u[j] * k;
      std::memcpy(place, &s, sizeof(s));
      reads[j] += s * q;
      keys[j] += s * factor;
    }
  };
  int64_t i = 0;
  for (; i + 2 <= dk; i += 2) line(i, read.even, recalls.even), line(i + 1, read.odd, recalls.odd);
  if (i < dk) line(i, read.even, recalls.even);
  read.close();
  recalls.close();
  if (out) copy_line<kColumns>(out + first, read.even, columns);
  return recalls;
}

// The memory of a thread.
struct Scratch {
  std::vector<float> numbers;
  std::vector<Token> tokens;  // of the row, in order
  std::vector<float*> outs;   // where each is read to, or null
};

// Takes all tokens of a row into one head's columns from `first` on. The state after `committed` of them stays.
template <int kWidth>
SPECDEC_BODY void slice(const DeltaStepParams& p, float* state, bool from_nothing, size_t committed, int64_t first,
                        Scratch* scratch) {
  constexpr int kColumns = Slice<kWidth>::kColumns;
  const int64_t columns = std::min<int64_t>(p.dv - first, kColumns), dk = p.dk;
  float *S = scratch->numbers.data(), *rest = S + dk * kColumns;
  Prepared own = {rest, rest + dk, rest + 2 * dk}, next = {rest + 3 * dk, rest + 4 * dk, rest + 5 * dk};
  prepare(p, scratch->tokens[0], own);
  Sums<kWidth> recalled = begin_pass<kWidth>(from_nothing ? nullptr : state + first, p.dv, columns, dk, own, S);
  const size_t count = scratch->tokens.size();
  for (size_t t = 0; t < count; ++t) {
    prepare(p, scratch->tokens[std::min(t + 1, count - 1)], next);
    recalled = pass<kWidth>(scratch->tokens[t], own, next, first, columns, dk, recalled, S, scratch->outs[t]);
    std::swap(own, next);
    if (t + 1 != committed) continue;
    for (int64_t i = 0; i < dk; ++i) copy_line<kColumns>(state + i * p.dv + first, S + i * kColumns, columns);
  }
}

// Tasks are heads, row by row.
template <int kWidth>
SPECDEC_BODY void delta_heads(const DeltaStepParams& p, int64_t begin, int64_t end) {
  constexpr int kColumns = Slice<kWidth>::kColumns;
  Scratch scratch{std::vector<float>(p.dk * (kColumns + 6)), {}, {}};
  const auto body = [&](int64_t row, int64_t head, const FedRow& fed) __attribute__((always_inline)) {
    size_t committed = 0;
    scratch.tokens.clear();
    scratch.outs.clear();
    const auto token = [&](bool from_window, int64_t index) __attribute__((always_inline)) {
      float* out = p.out + ((row * p.feed.columns + index) * p.heads + head) * p.dv;
      scratch.tokens.push_back(token_of(p, row, head, from_window, index));
      scratch.outs.push_back(from_window ? nullptr : out);
    };
    const auto commit = [&]() __attribute__((always_inline)) { committed = scratch.tokens.size(); };
    each_token(p.feed, fed, p.feed.valid + row * p.feed.columns, p.keep, token, commit);
    float* state = p.state + ((p.feed.first_row + row) * p.heads + head) * p.dk * p.dv;
    for (int64_t first = 0; first < p.dv; first += kColumns) {
      slice<kWidth>(p, state, fed.from_nothing, committed, first, &scratch);
    }
  };
  each_head(p.feed, p.base, p.heads, p.dv, p.out, begin, end, body);
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
