// What the recurrences share: how the tokens of one row follow each other, and what is stored at the end.
#pragma once

#include <algorithm>
#include <cstring>
#include <string_view>

#include "../core/feed.h"
#include "block.h"
#include "load.h"

namespace specdec::cpu {

// Calls token(window, index, out) for every token that a row's state lacks and then for every fed one, in order. `window`
// says whether its inputs are at [state row, place = index] of a window, or at [row, column = index] of the inputs;
// only of the latter anything is read (`out`). Calls commit() once, when the state has the tokens that stay.
template <class Token, class Commit>
SPECDEC_BODY void each_token(const Feed& feed, const FedRow& row, const bool* valid, bool keep, const Token& token,
                             const Commit& commit) {
  int64_t position = row.begin;
  for (; position < row.commit; ++position) token(true, position % feed.places);
  if (!keep) commit();
  for (; position < row.start; ++position) token(true, position % feed.places);
  for (int64_t column = 0; column < feed.columns; ++column) {
    if (valid[column]) token(false, column);
  }
  if (keep) commit();
}

inline int64_t count_valid(const Feed& feed, int64_t row) {
  const bool* valid = feed.valid + row * feed.columns;
  return std::count(valid, valid + feed.columns, true);
}

// Stores the inputs x [rows, columns, numbers] of tokens that may be rolled back in a window [R, places, numbers].
inline void store(const Feed& feed, const float* x, float* window, int64_t numbers) {
  for (int64_t row = 0; row < feed.rows; ++row) {
    int64_t position = feed.start[row];
    for (int64_t column = 0; column < feed.columns; ++column) {
      if (!feed.valid[row * feed.columns + column]) continue;
      const int64_t place = (feed.first_row + row) * feed.places + position++ % feed.places;
      std::memcpy(window + place * numbers, x + (row * feed.columns + column) * numbers, numbers * sizeof(float));
    }
  }
}

// Notes how many tokens the states contain after an operation.
inline void advance(const Feed& feed, int64_t* base, bool keep) {
  for (int64_t row = 0; row < feed.rows; ++row) {
    const int64_t count = count_valid(feed, row), start = feed.start[row];
    if (count == 0) continue;
    int64_t& own = base[feed.first_row + row];
    own = keep ? start + count : fed_row(own, start, feed.commit[row], feed.places).commit;
  }
}

// Zeroes the results of the columns that are no tokens: `size` numbers each, `stride` apart.
SPECDEC_BODY void clear_others(const Feed& feed, int64_t row, float* out, int64_t stride, int64_t size) {
  for (int64_t column = row * feed.columns; column < (row + 1) * feed.columns; ++column) {
    if (!feed.valid[column]) std::fill_n(out + column * stride, size, 0.0f);
  }
}

// Calls body(row, head, fed) for the tasks from `begin` to `end`, which are heads, row by row, and zeroes the results
// [rows, columns, heads, size] of the columns that are no tokens.
template <class Body>
SPECDEC_BODY void each_head(const Feed& feed, const int64_t* base, int64_t heads, int64_t size, float* out,
                            int64_t begin, int64_t end, const Body& body) {
  for (int64_t task = begin; task < end; ++task) {
    const int64_t row = task / heads, head = task % heads;
    clear_others(feed, row, out + head * size, heads * size, size);
    if (count_valid(feed, row) == 0) continue;
    body(row, head, fed_row(base[feed.first_row + row], feed.start[row], feed.commit[row], feed.places));
  }
}

constexpr int64_t kGrainNumbers = 16 * 1024;  // of a state, times tokens, are worth a thread

// A kernel for each instruction set, by its number of float lanes: SPECDEC_BODY functions are compiled in that of their
// caller.
#if defined(__x86_64__)
#define SPECDEC_BY_INSTRUCTION_SET(body, Params)                                                                     \
  void body##_baseline(const Params& params, int64_t begin, int64_t end) { body<4>(params, begin, end); }            \
  __attribute__((target("avx2,fma"))) void body##_avx2(const Params& params, int64_t begin, int64_t end) {           \
    body<8>(params, begin, end);                                                                                     \
  }                                                                                                                  \
  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma"))) void body##_avx512(                         \
      const Params& params, int64_t begin, int64_t end) {                                                            \
    body<16>(params, begin, end);                                                                                    \
  }                                                                                                                  \
  auto body##_in_use() {                                                                                             \
    const std::string_view name = block_kernels().instruction_set;                                                   \
    return name == "avx512" ? body##_avx512 : name == "avx2" ? body##_avx2 : body##_baseline;                        \
  }
#else
#define SPECDEC_BY_INSTRUCTION_SET(body, Params)                                                          \
  void body##_baseline(const Params& params, int64_t begin, int64_t end) { body<4>(params, begin, end); } \
  auto body##_in_use() { return body##_baseline; }
#endif

}  // namespace specdec::cpu
