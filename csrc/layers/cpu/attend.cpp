// Every query of every head is computed by itself, over the slots that it sees, in their order: its result does not
// depend on the other queries, nor on where in a cache the nodes of a tree are. Some queries, or heads, of one key head
// share what they read.
#include "attend.h"

#include <algorithm>
#include <cmath>
#include <memory>

#include "../../common/parallel.h"
#include "../../core/softmax.h"
#include "lanes.h"

namespace specdec::cpu {
namespace {

constexpr int64_t kGrainProducts = 32 * 1024;  // are worth a thread

// One query of one head.
struct Query {
  const float* q;
  int64_t first, end;   // it sees these slots, and then those of a path
  const int64_t* path;  // [columns - 2]
  int64_t length;       // how many slots it sees
  float* weights;       // [length], in their order
  const float* sink;    // null: none
  float* out;
};

// The slots that some of the queries see, and those among them that all see, which may be none.
struct Slots {
  int64_t from, all_from, all_to, to;
};

template <int kQueries>
SPECDEC_BODY Slots seen_by(const Query* queries) {
  Slots slots = {queries[0].first, queries[0].first, queries[0].end, queries[0].end};
  for (int j = 1; j < kQueries; ++j) {
    slots.from = std::min(slots.from, queries[j].first), slots.to = std::max(slots.to, queries[j].end);
    slots.all_from = std::max(slots.all_from, queries[j].first), slots.all_to = std::min(slots.all_to, queries[j].end);
  }
  slots.all_from = std::min(slots.all_from, slots.to), slots.all_to = std::max(slots.all_to, slots.all_from);
  return slots;
}

// Products of kQueries queries with kWidth / kQueries keys: lane i is that of query i / kKeys and key i % kKeys.
template <int kWidth, int kQueries, class Stored, class Vector>
SPECDEC_BODY void products(const float* const* q, const Stored* const* k, int64_t size, Vector* out) {
  constexpr int kKeys = kWidth / kQueries;
  const int64_t whole = size / kWidth * kWidth;
  Vector sums[kWidth] = {};
  const auto add = [&](const auto& load) __attribute__((always_inline)) {
    Vector keys[kKeys];
#pragma GCC unroll 16
    for (int i = 0; i < kKeys; ++i) load(k[i], &keys[i]);
#pragma GCC unroll 4
    for (int j = 0; j < kQueries; ++j) {
      Vector x;
      load(q[j], &x);
#pragma GCC unroll 16
      for (int i = 0; i < kKeys; ++i) sums[j * kKeys + i] += x * keys[i];
    }
  };
  for (int64_t c = 0; c < whole; c += kWidth) {
    add([&](const auto* row, Vector* x) __attribute__((always_inline)) { widen<kWidth>(row + c, x); });
  }
  if (whole < size) {
    add([&](const auto* row, Vector* x)
            __attribute__((always_inline)) { widen_some<kWidth>(row + whole, size - whole, x); });
  }
  add_lanes<kWidth>(sums);
  *out = sums[0];
}

// cap tanh(score / cap), by an exponent that is never above 0.
SPECDEC_BODY void cap_scores(float* scores, int64_t length, float cap) {
  for (int64_t i = 0; i < length; ++i) {
    const float power = exp2_fast(std::fabs(scores[i]) * (-2.0f * kLog2e / cap));
    const float size = cap * (1.0f - power) / (1.0f + power);
    scores[i] = scores[i] < 0.0f ? -size : size;
  }
}

// The weights of the slots before their sum is 1; returns the factor that makes it so. Sum i is of every 16th weight.
template <int kWidth>
SPECDEC_BODY float softmax(float* weights, int64_t length, const float* sink) {
  using Vector = typename Lanes<kWidth>::Vector;
  constexpr int kSums = 16, kVectors = kSums / kWidth;
  const int64_t whole = length / kSums * kSums;
  float most = sink ? *sink : weights[0];
  Vector largest = most - Vector{}, vector;
  for (int64_t i = 0; i < whole; i += kWidth) {
    std::memcpy(&vector, weights + i, sizeof(vector));
    largest = vector > largest ? vector : largest;
  }
  for (int i = 0; i < kWidth; ++i) most = largest[i] > most ? largest[i] : most;
  for (int64_t i = whole; i < length; ++i) most = weights[i] > most ? weights[i] : most;
  for (int64_t i = 0; i < length; ++i) weights[i] = exp2_fast((weights[i] - most) * kLog2e);
  Vector vectors[kVectors] = {};
  for (int64_t i = 0; i < whole; i += kSums) {
#pragma GCC unroll 4
    for (int j = 0; j < kVectors; ++j) {
      std::memcpy(&vector, weights + i + j * kWidth, sizeof(vector));
      vectors[j] += vector;
    }
  }
  float sums[kSums];
  std::memcpy(sums, vectors, sizeof(sums));
  for (int64_t i = whole; i < length; ++i) sums[i % kSums] += weights[i];
  for (int half = kSums / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) sums[i] += sums[i + half];
  }
  if (sink) sums[0] += exp2_fast((*sink - most) * kLog2e);
  return 1.0f / sums[0];
}

// The sums of the values' numbers from `first` on, kVectors vectors of them, or `rest` numbers.
template <int kWidth, int kQueries, int kVectors, bool kWhole, class Stored>
SPECDEC_BODY void values(const AttendParams& params, const Query* queries, const float* factors, const Stored* v,
                         int64_t first, int64_t rest) {
  using Vector = typename Lanes<kWidth>::Vector;
  Vector sums[kQueries][kVectors] = {};
  const auto load = [&](int64_t slot, Vector* numbers) __attribute__((always_inline)) {
    const Stored* from = v + slot * params.v_strides[2] + first;
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i) {
      if (kWhole) {
        widen<kWidth>(from + i * kWidth, &numbers[i]);
      } else {
        widen_some<kWidth>(from, rest, &numbers[i]);
      }
    }
  };
  const auto add = [&](int j, float weight, const Vector* numbers) __attribute__((always_inline)) {
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i) sums[j][i] += numbers[i] * weight;
  };
  const Slots slots = seen_by<kQueries>(queries);
  // What a slot holds that a query does not see is not multiplied by 0: it may be NaN.
  const auto some = [&](int64_t begin, int64_t end) __attribute__((always_inline)) {
    for (int64_t slot = begin; slot < end; ++slot) {
      Vector numbers[kVectors];
      load(slot, numbers);
#pragma GCC unroll 4
      for (int j = 0; j < kQueries; ++j) {
        const Query& query = queries[j];
        if (slot >= query.first && slot < query.end) add(j, query.weights[slot - query.first], numbers);
      }
    }
  };
  some(slots.from, slots.all_from);
  for (int64_t slot = slots.all_from; slot < slots.all_to; ++slot) {
    Vector numbers[kVectors];
    load(slot, numbers);
#pragma GCC unroll 4
    for (int j = 0; j < kQueries; ++j) add(j, queries[j].weights[slot - queries[j].first], numbers);
  }
  some(slots.all_to, slots.to);
  for (int j = 0; j < kQueries; ++j) {
    const Query& query = queries[j];
    const float* weight = query.weights + (query.end - query.first);
    for (int64_t i = 0; i < params.columns - 2; ++i) {
      if (query.path[i] < 0 || query.path[i] >= params.slots) continue;
      Vector numbers[kVectors];
      load(query.path[i], numbers);
      add(j, *weight++, numbers);
    }
    for (int i = 0; i < kVectors; ++i) {
      const Vector scaled = sums[j][i] * factors[j];
      std::memcpy(query.out + first + i * kWidth, &scaled, (kWhole ? kWidth : rest) * sizeof(float));
    }
  }
}

