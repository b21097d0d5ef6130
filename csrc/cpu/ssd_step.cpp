// Selective state-space models: a head's state, [size, numbers], is decayed and added to by every token, and read by it.
// With a decay for each number and heads of size 1 it is Mamba-1, otherwise Mamba-2. A line is what one number of x is
// added to, [numbers]; all heads' lines follow each other, and a thread takes some of them, which stay in its nearest
// cache, through all tokens: they do not depend on the others.
#include <utility>

#include "../core/softmax.h"
#include "parallel.h"
#include "recurrence.h"
#include "recurrent.h"

namespace specdec::cpu {
namespace {

constexpr int kLines = 16;  // of a task

template <int kWidth>
struct Lanes {
  typedef float Vector __attribute__((vector_size(kWidth * sizeof(float))));
};

// Of every 2 * half lanes the lower ones become the sums of both halves of x, the upper ones those of y.
template <class Vector, int half, int... lane>
SPECDEC_BODY void add_halves(Vector& x, const Vector& y, std::integer_sequence<int, lane...>) {
  constexpr int kWidth = sizeof...(lane);
  x = __builtin_shufflevector(x, y, (lane / (2 * half) * 2 * half + lane % half + (lane & half ? kWidth : 0))...) +
      __builtin_shufflevector(x, y, (lane / (2 * half) * 2 * half + lane % half + half + (lane & half ? kWidth : 0))...);
}

// Adds up the lanes of 2 * half vectors; the sum of the i-th becomes lane i of the first. The order is one for all.
template <int kWidth, int half = kWidth / 2>
SPECDEC_BODY void sum_lanes(typename Lanes<kWidth>::Vector* x) {
#pragma GCC unroll 8
  for (int i = 0; i < half; ++i) {
    add_halves<typename Lanes<kWidth>::Vector, half>(x[i], x[i + half], std::make_integer_sequence<int, kWidth>());
  }
  if constexpr (half > 1) sum_lanes<kWidth, half / 2>(x);
}

// What kLines lines need of one token.
struct Token {
  const float *b, *c;            // [padded numbers]; c is null if nothing is read
  alignas(64) float x[kLines], dt[kLines], added[kLines];
  float* decay;  // [kLines], or [kLines, padded numbers] by number
};

// Takes a token into kLines lines of a state, [kLines, stride], and reads them into `sums` [kLines] if kReads.
template <int kWidth, bool kByNumber, bool kReads>
SPECDEC_BODY void take(const float* from, float* to, int64_t stride, const Token& token, float* sums) {
  using Vector = typename Lanes<kWidth>::Vector;
  Vector read[kLines];
#pragma GCC unroll 4
  for (int first = 0; first < kLines; first += 4) {
    Vector sum[4] = {};
    for (int64_t n = 0; n < stride; n += kWidth) {
      Vector b, c;
      std::memcpy(&b, token.b + n, sizeof(b));
      if constexpr (kReads) std::memcpy(&c, token.c + n, sizeof(c));
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        const int64_t at = (first + j) * stride + n;
        Vector s;
        std::memcpy(&s, from + at, sizeof(s));
        if constexpr (kByNumber) {
          Vector decay;
          std::memcpy(&decay, token.decay + at, sizeof(decay));
          s = s * decay + b * token.added[first + j];
        } else {
          s = s * token.decay[first + j] + b * token.added[first + j];
        }
        std::memcpy(to + at, &s, sizeof(s));
        if constexpr (kReads) sum[j] += s * c;
      }
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) read[first + j] = sum[j];
  }
  if constexpr (kReads) {
#pragma GCC unroll 4
    for (int first = 0; first < kLines; first += kWidth) {
      sum_lanes<kWidth>(read + first);
      std::memcpy(sums + first, read + first, sizeof(read[0]));
    }
  }
}

// The numbers of a state are padded to whole vectors in the scratch memory of a thread.
template <int kWidth>
SPECDEC_BODY int64_t padded(int64_t numbers) {
  return (numbers + kWidth - 1) / kWidth * kWidth;
}

template <int kWidth>
SPECDEC_BODY void lines_of(const SsdStepParams& p, const Steps& steps, int64_t row, int64_t group, int64_t first,
                           int64_t count, std::vector<float>* memory) {
  const int64_t stride = padded<kWidth>(p.numbers), tile = kLines * stride, lines = p.heads * p.size;
  float* a = reserve(memory, 2 * tile + 2 * stride + (steps.tiles + 2) * tile);
  float *decay = a + tile, *own_b = decay + tile, *own_c = own_b + stride, *tiles = own_c + stride;
  float* state = p.state + ((p.feed.first_row + row) * lines + first) * p.numbers;
  const bool whole = count == kLines && stride == p.numbers;
  int64_t head[kLines];
  alignas(64) float factor[kLines] = {}, d[kLines] = {};
  for (int l = 0; l < count; ++l) {
    head[l] = (first + l) / p.size;
    if (p.by_number) {
      for (int64_t n = 0; n < p.numbers; ++n) a[l * stride + n] = p.a[head[l] * p.numbers + n] * kLog2e;
    } else {
      factor[l] = p.a[head[l]] * kLog2e;
    }
    d[l] = p.d ? p.d[head[l]] : 0.0f;
  }
  // Lines that are no whole vectors are computed in a tile, too; there is one for what nothing follows.
  float *held = whole ? state : tiles + steps.tiles * tile, *nowhere = tiles + (steps.tiles + 1) * tile;
  if (steps.from_nothing || !whole) std::fill_n(held, tile, 0.0f);
  if (!steps.from_nothing && !whole) {
    for (int l = 0; l < count; ++l) std::copy_n(state + l * p.numbers, p.numbers, held + l * stride);
  }
  const auto place = [&](int number) __attribute__((always_inline)) { return number < 0 ? held : tiles + number * tile; };
  for (const Step& step : steps.all) {
    Token token{};
    token.decay = decay;
    const float* x = (step.fed ? p.x : p.window_x) + step.at * lines + first;
    const float* dt = (step.fed ? p.dt : p.window_dt) + step.at * p.heads;
    token.b = (step.fed ? p.b : p.window_b) + (step.at * p.groups + group) * p.numbers;
    token.c = step.fed ? p.c + (step.at * p.groups + group) * p.numbers : nullptr;
    if (stride != p.numbers) {
      token.b = std::copy_n(token.b, p.numbers, own_b) - p.numbers;
      if (token.c) token.c = std::copy_n(token.c, p.numbers, own_c) - p.numbers;
    }
    std::copy_n(x, count, token.x);
    for (int l = 0; l < count; ++l) token.dt[l] = dt[head[l]];
    for (int l = 0; l < kLines; ++l) token.added[l] = token.dt[l] * token.x[l];
    if (p.by_number) {
      for (int l = 0; l < kLines; ++l) {
        for (int64_t n = 0; n < stride; n += kWidth) {
          for (int i = 0; i < kWidth; ++i) decay[l * stride + n + i] = exp2_fast(token.dt[l] * a[l * stride + n + i]);
        }
      }
    } else {
      for (int l = 0; l < kLines; ++l) decay[l] = exp2_fast(token.dt[l] * factor[l]);
    }
    const float* from = place(step.parent < 0 ? kHeld : steps.all[step.parent].place);
    float* to = step.place == kNowhere ? nowhere : place(step.place);
    alignas(64) float sums[kLines];
    if (!step.fed) {
      p.by_number ? take<kWidth, true, false>(from, to, stride, token, sums)
                  : take<kWidth, false, false>(from, to, stride, token, sums);
      continue;
    }
    p.by_number ? take<kWidth, true, true>(from, to, stride, token, sums)
                : take<kWidth, false, true>(from, to, stride, token, sums);
    for (int l = 0; l < kLines; ++l) sums[l] += d[l] * token.x[l];
    std::copy_n(sums, count, p.out + step.at * lines + first);
  }
  if (whole) return;
  for (int l = 0; l < count; ++l) std::copy_n(held + l * stride, p.numbers, state + l * p.numbers);
}

SPECDEC_BODY int64_t parts_of_group(const SsdStepParams& p) {
  return (p.heads / p.groups * p.size + kLines - 1) / kLines;
}

// Tasks are parts of the lines of a group, group by group, row by row.
template <int kWidth>
SPECDEC_BODY void ssd_lines(const SsdStepParams& p, int64_t begin, int64_t end) {
  const int64_t parts = parts_of_group(p), lines = p.heads / p.groups * p.size;
  std::vector<float> memory;
  const auto body = [&](int64_t row, int64_t part, const Steps& steps) __attribute__((always_inline)) {
    const int64_t group = part / parts, first = part % parts * kLines;
    lines_of<kWidth>(p, steps, row, group, group * lines + first, std::min<int64_t>(kLines, lines - first), &memory);
  };
  each_part(p.feed, p.base, p.keep, p.groups * parts, begin, end, body);
}

SPECDEC_BY_INSTRUCTION_SET(ssd_lines, SsdStepParams)

}  // namespace

void ssd_step(const SsdStepParams& params) {
  const auto run = ssd_lines_in_use();
  const int64_t work = kLines * params.numbers * params.feed.columns;
  clear_others(params.feed, params.out, params.heads * params.size);
  parallel_for(params.feed.rows * params.groups * parts_of_group(params), kGrainNumbers / std::max<int64_t>(work, 1) + 1,
               [&](int64_t begin, int64_t end) { run(params, begin, end); });
  if (!params.keep) {
    store(params.feed, params.x, params.window_x, params.heads * params.size);
    store(params.feed, params.dt, params.window_dt, params.heads);
    store(params.feed, params.b, params.window_b, params.groups * params.numbers);
  }
  advance(params.feed, params.base, params.keep);
}

}  // namespace specdec::cpu
