#include "block.h"

#include "../core/accept.h"

namespace specdec::cpu {
namespace {

// Bodies are written once, as plain loops that compilers vectorise, and are inlined into one wrapper for each
// instruction set at the end of this file. Sums are kept in kLanes partial sums, so their order is fixed by the source.
#define SPECDEC_BODY static inline __attribute__((always_inline))

constexpr int kLanes = 32;

SPECDEC_BODY float to_float(float value) { return value; }

struct BFloat16 {
  uint16_t bits;
};
SPECDEC_BODY float to_float(BFloat16 value) { return as_float(uint32_t{value.bits} << 16); }

struct Float16 {
  uint16_t bits;
};
SPECDEC_BODY float to_float(Float16 value) {
  // The exponent is re-biased by a multiplication, which also normalises subnormal numbers.
  const uint32_t magnitude = value.bits & 0x7fffu;
  const uint32_t finite = as_bits(as_float(magnitude << 13) * 0x1p112f);
  const uint32_t special = (magnitude << 13) | 0x7f800000u;
  return as_float((magnitude >= 0x7c00u ? special : finite) | (uint32_t{value.bits} & 0x8000u) << 16);
}

// Copies a block as float32 to x[kBlock], padded with -inf.
template <class T>
SPECDEC_BODY void load_as(const T* source, int64_t n, float* x) {
  if (n == kBlock) {
    for (int i = 0; i < kBlock; ++i) x[i] = to_float(source[i]);
    return;
  }
  for (int64_t i = 0; i < n; ++i) x[i] = to_float(source[i]);
  for (int64_t i = n; i < kBlock; ++i) x[i] = -INFINITY;
}

SPECDEC_BODY void load(Row row, int64_t block, float* x) {
  const int64_t begin = block * kBlock;
  const int64_t n = row.size - begin < kBlock ? row.size - begin : kBlock;
  switch (row.dtype) {
    case Dtype::kFloat32:
      return load_as(static_cast<const float*>(row.data) + begin, n, x);
    case Dtype::kBFloat16:
      return load_as(static_cast<const BFloat16*>(row.data) + begin, n, x);
    case Dtype::kFloat16:
      return load_as(static_cast<const Float16*>(row.data) + begin, n, x);
  }
}

// The block as float32: in place if it is that already, else a copy in x[kBlock], padded with -inf.
SPECDEC_BODY const float* view(Row row, int64_t block, float* x) {
  if (row.dtype == Dtype::kFloat32 && row.size - block * kBlock >= kBlock) {
    return static_cast<const float*>(row.data) + block * kBlock;
  }
  load(row, block, x);
  return x;
}

// The largest of x[kBlock]; a NaN is passed over.
SPECDEC_BODY float max_of_numbers(const float* x) {
  float best[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) best[lane] = -INFINITY;
  for (int i = 0; i < kBlock; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) best[lane] = x[i + lane] > best[lane] ? x[i + lane] : best[lane];
  }
  float result = -INFINITY;
  for (int lane = 0; lane < kLanes; ++lane) result = best[lane] > result ? best[lane] : result;
  return result;
}

// The largest of x[kBlock]; NaN if any is.
SPECDEC_BODY float max_of(const float* x) {
  uint32_t any_nan = 0;
  for (int i = 0; i < kBlock; ++i) any_nan |= x[i] != x[i] ? 1u : 0u;
  return any_nan ? NAN : max_of_numbers(x);
}

SPECDEC_BODY float sum_of(const float* x) {
  float sum[kLanes] = {};
  for (int i = 0; i < kBlock; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) sum[lane] += x[i + lane];
  }
  float total = 0.0f;
  for (int lane = 0; lane < kLanes; ++lane) total += sum[lane];
  return total;
}

// exp((-inf) - (-inf)) would be NaN: a block without any finite logit is weighed relative to 0 instead.
SPECDEC_BODY float reference_of(float max) { return max == -INFINITY ? 0.0f : max; }

