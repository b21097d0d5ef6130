// The gated delta rule: S <- d S + k u^T with u = beta (v - S^T (d k)), o = S^T q. What a token gives needs only its
// products with the state before it: o = S^T (d q) + (k q) u. So one pass over a state takes a token into it and
// multiplies it by the next one's key and query, and a token that nothing follows is not taken at all. A thread does so
// with some columns of one head's state, which stay in its nearest cache: they do not depend on the others.
#include <cmath>

#include "../../common/parallel.h"
#include "../../core/softmax.h"
#include "recurrence.h"
#include "recurrent.h"

namespace specdec::cpu {
namespace {

template <int kWidth>
struct Slice {
  using Vector = typename Lanes<kWidth>::Vector;
  static constexpr int kVectors = kWidth == 16 ? 2 : 4;  // which fit into the registers, and their lines into the cache
  static constexpr int kColumns = kVectors * kWidth;
};

SPECDEC_BODY float dot(const float* x, const float* y, int64_t n) {
  float sums[16] = {};
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    for (int j = 0; j < 16; ++j) sums[j] += x[i + j] * y[i + j];
  }
  for (int j = 0; i + j < n; ++j) sums[j] += x[i + j] * y[i + j];
  for (int half = 8; half > 0; half /= 2) {
    for (int j = 0; j < half; ++j) sums[j] += sums[j + half];
  }
  return sums[0];
}

// What the passes need of a token of one head.
struct Token {
  const float *k, *decay, *decayed_k, *decayed_q;  // [dk], normalised
  const float* v;                                  // [dv]
  float* out;                                      // [dv]
  float beta, k_times_q;
};

// Where some columns of a state are: [dk, stride].
struct Tile {
  float* at;
  int64_t stride;
};

// The products of a state with a token's key and query, both decayed.
template <int kWidth>
struct Products {
  typename Slice<kWidth>::Vector of_k[Slice<kWidth>::kVectors] = {}, of_q[Slice<kWidth>::kVectors] = {};
};

// Takes `own` into a state, if kTakes, and multiplies it by what `next` needs: nothing, its key, or its query, too.
template <int kWidth, bool kTakes, int kProducts>
SPECDEC_BODY void pass(Tile from, Tile to, const Token& own, const typename Slice<kWidth>::Vector* u, const Token& next,
                       int64_t dk, Ahead* ahead, Products<kWidth>* out) {
  using Vector = typename Slice<kWidth>::Vector;
  constexpr int kVectors = Slice<kWidth>::kVectors;
  const float *decays = own.decay, *keys = own.k, *next_keys = next.decayed_k, *next_queries = next.decayed_q;
  Vector own_u[kVectors];
  if constexpr (kTakes) std::memcpy(own_u, u, sizeof(own_u));
  Products<kWidth> sums;
  for (int64_t i = 0; i < dk; ++i) {
    if (i % 2 == 0) ahead->prefetch();
    const float decay = decays[i], k = keys[i], next_k = next_keys[i], next_q = next_queries[i];
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) {
      Vector s;
      std::memcpy(&s, from.at + i * from.stride + j * kWidth, sizeof(s));
      if constexpr (kTakes) {
        s = s * decay + own_u[j] * k;
        std::memcpy(to.at + i * to.stride + j * kWidth, &s, sizeof(s));
      }
      if constexpr (kProducts > 0) sums.of_k[j] += s * next_k;
      if constexpr (kProducts > 1) sums.of_q[j] += s * next_q;
    }
  }
  *out = sums;
}

// The memory of a thread.
struct Scratch {
  std::vector<float> prepared, tiles;
  std::vector<Token> tokens;  // of a row's steps
};

SPECDEC_BODY void prepare(const DeltaStepParams& p, const Step& step, int64_t head, float* memory, Token* token) {
  const int64_t dk = p.dk, of_key = step.at * p.key_heads + head / (p.heads / p.key_heads);
  const int64_t of_head = step.at * p.heads + head;
  const float* k = (step.fed ? p.k : p.window_k) + of_key * dk;
  const float* g = (step.fed ? p.g : p.window_g) + of_head * (p.by_channel ? dk : 1);
  float *own_k = memory, *decay = memory + dk, *decayed_k = memory + 2 * dk, *decayed_q = memory + 3 * dk;
  *token = {own_k,
            decay,
            decayed_k,
            decayed_q,
            (step.fed ? p.v : p.window_v) + of_head * p.dv,
            p.out + of_head * p.dv,
            (step.fed ? p.beta : p.window_beta)[of_head],
            0.0f};
  const float of_whole = p.by_channel ? 0.0f : exp2_fast(g[0] * kLog2e);
  const float scale_k = p.normalize ? 1.0f / std::sqrt(dot(k, k, dk) + 1e-6f) : 1.0f;
  for (int64_t i = 0; i < dk; ++i) {
    own_k[i] = k[i] * scale_k;
    decay[i] = p.by_channel ? exp2_fast(g[i] * kLog2e) : of_whole;
    decayed_k[i] = own_k[i] * decay[i];
  }
  if (!step.fed) return;
  const float* q = p.q + of_key * dk;
  const float scale_q = 1.0f / std::sqrt((p.normalize ? dot(q, q, dk) + 1e-6f : 1.0f) * static_cast<float>(dk));
  for (int64_t i = 0; i < dk; ++i) decayed_q[i] = q[i] * scale_q * decay[i];
  token->k_times_q = dot(own_k, q, dk) * scale_q;
}

