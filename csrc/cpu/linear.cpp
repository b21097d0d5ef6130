// With few rows, a linear layer costs what reading its weights costs: every weight is read once, and multiplied by all
// rows while it is in a register. Libraries of matrix products are made for many rows, and take several times as long
// for two to eight of them as for one.
//
// Every number of y is summed in one order, whatever the number of rows: a token's result does not depend on how many
// others it is fed with.
#include "linear.h"

#include <algorithm>
#include <cstring>
#include <string_view>
#include <utility>

#include "block.h"
#include "load.h"
#include "parallel.h"

namespace specdec::cpu {
namespace {

constexpr int64_t kMostRows = 6;                // of a tile: their sums fit into 16 registers
constexpr int64_t kGrainProducts = 64 * 1024;   // are worth a thread

template <int kWidth>
struct Lanes {
  typedef float Vector __attribute__((vector_size(kWidth * sizeof(float))));
};

// Of two vectors whose lanes are groups of kGroup, the lower (kUpper = 0) or the upper half of every group.
template <int kWidth, int kGroup, int kUpper, class Vector, size_t... kLane>
SPECDEC_BODY void halves(const Vector& a, const Vector& b, Vector* out, std::index_sequence<kLane...>) {
  constexpr int kHalf = kGroup / 2;
  *out = __builtin_shufflevector(a, b, (kLane / kHalf * kGroup + kUpper * kHalf + kLane % kHalf)...);
}

// Adds up the lanes of each of kWidth vectors, halves first. The sum of vector i becomes lane i of the first.
template <int kWidth, int kGroup = kWidth, class Vector>
SPECDEC_BODY void add_lanes(Vector* vectors) {
  if constexpr (kGroup > 1) {
    for (int i = 0; i < kGroup / 2; ++i) {
      Vector lower, upper;
      const auto lanes = std::make_index_sequence<kWidth>();
      halves<kWidth, kGroup, 0>(vectors[2 * i], vectors[2 * i + 1], &lower, lanes);
      halves<kWidth, kGroup, 1>(vectors[2 * i], vectors[2 * i + 1], &upper, lanes);
      vectors[i] = lower + upper;
    }
    add_lanes<kWidth, kGroup / 2>(vectors);
  }
}

// y of kRows rows of x, at kOutputs outputs.
template <int kWidth, int kRows, int kOutputs>
SPECDEC_BODY void tile(const LinearParams& params, int64_t row, int64_t output) {
  using Vector = typename Lanes<kWidth>::Vector;
  constexpr int kSums = kRows * kOutputs, kPadded = (kSums + kWidth - 1) / kWidth * kWidth;
  const int64_t inputs = params.inputs, whole = inputs / kWidth * kWidth;
  const float* x = params.x + row * inputs;
  const float* weight = params.weight + output * inputs;
  Vector sums[kPadded] = {};
  for (int64_t k = 0; k < whole; k += kWidth) {
    Vector w[kOutputs];
#pragma GCC unroll 8
    for (int o = 0; o < kOutputs; ++o) {
      std::memcpy(&w[o], weight + o * inputs + k, sizeof(Vector));
      __builtin_prefetch(weight + (kOutputs + o) * inputs + k);  // of the next tile
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      Vector v;
      std::memcpy(&v, x + r * inputs + k, sizeof(Vector));
#pragma GCC unroll 8
      for (int o = 0; o < kOutputs; ++o) sums[r * kOutputs + o] += v * w[o];
    }
  }
  if (const size_t rest = (inputs - whole) * sizeof(float); rest > 0) {
    for (int i = 0; i < kSums; ++i) {
      Vector v = {}, w = {};
      std::memcpy(&v, x + i / kOutputs * inputs + whole, rest);
      std::memcpy(&w, weight + i % kOutputs * inputs + whole, rest);
      sums[i] += v * w;
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < kPadded; i += kWidth) add_lanes<kWidth>(sums + i);
#pragma GCC unroll 16
  for (int i = 0; i < kSums; ++i) {
    const float sum = sums[i / kWidth * kWidth][i % kWidth];
    const int64_t o = output + i % kOutputs;
    params.y[(row + i / kOutputs) * params.outputs + o] = params.bias ? sum + params.bias[o] : sum;
  }
}

template <int kWidth, int kRows, int kOutputs>
SPECDEC_BODY void outputs_of(const LinearParams& params, int64_t row, int64_t begin, int64_t end) {
  int64_t output = begin;
  for (; output + kOutputs <= end; output += kOutputs) tile<kWidth, kRows, kOutputs>(params, row, output);
  for (; output < end; ++output) tile<kWidth, kRows, 1>(params, row, output);
}

// Some outputs at a time, whose weights stay in the cache while all rows are multiplied by them.
template <int kWidth>
SPECDEC_BODY void range(const LinearParams& params, int64_t begin, int64_t end) {
  const int64_t parts = (params.rows + kMostRows - 1) / kMostRows;
  const int64_t step = parts == 1 ? end - begin : 12;
  for (int64_t first = begin; first < end; first += step) {
    const int64_t last = std::min(first + step, end);
    for (int64_t part = 0; part < parts; ++part) {
      const int64_t row = part * params.rows / parts, rows = (part + 1) * params.rows / parts - row;
      switch (rows) {
        case 1: outputs_of<kWidth, 1, 4>(params, row, first, last); break;
        case 2: outputs_of<kWidth, 2, 4>(params, row, first, last); break;
        case 3: outputs_of<kWidth, 3, 3>(params, row, first, last); break;
        case 4: outputs_of<kWidth, 4, 2>(params, row, first, last); break;
        case 5: outputs_of<kWidth, 5, 2>(params, row, first, last); break;
        case 6: outputs_of<kWidth, 6, 2>(params, row, first, last); break;
      }
    }
  }
}

using Range = void (*)(const LinearParams& params, int64_t begin, int64_t end);

void baseline(const LinearParams& params, int64_t begin, int64_t end) { range<4>(params, begin, end); }
#if defined(__x86_64__)
__attribute__((target("avx2,fma"))) void avx2(const LinearParams& params, int64_t begin, int64_t end) {
  range<8>(params, begin, end);
}
__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma"))) void avx512(const LinearParams& params,
                                                                                  int64_t begin, int64_t end) {
  range<16>(params, begin, end);
}
#endif

Range range_in_use() {
#if defined(__x86_64__)
  const std::string_view name = block_kernels().instruction_set;
  if (name == "avx512") return avx512;
  if (name == "avx2") return avx2;
#endif
  return baseline;
}

}  // namespace

void linear(const LinearParams& params) {
  const int64_t products = std::max<int64_t>(params.rows * params.inputs, 1);
  const Range range = range_in_use();
  parallel_for(params.outputs, (kGrainProducts + products - 1) / products,
               [&](int64_t begin, int64_t end) { range(params, begin, end); });
}

}  // namespace specdec::cpu
