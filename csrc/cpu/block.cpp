#include "block.h"

#include "../common/instruction_set.h"
#include "block_bins.h"
#include "block_draws.h"
#include "block_nucleus.h"
#include "block_sums.h"

namespace specdec::cpu {
namespace {

SPECDEC_BODY int64_t find_body(Row row, int64_t block, float value, int64_t n) {
  alignas(64) float buffer[kBlock];
  const float* x = view(row, block, buffer);
  for (int64_t i = 0; i < n; ++i) {
    if (x[i] == value) return block * kBlock + i;
  }
  return -1;
}

SPECDEC_BODY int64_t copy_body(Row row, int64_t block, float* out) {
  load_range(row, block * kBlock, size_of(row, block), out);
  return size_of(row, block);
}

// One function: its body is inlined twice, with the size of a full block as a constant, and with any size.
#define SPECDEC_KERNEL(attributes, result, name, parameters, row, ...)                            \
  attributes result name parameters {                                                             \
    const int64_t n = padded_size(row, block);                                                    \
    return n == kBlock ? name##_body(__VA_ARGS__, int64_t{kBlock}) : name##_body(__VA_ARGS__, n); \
  }

// The function that takes most of the time is compiled by itself: inlined, GCC keeps its partial sums in memory.
#define SPECDEC_ALONE __attribute__((noinline))

// All functions for one instruction set, `attributes`. t: inverse temperature; c: cutoff; s: stream.
#define SPECDEC_KERNELS(name, attributes, Vector, prefix)                                                              \
  namespace name {                                                                                                     \
  SPECDEC_PHILOX_WORDS(attributes, Vector, prefix)                                                                     \
  SPECDEC_KERNEL(attributes, float, max, (Row row, int64_t block, float* lanes), row, row, block, lanes)               \
  attributes SPECDEC_ALONE BlockStats stats_of_block(const float* x, float t, float* lanes, const void* next) {        \
    return stats_of_floats(x, kBlock, t, lanes, next, [](int64_t, int, float) {});                                     \
  }                                                                                                                    \
  attributes SPECDEC_ALONE BlockStats stats_of_rest(const float* x, int64_t n, float t, float* lanes) {                \
    return stats_of_floats(x, n, t, lanes, x, [](int64_t, int, float) {});                                             \
  }                                                                                                                    \
  attributes BlockStats stats(Row row, int64_t block, float t, float* lanes) {                                         \
    alignas(64) float buffer[kBlock];                                                                                  \
    const float* x = view(row, block, buffer);                                                                         \
    const int64_t n = padded_size(row, block);                                                                         \
    return n == kBlock ? stats_of_block(x, t, lanes, next_of(row, block)) : stats_of_rest(x, n, t, lanes);             \
  }                                                                                                                    \
  attributes SPECDEC_ALONE BlockStats mark_of_block(const float* x, float t, const void* next, float mark,             \
                                                    float* above) {                                                    \
    return mark_of_floats(x, kBlock, t, next, mark, above);                                                            \
  }                                                                                                                    \
  attributes SPECDEC_ALONE BlockStats mark_of_rest(const float* x, int64_t n, float t, float mark, float* above) {     \
    return mark_of_floats(x, n, t, x, mark, above);                                                                    \
  }                                                                                                                    \
  attributes BlockStats mark(Row row, int64_t block, float t, float mark, float* above) {                              \
    alignas(64) float buffer[kBlock];                                                                                  \
    const float* x = view(row, block, buffer);                                                                         \
    const int64_t n = padded_size(row, block);                                                                         \
    return n == kBlock ? mark_of_block(x, t, next_of(row, block), mark, above) : mark_of_rest(x, n, t, mark, above);   \
  }                                                                                                                    \
  attributes SPECDEC_ALONE BlockStats split_of_block(const float* x, float t, float* lanes, const void* next,          \
                                                     Bracket bracket, Split* split) {                                  \
    return split_of_floats(x, kBlock, t, lanes, next, bracket, split);                                                 \
  }                                                                                                                    \
  attributes SPECDEC_ALONE BlockStats split_of_rest(const float* x, int64_t n, float t, float* lanes, Bracket bracket, \
                                                    Split* split) {                                                    \
    return split_of_floats(x, n, t, lanes, x, bracket, split);                                                         \
  }                                                                                                                    \
  attributes BlockStats split(Row row, int64_t block, float t, float* lanes, Bracket bracket, Split* split) {          \
    alignas(64) float buffer[kBlock];                                                                                  \
    const float* x = view(row, block, buffer);                                                                         \
    const int64_t n = padded_size(row, block);                                                                         \
    return n == kBlock ? split_of_block(x, t, lanes, next_of(row, block), bracket, split)                              \
                       : split_of_rest(x, n, t, lanes, bracket, split);                                                \
  }                                                                                                                    \
  attributes void sample(Row row, int64_t block, float* x) { sample_body(row, block, x); }                             \
  attributes void tally(const float* x, int64_t n, const SampleBins& bins, int32_t* counts) {                          \
    tally_body(x, n, bins, counts);                                                                                    \
  }                                                                                                                    \
  attributes Bracket sample_range(const float* x, int64_t n, const SampleBins& bins, int32_t first, int32_t last) {    \
    return sample_range_body(x, n, bins, first, last);                                                                 \
  }                                                                                                                    \
  SPECDEC_KERNEL(attributes, float, sum_above, (Row row, int64_t block, float max, float t, float c), row, row, block, \
                 max, t, c)                                                                                            \
  SPECDEC_KERNEL(attributes, void, histogram,                                                                          \
                 (Row row, int64_t block, const float* lanes, const Bins& bins, double* sums), row, row, block, lanes, \
                 bins, sums)                                                                                           \
  SPECDEC_KERNEL(attributes, void, range,                                                                              \
                 (Row row, int64_t block, const Bins& bins, int bin, float* low, float* high), row, row, block, bins,  \
                 bin, low, high)                                                                                       \
  SPECDEC_KERNEL(attributes, float, residual_sum,                                                                      \
                 (Row p_row, Distribution p, float w, const DraftDistribution& q, int64_t block), p_row, p_row, p, w,  \
                 q, block)                                                                                             \
  SPECDEC_KERNEL(attributes, int64_t, draw,                                                                            \
                 (Row row, int64_t block, float max, float t, float c, Noise noise, Stream s), row, philox_words, row, \
                 block, max, t, c, noise, s)                                                                           \
  SPECDEC_KERNEL(attributes, int64_t, draw_residual,                                                                   \
                 (Row p_row, Distribution p, float w, const DraftDistribution& q, int64_t block, Noise noise), p_row,  \
                 philox_words, p_row, p, w, q, block, noise)                                                           \
  SPECDEC_KERNEL(attributes, int64_t, arrivals,                                                                        \
                 (Row row, int64_t block, const Race& race, float block_max, float least, Candidate* out), row,        \
                 philox_words, row, block, race, block_max, least, out)                                                \
  SPECDEC_KERNEL(attributes, int64_t, find, (Row row, int64_t block, float value), row, row, block, value)             \
  attributes int64_t draw_index(const float* w, int64_t n, Noise noise, Stream s) {                                    \
    return draw_index_body(philox_words, w, n, noise, s);                                                              \
  }                                                                                                                    \
  attributes int64_t copy(Row row, int64_t block, float* out) { return copy_body(row, block, out); }                   \
  constexpr BlockKernels kernels = {max,           stats,     mark,       split, sample,       tally,                  \
                                    sample_range,  sum_above, histogram,  range, residual_sum, draw,                   \
                                    draw_residual, arrivals,  draw_index, find,  copy};                                \
  }

SPECDEC_KERNELS(baseline, , __m128i, _mm)
#if defined(__x86_64__)
SPECDEC_KERNELS(avx2, __attribute__((target("avx2,fma"))), __m256i, _mm256)
#if defined(__clang__)
SPECDEC_KERNELS(avx512, __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma"))), __m512i, _mm512)
#else
SPECDEC_KERNELS(avx512, __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,prefer-vector-width=512"))),
                __m512i, _mm512)
#endif
#endif

}  // namespace

float DraftDistribution::log_probability(int64_t token) const {
  const int64_t entry = entry_of(token);
  if (entry < 0) return -INFINITY;
  return row.data == nullptr ? 0.0f : specdec::log_probability(logit_at(row, entry), distribution);
}

float DraftDistribution::logit(int64_t token) const {
  const int64_t entry = entry_of(token);
  return entry < 0 ? -INFINITY : logit_at(row, entry);
}

int64_t DraftDistribution::entry_of(int64_t token) const {
  if (ids == nullptr) return token;
  const int64_t* entry = std::lower_bound(ids, ids + num_entries, token);
  return entry == ids + num_entries || *entry != token ? -1 : entry - ids;
}

void DraftDistribution::entries(int64_t block, int64_t* begin, int64_t* end) const {
  const int64_t* first = std::lower_bound(ids, ids + num_entries, block * kBlock);
  *begin = first - ids;
  *end = std::lower_bound(first, ids + num_entries, (block + 1) * kBlock) - ids;
}

const BlockKernels& block_kernels() {
#if defined(__x86_64__)
  switch (instruction_set()) {
    case InstructionSet::kAvx512:
      return avx512::kernels;
    case InstructionSet::kAvx2:
      return avx2::kernels;
    default:
      break;
  }
#endif
  return baseline::kernels;
}

float logit_at(Row row, int64_t token) {
  float x;
  load_range(row, token, 1, &x);
  return x;
}

}  // namespace specdec::cpu