// Takes a row's tokens into one head's columns from `first` on.
template <int kWidth>
SPECDEC_BODY void slice(const DeltaStepParams& p, const Steps& steps, float* state, int64_t first, Ahead* ahead,
                        Scratch* scratch) {
  using Vector = typename Slice<kWidth>::Vector;
  constexpr int kVectors = Slice<kWidth>::kVectors, kColumns = Slice<kWidth>::kColumns;
  const int64_t columns = std::min<int64_t>(p.dv - first, kColumns), dk = p.dk, count = steps.all.size();
  float* tiles = reserve(&scratch->tiles, (steps.tiles + 1) * dk * kColumns);
  // Columns that are no whole vectors are computed in a tile, too.
  Tile held = {state + first, p.dv};
  if (columns < kColumns) held = {tiles + steps.tiles * dk * kColumns, kColumns};
  for (int64_t i = 0; i < dk; ++i) {
    if (steps.from_nothing) {
      std::fill_n(held.at + i * held.stride, kColumns, 0.0f);
    } else if (columns < kColumns) {
      std::copy_n(state + i * p.dv + first, columns, held.at + i * kColumns);
    }
  }
  const auto tile = [&](int place) __attribute__((always_inline)) {
    return place < 0 ? held : Tile{tiles + place * dk * kColumns, kColumns};
  };
  Products<kWidth> products;
  for (int64_t t = 0; t < count; ++t) {
    const Step& step = steps.all[t];
    const Token& own = scratch->tokens[t];
    const Tile from = tile(step.parent < 0 ? kHeld : steps.all[step.parent].place);
    if (t == 0 || step.parent != t - 1) {
      if (step.fed) {
        pass<kWidth, false, 2>(from, from, own, nullptr, own, dk, ahead, &products);
      } else {
        pass<kWidth, false, 1>(from, from, own, nullptr, own, dk, ahead, &products);
      }
    }
    Vector u[kVectors] = {}, o[kVectors];
    copy_first<kColumns>(reinterpret_cast<float*>(u), own.v + first, columns);
    for (int j = 0; j < kVectors; ++j) {
      u[j] = (u[j] - products.of_k[j]) * own.beta;
      o[j] = products.of_q[j] + u[j] * own.k_times_q;
    }
    if (step.fed) copy_first<kColumns>(own.out + first, reinterpret_cast<const float*>(o), columns);
    if (step.place == kNowhere) continue;
    const bool goes_on = t + 1 < count && steps.all[t + 1].parent == t;
    const Token& next = scratch->tokens[goes_on ? t + 1 : t];
    if (!goes_on) {
      pass<kWidth, true, 0>(from, tile(step.place), own, u, next, dk, ahead, &products);
    } else if (steps.all[t + 1].fed) {
      pass<kWidth, true, 2>(from, tile(step.place), own, u, next, dk, ahead, &products);
    } else {
      pass<kWidth, true, 1>(from, tile(step.place), own, u, next, dk, ahead, &products);
    }
  }
  if (columns == kColumns) return;
  for (int64_t i = 0; i < dk; ++i) std::copy_n(held.at + i * kColumns, columns, state + i * p.dv + first);
}

// Tasks are heads, row by row.
template <int kWidth>
SPECDEC_BODY void delta_heads(const DeltaStepParams& p, int64_t begin, int64_t end) {
  Scratch scratch;
  const auto body = [&](int64_t row, int64_t head, const Steps& steps) __attribute__((always_inline)) {
    const int64_t count = steps.all.size();
    float* prepared = reserve(&scratch.prepared, count * 4 * p.dk);
    scratch.tokens.resize(count);
    for (int64_t t = 0; t < count; ++t) prepare(p, steps.all[t], head, prepared + t * 4 * p.dk, &scratch.tokens[t]);
    float* state = p.state + ((p.feed.first_row + row) * p.heads + head) * p.dk * p.dv;
    Ahead ahead = {state + p.dk * p.dv, state + 3 * p.dk * p.dv};
    for (int64_t first = 0; first < p.dv; first += Slice<kWidth>::kColumns) {
      slice<kWidth>(p, steps, state, first, &ahead, &scratch);
    }
  };
  each_part(p.feed, p.base, p.keep, p.heads, begin, end, body);
}

SPECDEC_BY_INSTRUCTION_SET(delta_heads, DeltaStepParams)

}  // namespace

void delta_step(const DeltaStepParams& params) {
  const auto run = delta_heads_in_use();
  const int64_t work = params.dk * params.dv * params.feed.columns;
  clear_others(params.feed, params.out, params.heads * params.dv);
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
