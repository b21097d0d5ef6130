// Selective state-space models: a head's state, [size, numbers], is decayed and added to by every token, and read by
// it. With a decay for each number and heads of size 1 it is Mamba-1, otherwise Mamba-2. A line is what one number of x
// is added to, [numbers]; all heads' lines follow each other, and a thread takes some of them, which stay in its
// nearest cache, through all tokens: they do not depend on the others.

#include "../../common/parallel.h"
#include "../../core/softmax.h"
#include "recurrence.h"
#include "recurrent.h"

namespace specdec::cpu {
namespace {

constexpr int kLines = 16;  // of a task

// Some lines of one group, and what their tokens have in common.
struct Lines {
  int64_t first, count, group, stride;  // numbers are padded to whole vectors in the memory of a thread: [stride]
  int64_t head[kLines];
  alignas(64) float factor[kLines], d[kLines];  // factor: of decays that are not by number
  float *factors, *decays;                      // by number: [kLines, stride]
  float *padded_b, *padded_c;                   // [stride]
};

// What they need of one token.
struct Token {
  const float *b, *c;  // [stride]
  alignas(64) float x[kLines], dt[kLines], added[kLines], decay[kLines];
};

// Takes a token into the lines' state, [kLines, stride], and reads them into `sums` [kLines] if kReads.
template <int kWidth, bool kByNumber, bool kReads>
SPECDEC_BODY void take(const float* from, float* to, const Lines& lines, const Token& token, Ahead* ahead,
                       float* sums) {
  using Vector = typename Lanes<kWidth>::Vector;
  const int64_t stride = lines.stride;
  Vector read[kLines];
#pragma GCC unroll 1
  for (int first = 0; first < kLines; first += 4, from += 4 * stride, to += 4 * stride) {
    float decay[4], added[4];
    std::memcpy(decay, token.decay + first, sizeof(decay));
    std::memcpy(added, token.added + first, sizeof(added));
    Vector sum[4] = {};
    for (int64_t n = 0; n < stride; n += kWidth) {
      Vector b, c;
      ahead->prefetch();
      std::memcpy(&b, token.b + n, sizeof(b));
      if constexpr (kReads) std::memcpy(&c, token.c + n, sizeof(c));
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        const int64_t at = j * stride + n;
        Vector s;
        std::memcpy(&s, from + at, sizeof(s));
        if constexpr (kByNumber) {
          Vector decays;
          std::memcpy(&decays, lines.decays + first * stride + at, sizeof(decays));
          s = s * decays + b * added[j];
        } else {
          s = s * decay[j] + b * added[j];
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
      add_lanes<kWidth>(read + first);
      std::memcpy(sums + first, read + first, sizeof(read[0]));
    }
  }
}

SPECDEC_BODY void find_factors(const SsdStepParams& p, Lines* lines) {
  int64_t head = lines->first / p.size, left = p.size - lines->first % p.size;
  for (int l = 0; l < lines->count; ++l) {
    if (left-- == 0) ++head, left = p.size - 1;
    lines->head[l] = head;
    lines->d[l] = p.d ? p.d[head] : 0.0f;
    if (p.by_number) {
      float* factors = lines->factors + l * lines->stride;
      for (int64_t n = 0; n < p.numbers; ++n) factors[n] = p.a[head * p.numbers + n] * kLog2e;
    } else {
      lines->factor[l] = p.a[head] * kLog2e;
    }
  }
}

// Returns the numbers themselves, or where they are copied to if they are no whole vectors.
SPECDEC_BODY const float* whole_vectors(const float* numbers, int64_t count, const Lines& lines, float* padded) {
  if (count == lines.stride) return numbers;
  std::copy_n(numbers, count, padded);
  return padded;
}

template <int kWidth>
SPECDEC_BODY void prepare(const SsdStepParams& p, const Step& step, const Lines& lines, Token* token) {
  const int64_t at_lines = step.at * p.heads * p.size + lines.first;
  const int64_t at_group = (step.at * p.groups + lines.group) * p.numbers;
  const float* dt = (step.fed ? p.dt : p.window_dt) + step.at * p.heads;
  token->b = whole_vectors((step.fed ? p.b : p.window_b) + at_group, p.numbers, lines, lines.padded_b);
  if (step.fed) token->c = whole_vectors(p.c + at_group, p.numbers, lines, lines.padded_c);
  copy_first<kLines>(token->x, (step.fed ? p.x : p.window_x) + at_lines, lines.count);
  if (p.size == 1) {
    copy_first<kLines>(token->dt, dt + lines.first, lines.count);
  } else if (lines.head[lines.count - 1] == lines.head[0]) {
    std::fill_n(token->dt, kLines, dt[lines.head[0]]);
  } else {
    for (int l = 0; l < lines.count; ++l) token->dt[l] = dt[lines.head[l]];
  }
  for (int l = 0; l < kLines; ++l) token->added[l] = token->dt[l] * token->x[l];
  if (!p.by_number) {
    for (int l = 0; l < kLines; ++l) token->decay[l] = exp2_fast(token->dt[l] * lines.factor[l]);
    return;
  }
  for (int l = 0; l < kLines; ++l) {
    for (int64_t n = l * lines.stride; n < (l + 1) * lines.stride; n += kWidth) {
      for (int i = 0; i < kWidth; ++i) lines.decays[n + i] = exp2_fast(token->dt[l] * lines.factors[n + i]);
    }
  }
}

// Takes a row's tokens into some lines.
template <int kWidth>
SPECDEC_BODY void take_all(const SsdStepParams& p, const Steps& steps, int64_t row, int64_t group, int64_t first,
                           int64_t count, std::vector<float>* memory) {
  const int64_t stride = (p.numbers + kWidth - 1) / kWidth * kWidth, tile = kLines * stride;
  float* tiles = reserve(memory, (steps.tiles + 4) * tile + 2 * stride) + 2 * tile + 2 * stride;
  float *factors = tiles - 2 * tile, *decays = tiles - tile;
  Lines lines{first, count, group, stride, {}, {}, {}, factors, decays, factors - stride, factors - 2 * stride};
  find_factors(p, &lines);
  // Lines that are no whole vectors are computed in a tile, too; there is one for what nothing follows.
  float* state = p.state + ((p.feed.first_row + row) * p.heads * p.size + first) * p.numbers;
  const bool whole = count == kLines && stride == p.numbers;
  float *held = whole ? state : tiles + steps.tiles * tile, *nowhere = tiles + (steps.tiles + 1) * tile;
  if (steps.from_nothing || !whole) std::fill_n(held, tile, 0.0f);
  if (!steps.from_nothing && !whole) {
    for (int l = 0; l < count; ++l) std::copy_n(state + l * p.numbers, p.numbers, held + l * stride);
  }
  const auto at = [&](int place) __attribute__((always_inline)) {
    return place == kHeld ? held : place == kNowhere ? nowhere : tiles + place * tile;
  };
  Ahead ahead = {state + tile, state + 3 * tile};
  Token token{};
  for (const Step& step : steps.all) {
    prepare<kWidth>(p, step, lines, &token);
    const float* from = at(step.parent < 0 ? kHeld : steps.all[step.parent].place);
    float *to = at(step.place), sums[kLines];
    if (!step.fed) {
      p.by_number ? take<kWidth, true, false>(from, to, lines, token, &ahead, sums)
                  : take<kWidth, false, false>(from, to, lines, token, &ahead, sums);
      continue;
    }
    p.by_number ? take<kWidth, true, true>(from, to, lines, token, &ahead, sums)
                : take<kWidth, false, true>(from, to, lines, token, &ahead, sums);
    for (int l = 0; l < kLines; ++l) sums[l] += lines.d[l] * token.x[l];
    copy_first<kLines>(p.out + step.at * p.heads * p.size + first, sums, count);
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
    take_all<kWidth>(p, steps, row, group, group * lines + first, std::min<int64_t>(kLines, lines - first), &memory);
  };
  each_part(p.feed, p.base, p.keep, p.groups * parts, begin, end, body);
}

SPECDEC_BY_INSTRUCTION_SET(ssd_lines, SsdStepParams)

}  // namespace

void ssd_step(const SsdStepParams& params) {
  const auto run = ssd_lines_in_use();
  const int64_t work = kLines * params.numbers * params.feed.columns;
  clear_others(params.feed, params.out, params.heads * params.size);
  const int64_t tasks = params.feed.rows * params.groups * parts_of_group(params);
  parallel_for(tasks, kGrainNumbers / std::max<int64_t>(work, 1) + 1,
               [&](int64_t begin, int64_t end) { run(params, begin, end); });
  if (!params.keep) {
    store(params.feed, params.x, params.window_x, params.heads * params.size);
    store(params.feed, params.dt, params.window_dt, params.heads);
    store(params.feed, params.b, params.window_b, params.groups * params.numbers);
  }
  advance(params.feed, params.base, params.keep);
}

}  // namespace specdec::cpu