SPECDEC_BODY float max_body(Row row, int64_t block) {
  alignas(64) float buffer[kBlock];
  return max_of(view(row, block, buffer));
}

SPECDEC_BODY BlockStats stats_body(Row row, int64_t block, float inverse_temperature) {
  alignas(64) float buffer[kBlock];
  const float* x = view(row, block, buffer);
  const float max = max_of_numbers(x);
  const float reference = reference_of(max);
  float sum[kLanes] = {};
  for (int i = 0; i < kBlock; i += kLanes) {
    for (int lane = 0; lane < kLanes; ++lane) sum[lane] += weight(x[i + lane], reference, inverse_temperature);
  }
  float total = 0.0f;
  for (int lane = 0; lane < kLanes; ++lane) total += sum[lane];
  return {total == total ? max : max_of(x), total};
}

// w[i] becomes the weight relative to `max`; token `without` (or -1) has none.
SPECDEC_BODY void weights_without(Row row, int64_t block, float max, float inverse_temperature, int64_t without,
                                  float* w) {
  load(row, block, w);
  const float reference = reference_of(max);
  for (int i = 0; i < kBlock; ++i) w[i] = weight(w[i], reference, inverse_temperature);
  if (without >= block * kBlock && without < (block + 1) * kBlock) w[without - block * kBlock] = 0.0f;
}

SPECDEC_BODY float sum_without_body(Row row, int64_t block, float max, float inverse_temperature, int64_t without) {
  alignas(64) float w[kBlock];
  weights_without(row, block, max, inverse_temperature, without, w);
  return sum_of(w);
}

// p[i] becomes max(0, p - q).
SPECDEC_BODY void residual_weights(Row p_row, Distribution p_law, Row q_row, Distribution q_law, int64_t block,
                                   float* p) {
  alignas(64) float q[kBlock];
  load(p_row, block, p);
  load(q_row, block, q);
  for (int i = 0; i < kBlock; ++i) {
    p[i] = residual(probability(p[i], p_law.inverse_temperature, p_law.lse),
                    probability(q[i], q_law.inverse_temperature, q_law.lse));
  }
}

SPECDEC_BODY float residual_sum_body(Row p_row, Distribution p_law, Row q_row, Distribution q_law, int64_t block) {
  alignas(64) float w[kBlock];
  residual_weights(p_row, p_law, q_row, q_law, block, w);
  return sum_of(w);
}

// Exponential race: the index with the smallest E / w, as the largest w / E. All four words of a Philox call are used:
// word i of call c belongs to index 4 c + i. `first` is the first index, a multiple of 4.
SPECDEC_BODY int64_t race(const float* weights, int64_t n, int64_t first, Noise noise, Stream stream) {
  float best = 0.0f;
  int64_t winner = -1;
  alignas(64) float score[kBlock];
  for (int64_t begin = 0; begin < n; begin += kBlock) {
    const int64_t count = n - begin < kBlock ? n - begin : kBlock;
    const int64_t calls = (count + 3) / 4;
    alignas(64) uint32_t bits[4][kBlock / 4];
    const uint32_t base = static_cast<uint32_t>((first + begin) / 4);
    for (int64_t call = 0; call < calls; ++call) {
      const Words words = philox(noise.seed, base + static_cast<uint32_t>(call), noise.position, noise.offset, stream);
      for (int i = 0; i < 4; ++i) bits[i][call] = words.word[i];
    }
    for (int i = 0; i < 4; ++i) {
      for (int64_t call = 0; call < calls; ++call) score[4 * call + i] = exponential(uniform(bits[i][call]));
    }
    for (int64_t i = 0; i < count; ++i) score[i] = weights[begin + i] / score[i];
    for (int64_t i = 0; i < count; ++i) {
      if (score[i] > best) best = score[i], winner = begin + i;
    }
  }
  return winner;
}

SPECDEC_BODY int64_t draw_index_body(const float* weights, int64_t n, Noise noise, Stream stream) {
  return race(weights, n, 0, noise, stream);
}

