// A linear layer of a step has few rows, and costs what reading its weights costs: every weight is read once, and
// multiplied by all rows while it is in a register. With more rows, parts of the weights stay in a cache meanwhile.
//
// Every number of y is summed in one order, whatever the number of rows, and whatever the weights are stored as: a
// token's result does not depend on how many others it is fed with.
#include "linear.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "../../common/parallel.h"
#include "lanes.h"
#include "packed_linear.h"

namespace specdec::cpu {
namespace {

constexpr int64_t kTileRows = 6;      // at most: their sums with two outputs fit into 16 registers
constexpr int64_t kMostInputs = 640;  // of a part of the weights that stays, with a tile's x, in the nearest cache
constexpr int64_t kGrainProducts = 64 * 1024;  // are worth a thread
constexpr int kInOrder = -1;                   // weights are read ahead in the order of memory,
constexpr int64_t kDistance = 16 * 1024;       // so many bytes

// Some of a layer's inputs, from `first` on. `before` is where the sums of those before are, and `after` where those
// of these go: null for the first ones, or the last ones. `ahead` are weights that are needed next, and
// `to_second_cache` is where they go that are read in order.
struct Inputs {
  int64_t first, count;
  const float* before;
  float* after;
  const char* ahead;
  bool to_second_cache = false;
};

// Adds the products of some inputs of kRows rows of x, from `row` on, with kOutputs rows of weights, from `output` on;
// to y, after the last inputs. Meanwhile kAhead rows of weights are read ahead, or as many weights as are multiplied.
template <int kWidth, int kRows, int kOutputs, int kAhead, class Weight>
SPECDEC_BODY void tile(const LinearParams& params, int64_t row, int64_t output, const Inputs& inputs) {
  using Vector = typename Lanes<kWidth>::Vector;
  constexpr int kSums = kRows * kOutputs, kPadded = (kSums + kWidth - 1) / kWidth * kWidth;
  constexpr int kBytes = kOutputs * kWidth * sizeof(Weight);
  const int64_t stride = params.inputs, whole = inputs.count / kWidth * kWidth;
  const float* x = params.x + row * stride + inputs.first;
  const Weight* weights = reinterpret_cast<const Weight*>(params.weight) + output * stride + inputs.first;
  const Weight* ahead = reinterpret_cast<const Weight*>(inputs.ahead);
  Vector sums[kPadded] = {};
  if (inputs.before) {
#pragma GCC unroll 32
    for (int i = 0; i < kSums; ++i) std::memcpy(&sums[i], inputs.before + i * kWidth, sizeof(Vector));
  }
  for (int64_t k = 0; k < whole; k += kWidth) {
    if constexpr (kAhead == kInOrder) read_ahead(inputs.ahead + k / kWidth * kBytes, kBytes, inputs.to_second_cache);
    Vector w[kOutputs];
#pragma GCC unroll 16
    for (int o = 0; o < kOutputs; ++o) {
      widen<kWidth>(weights + o * stride + k, &w[o]);
      if (o < kAhead) __builtin_prefetch(ahead + o * stride + k, 0, 2);  // to the second cache
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      Vector v;
      std::memcpy(&v, x + r * stride + k, sizeof(Vector));
      keep_in_register(&v);  // else it is loaded for every product, and loads are what there are too many of
#pragma GCC unroll 16
      for (int o = 0; o < kOutputs; ++o) sums[r * kOutputs + o] += v * w[o];
    }
  }
  if (const int64_t rest = inputs.count - whole; rest > 0) {
#pragma GCC unroll 32
    for (int i = 0; i < kSums; ++i) {
      Vector v, w;
      widen_some<kWidth>(x + i / kOutputs * stride + whole, rest, &v);
      widen_some<kWidth>(weights + i % kOutputs * stride + whole, rest, &w);
      sums[i] += v * w;
    }
  }
  if (inputs.after) {
#pragma GCC unroll 32
    for (int i = 0; i < kSums; ++i) std::memcpy(inputs.after + i * kWidth, &sums[i], sizeof(Vector));
    return;
  }
#pragma GCC unroll 16
  for (int i = 0; i < kPadded; i += kWidth) add_lanes<kWidth>(sums + i);
#pragma GCC unroll 32
  for (int i = 0; i < kSums; ++i) {
    const float sum = sums[i / kWidth * kWidth][i % kWidth];
    const int64_t o = output + i % kOutputs;
    params.y[(row + i / kOutputs) * params.outputs + o] = params.bias ? sum + params.bias[o] : sum;
  }
}

template <int kWidth, int kRows, int kOutputs, class Weight>
SPECDEC_BODY void few_rows(const LinearParams& params, int64_t begin, int64_t end) {
  const int64_t bytes = params.inputs * sizeof(Weight);
  Inputs all = {0, params.inputs, nullptr, nullptr, nullptr, reads_ahead_to_second_cache()};
  int64_t output = begin;
  for (; output + kOutputs <= end; output += kOutputs) {
    all.ahead = params.weight + output * bytes + kDistance;
    tile<kWidth, kRows, kOutputs, kInOrder, Weight>(params, 0, output, all);
  }
  for (; output < end; ++output) tile<kWidth, kRows, 1, 0, Weight>(params, 0, output, all);
}

// Some weights stay in the nearest cache while a block of rows is multiplied by them, whose sums are kept in memory
// until all inputs were added. The weights that come next are read ahead, half of them by each of the first two tiles,
// so that memory is never idle. At least kRows rows.
template <int kWidth, int kRows, class Weight>
SPECDEC_BODY void many_rows(const LinearParams& params, int64_t begin, int64_t end) {
  constexpr int64_t kOutputs = kWidth == 16 ? 4 : 2, kHalf = kOutputs / 2;
  constexpr int64_t kChunk = 2 * kOutputs, kBlock = 8 * kRows, kSums = kRows * kOutputs * kWidth;
  const int64_t parts = (params.inputs + kMostInputs - 1) / kMostInputs;
  const int64_t step = (params.inputs / std::max<int64_t>(parts, 1) / kWidth + 1) * kWidth;
  std::vector<float> sums(parts > 1 ? kBlock / kRows * (kChunk / kOutputs) * kSums : 0);
  for (int64_t first = 0; first < params.rows; first += kBlock) {
    const int64_t last = std::min(first + kBlock, params.rows);
    for (int64_t output = begin; output < end; output += kChunk) {
      const int64_t last_output = std::min(output + kChunk, end);
      int64_t k = 0;
      do {
        Inputs inputs = {k, std::min(params.inputs - k, step), nullptr, nullptr, nullptr};
        float* own = sums.data();
        k += inputs.count;
        for (int64_t row = first; row < last; row += kRows) {
          // The last tile of all begins before its place.
          const int64_t at = std::min(row, params.rows - kRows);
          for (int64_t o = output; o < last_output;) {
            inputs.before = inputs.first > 0 ? own : nullptr;
            inputs.after = k < params.inputs ? own : nullptr;
            if (o + kOutputs > last_output) {
              tile<kWidth, kRows, 1, 0, Weight>(params, at, o++, inputs);
              own += kRows * kWidth;
              continue;
            }
            const int64_t next = k < params.inputs ? o * params.inputs + k : (o + kChunk) * params.inputs;
            const int64_t half = row == first ? 0 : kHalf * params.inputs;
            inputs.ahead = params.weight + (next + half) * static_cast<int64_t>(sizeof(Weight));
            if (row < first + 2 * kRows) {
              tile<kWidth, kRows, kOutputs, kHalf, Weight>(params, at, o, inputs);
            } else {
              tile<kWidth, kRows, kOutputs, 0, Weight>(params, at, o, inputs);
            }
            o += kOutputs, own += kSums;
          }
        }
      } while (k < params.inputs);
    }
  }
}

template <int kWidth, class Weight>
SPECDEC_BODY void range(const LinearParams& params, int64_t begin, int64_t end) {
  constexpr int kOutputs = kWidth == 16 ? 4 : 2;  // what 32 or 16 registers hold
  switch (params.rows) {
    case 0:
      return;
    case 1:
      return few_rows<kWidth, 1, 2, Weight>(params, begin, end);
    case 2:
      return few_rows<kWidth, 2, 4, Weight>(params, begin, end);
    case 3:
      return few_rows<kWidth, 3, kWidth == 16 ? 4 : 3, Weight>(params, begin, end);
    case 4:
      return few_rows<kWidth, 4, kOutputs, Weight>(params, begin, end);
    case 5:
      return few_rows<kWidth, 5, kOutputs, Weight>(params, begin, end);
    case 6:
      return few_rows<kWidth, 6, kOutputs, Weight>(params, begin, end);
  }
  if constexpr (kWidth == 16) {
    if (params.rows == 7) return few_rows<kWidth, 7, 3, Weight>(params, begin, end);
    if (params.rows == 8) return few_rows<kWidth, 8, 3, Weight>(params, begin, end);
    if (params.rows == 9) return few_rows<kWidth, 9, 3, Weight>(params, begin, end);
  }
  const int64_t tiles = (params.rows + kTileRows - 1) / kTileRows;
  switch ((params.rows + tiles - 1) / tiles) {
    case 4:
      return many_rows<kWidth, 4, Weight>(params, begin, end);
    case 5:
      return many_rows<kWidth, 5, Weight>(params, begin, end);
    default:
      return many_rows<kWidth, kTileRows, Weight>(params, begin, end);
  }
}

SPECDEC_RANGE_OF(of_float32, float, LinearParams)
SPECDEC_RANGE_OF(of_float16, Float16, LinearParams)
SPECDEC_RANGE_OF(of_bfloat16, BFloat16, LinearParams)

auto by_stored_in_use(Stored stored) {
  switch (stored) {
    case Stored::kFloat16:
      return of_float16_in_use();
    case Stored::kBFloat16:
      return of_bfloat16_in_use();
    default:
      return of_float32_in_use();
  }
}

}  // namespace

BlockSize block_size(Stored stored) {
  switch (stored) {
    case Stored::kFloat32:
      return {1, sizeof(float)};
    case Stored::kFloat16:
    case Stored::kBFloat16:
      return {1, sizeof(uint16_t)};
    default:
      return packed_block_size(stored);
  }
}

void linear(const LinearParams* layers, int64_t count) {
  if (count == 0) return;
  int64_t outputs = 0;
  bool any_packed = false;
  for (const LinearParams* layer = layers; layer != layers + count; ++layer) {
    outputs += layer->outputs;
    any_packed = any_packed || is_packed(layer->stored);
  }
  const RoundedRows rounded = any_packed ? round_rows(layers->x, layers->rows, layers->inputs) : RoundedRows();
  const int64_t products = std::max<int64_t>(layers->rows * layers->inputs, 1);
  parallel_for(outputs, (kGrainProducts + products - 1) / products, [&](int64_t begin, int64_t end) {
    for (const LinearParams* layer = layers; layer != layers + count; ++layer) {
      const int64_t first = std::max<int64_t>(begin, 0), last = std::min(end, layer->outputs);
      if (first < last) {
        if (is_packed(layer->stored)) {
          packed_linear(*layer, rounded, first, last);
        } else {
          by_stored_in_use(layer->stored)(*layer, first, last);
        }
      }
      begin -= layer->outputs, end -= layer->outputs;
    }
  });
}

}  // namespace specdec::cpu