template <int kWidth, int kQueries, class Stored>
SPECDEC_BODY void attend_together(const AttendParams& params, Query* queries, const Stored* k, const Stored* v) {
  using Vector = typename Lanes<kWidth>::Vector;
  constexpr int kKeys = kWidth / kQueries, kVectors = kWidth == 16 ? 4 : 2;
  const float* q[kQueries];
  const Slots slots = seen_by<kQueries>(queries);
  for (int j = 0; j < kQueries; ++j) q[j] = queries[j].q;
  const Stored* keys[kWidth];
  Vector scores;
  for (int64_t slot = slots.from; slot < slots.to; slot += kKeys) {
    for (int i = 0; i < kKeys; ++i) keys[i] = k + std::min(slot + i, slots.to - 1) * params.k_strides[2];
    products<kWidth, kQueries>(q, keys, params.size, &scores);
    scores *= params.scale;
    if (slot >= slots.all_from && slot + kKeys <= slots.all_to) {
      float each[kWidth];
      std::memcpy(each, &scores, sizeof(each));
#pragma GCC unroll 4
      for (int j = 0; j < kQueries; ++j)
        std::memcpy(queries[j].weights + (slot - queries[j].first), each + j * kKeys, kKeys * sizeof(float));
      continue;
    }
    for (int i = 0; i < kWidth; ++i) {
      const Query& query = queries[i / kKeys];
      const int64_t own = slot + i % kKeys;
      if (own >= query.first && own < query.end) query.weights[own - query.first] = scores[i];
    }
  }
  float factors[kQueries];
  for (int j = 0; j < kQueries; ++j) {
    Query& query = queries[j];
    query.length = query.end - query.first;
    for (int64_t i = 0; i < params.columns - 2; ++i) {
      if (query.path[i] < 0 || query.path[i] >= params.slots) continue;
      for (int lane = 0; lane < kWidth; ++lane) keys[lane] = k + query.path[i] * params.k_strides[2];
      products<kWidth, 1>(&query.q, keys, params.size, &scores);
      query.weights[query.length++] = scores[0] * params.scale;
    }
    if (params.cap > 0.0f) cap_scores(query.weights, query.length, params.cap);
    factors[j] = query.length > 0 ? softmax<kWidth>(query.weights, query.length, query.sink) : 0.0f;
  }
  int64_t first = 0;
  for (; first + kVectors * kWidth <= params.value_size; first += kVectors * kWidth) {
    values<kWidth, kQueries, kVectors, true>(params, queries, factors, v, first, 0);
  }
  for (; first + kWidth <= params.value_size; first += kWidth) {
    values<kWidth, kQueries, 1, true>(params, queries, factors, v, first, 0);
  }
  if (const int64_t rest = params.value_size - first; rest > 0) {
    values<kWidth, kQueries, 1, false>(params, queries, factors, v, first, rest);
  }
}