SPECDEC_BODY int64_t token_of(int64_t block, int64_t winner) { return winner < 0 ? -1 : block * kBlock + winner; }

SPECDEC_BODY int64_t draw_body(Row row, int64_t block, float max, float inverse_temperature, int64_t without,
                               Noise noise, Stream stream) {
  alignas(64) float w[kBlock];
  weights_without(row, block, max, inverse_temperature, without, w);
  return token_of(block, race(w, kBlock, block * kBlock, noise, stream));
}

SPECDEC_BODY int64_t draw_residual_body(Row p_row, Distribution p_law, Row q_row, Distribution q_law, int64_t block,
                                        Noise noise) {
  alignas(64) float w[kBlock];
  residual_weights(p_row, p_law, q_row, q_law, block, w);
  return token_of(block, race(w, kBlock, block * kBlock, noise, kRecoverToken));
}

SPECDEC_BODY int64_t find_body(Row row, int64_t block, float value) {
  alignas(64) float x[kBlock];
  load(row, block, x);
  for (int i = 0; i < kBlock; ++i) {
    if (x[i] == value) return block * kBlock + i;
  }
  return -1;
}

// One set of functions, compiled with `attributes`.
#define SPECDEC_KERNELS(name, label, attributes)                                                                 \
  namespace name {                                                                                               \
  attributes float max(Row row, int64_t block) { return max_body(row, block); }                                  \
  attributes BlockStats stats(Row row, int64_t block, float t) { return stats_body(row, block, t); }             \
  attributes float sum_without(Row row, int64_t block, float max, float t, int64_t without) {                    \
    return sum_without_body(row, block, max, t, without);                                                        \
  }                                                                                                              \
  attributes float residual_sum(Row p, Distribution pl, Row q, Distribution ql, int64_t block) {                 \
    return residual_sum_body(p, pl, q, ql, block);                                                               \
  }                                                                                                              \
  attributes int64_t draw(Row row, int64_t block, float max, float t, int64_t without, Noise noise, Stream s) {  \
    return draw_body(row, block, max, t, without, noise, s);                                                     \
  }                                                                                                              \
  attributes int64_t draw_residual(Row p, Distribution pl, Row q, Distribution ql, int64_t block, Noise noise) { \
    return draw_residual_body(p, pl, q, ql, block, noise);                                                       \
  }                                                                                                              \
  attributes int64_t draw_index(const float* w, int64_t n, Noise noise, Stream s) {                              \
    return draw_index_body(w, n, noise, s);                                                                      \
  }                                                                                                              \
  attributes int64_t find(Row row, int64_t block, float value) { return find_body(row, block, value); }          \
  constexpr BlockKernels kernels = {label, max,           stats,      sum_without, residual_sum,                 \
                                    draw,  draw_residual, draw_index, find};                                     \
  }

SPECDEC_KERNELS(baseline, "baseline", )
#if defined(__x86_64__)
SPECDEC_KERNELS(avx2, "avx2", __attribute__((target("avx2,fma"))))
#if defined(__clang__)
SPECDEC_KERNELS(avx512, "avx512", __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma"))))
#else
SPECDEC_KERNELS(avx512, "avx512",
                __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,prefer-vector-width=512"))))
#endif
#endif

const BlockKernels& choose() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
      __builtin_cpu_supports("avx512vl")) {
    return avx512::kernels;
  }
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return avx2::kernels;
#endif
  return baseline::kernels;
}

}  // namespace

const BlockKernels& block_kernels() {
  static const BlockKernels& chosen = choose();
  return chosen;
}

float logit_at(Row row, int64_t token) {
  switch (row.dtype) {
    case Dtype::kFloat32:
      return static_cast<const float*>(row.data)[token];
    case Dtype::kBFloat16:
      return to_float(static_cast<const BFloat16*>(row.data)[token]);
    case Dtype::kFloat16:
      return to_float(static_cast<const Float16*>(row.data)[token]);
  }
  return NAN;
}

}  // namespace specdec::cpu