// Tasks are kQueries queries and heads of a key head, which come query by query; the last ones may come again.
template <int kWidth, int kQueries, class Stored>
SPECDEC_BODY void tasks(const AttendParams& params, int64_t begin, int64_t end) {
  const int64_t group = params.heads / params.key_heads, all = group * params.queries;
  const int64_t parts = (all + kQueries - 1) / kQueries;
  const std::unique_ptr<float[]> weights(new float[kQueries * (params.slots + params.columns)]);  // each is written
  for (int64_t task = begin; task < end; ++task) {
    const int64_t row = task / parts / params.key_heads, key_head = task / parts % params.key_heads;
    Query queries[kQueries];
    for (int j = 0; j < kQueries; ++j) {
      const int64_t i = std::min(task % parts * kQueries + j, all - 1);
      const int64_t at = i / group, head = key_head * group + i % group;
      const int64_t* seen = params.seen + (row * params.queries + at) * params.columns;
      const int64_t first = std::clamp<int64_t>(seen[0], 0, params.slots);
      queries[j] = {
          .q = params.q + row * params.q_strides[0] + head * params.q_strides[1] + at * params.q_strides[2],
          .first = first,
          .end = std::clamp(seen[1], first, params.slots),
          .path = seen + 2,
          .length = 0,
          .weights = weights.get() + j * (params.slots + params.columns),
          .sink = params.sinks ? params.sinks + head : nullptr,
          .out = params.out + ((row * params.queries + at) * params.heads + head) * params.value_size,
      };
    }
    const Stored* k = static_cast<const Stored*>(params.k) + row * params.k_strides[0] + key_head * params.k_strides[1];
    const Stored* v = static_cast<const Stored*>(params.v) + row * params.v_strides[0] + key_head * params.v_strides[1];
    attend_together<kWidth, kQueries>(params, queries, k, v);
  }
}

int64_t together(const AttendParams& params) {
  const int64_t all = params.heads / params.key_heads * params.queries;
  return all > 2 ? 4 : all;
}

template <int kWidth, class Stored>
SPECDEC_BODY void by_number(const AttendParams& params, int64_t begin, int64_t end) {
  switch (together(params)) {
    case 1:
      return tasks<kWidth, 1, Stored>(params, begin, end);
    case 2:
      return tasks<kWidth, 2, Stored>(params, begin, end);
    default:
      return tasks<kWidth, 4, Stored>(params, begin, end);
  }
}

template <int kWidth>
SPECDEC_BODY void range(const AttendParams& params, int64_t begin, int64_t end) {
  if (params.dtype == Dtype::kBFloat16) return by_number<kWidth, BFloat16>(params, begin, end);
  by_number<kWidth, float>(params, begin, end);
}

SPECDEC_BY_INSTRUCTION_SET(range, AttendParams)

}  // namespace

void attend(const AttendParams& params) {
  if (params.rows * params.queries * params.heads == 0) return;
  const int64_t all = params.heads / params.key_heads * params.queries, many = together(params);
  const int64_t products = std::max<int64_t>(many * params.slots * (params.size + params.value_size), 1);
  const auto run = range_in_use();
  parallel_for(params.rows * params.key_heads * ((all + many - 1) / many), (kGrainProducts + products - 1) / products,
               [&](int64_t begin, int64_t end) { run(params, begin, end); });
}

}  // namespace specdec::cpu
