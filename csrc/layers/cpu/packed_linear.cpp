#include "packed_linear.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "../../common/parallel.h"
#include "packed.h"

namespace specdec::cpu {
namespace {

constexpr int64_t kGrainInputs = 16 * 1024;
constexpr int64_t kAhead = 8192;  // bytes of weights, which are read before they are used

struct RoundParams {
  const float* x;
  RoundedRows* out;
};

constexpr uint32_t kExponent = 1u << 23;  // as the exponent of a float is stored
constexpr uint32_t kLeastScaled = 27, kNotFinite = 255;

// Rounds kRounded inputs to integers of 16 bits times a power of two, to even where two are as near. Smaller inputs
// than 2^-100 are 0, as there are no such scales. Not all finite: the scale is NaN, and so is what is computed with it.
SPECDEC_BODY void round_inputs(const float* x, int16_t* integers, float* scale, float* sum) {
  uint32_t largest = 0;
  for (int i = 0; i < kRounded; ++i) largest = std::max(largest, as_bits(x[i]) & 0x7fffffffu);
  const uint32_t exponent = largest / kExponent;
  const bool is_zero = exponent < kLeastScaled, is_finite = exponent < kNotFinite;
  const float step = as_float((exponent - 14) * kExponent);  // of which the largest is less than 2^15
  const float inverse = is_zero || !is_finite ? 0 : as_float((254 + 14 - exponent) * kExponent);
  constexpr float kWhole = 0x1.8p23f;  // among such floats are no fractions
  int32_t total = 0;
  for (int i = 0; i < kRounded; ++i) {
    const float whole = std::min(x[i] * inverse, 32767.0f) + kWhole;
    integers[i] = static_cast<int16_t>(as_bits(whole) - as_bits(kWhole));
    total += integers[i];
  }
  *scale = is_zero ? 0 : is_finite ? step : NAN;
  *sum = *scale * static_cast<float>(total);
}

template <int kWidth>
SPECDEC_BODY void round_range(const RoundParams& params, int64_t begin, int64_t end) {
  const RoundedRows& out = *params.out;
  for (int64_t i = begin; i < end; ++i)
    round_inputs(params.x + i * kRounded, &out.integers[i * kRounded], &out.scales[i], &out.sums[i]);
}
SPECDEC_BY_INSTRUCTION_SET(round_range, RoundParams)

struct PackedParams {
  const LinearParams& layer;
  const RoundedRows& x;
};

// Adds, in each lane, the products of two weights and two inputs; with kVnni in one instruction, whose sums are the
// same.
template <int kWidth, bool kVnni, class Pairs, class Ints>
SPECDEC_BODY void add_products(const Pairs& weights, const int16_t* inputs, Ints* sum) {
#if SPECDEC_NAMED_INSTRUCTIONS
  if constexpr (kVnni) {
    struct Memory {
      int16_t inputs[2];
    };
    Ints added = *sum;  // or every sum is written to memory
    asm("vpdpwssd %2%{1to16%}, %1, %0" : "+v"(added) : "v"(weights), "m"(*reinterpret_cast<const Memory*>(inputs)));
    *sum = added;
    return;
  }
#endif
  int32_t pair;
  std::memcpy(&pair, inputs, sizeof(pair));
  const Ints both = pair - Ints{};
#if SPECDEC_NAMED_INSTRUCTIONS
  if constexpr (kWidth > 4) {
    Ints products;
    asm("vpmaddwd %2, %1, %0" : "=v"(products) : "v"(both), "vm"(weights));
    *sum += products;
    return;
  }
#endif
  Ints x;  // the upper and the lower integers of lanes
  std::memcpy(&x, &weights, sizeof(x));
  *sum += (x >> 16) * (both >> 16) + (x << 16 >> 16) * (both << 16 >> 16);
}

// Adds to results[kRows, kTile] the products of `count` inputs, from `first` on, of so many rows of x, from `row` on.
template <int kWidth, bool kVnni, int kRows, class Block>
SPECDEC_BODY void multiply(const Expanded<kWidth>& weights, const RoundedRows& x, int64_t row, int64_t first,
                           int64_t count, float* results) {
  constexpr int kVectors = OfRows<kWidth>::kVectors, kPart = Block::kPart;
  using Floats = typename OfRows<kWidth>::Floats;
  using Ints = typename OfRows<kWidth>::Ints;
  const int64_t inputs = x.inputs;
  const int16_t* integers = &x.integers[row * inputs + first];
  const float* scales = &x.scales[(row * inputs + first) / kRounded];
  const float* totals = &x.sums[(row * inputs + first) / kRounded];
  Floats own[kRows][kVectors];
  std::memcpy(own, results, sizeof(own));
  for (int64_t k = 0; k < count; k += kPart) {
    Ints sums[kRows][kVectors] = {};
#pragma GCC unroll 8
    for (int i = 0; i < kPart / 2; ++i) {
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
        for (int v = 0; v < kVectors; ++v)
          add_products<kWidth, kVnni>(weights.integers[k / 2 + i][v], integers + r * inputs + k + 2 * i, &sums[r][v]);
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const int64_t rounded = (r * inputs + k) / kRounded;
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        own[r][v] += __builtin_convertvector(sums[r][v], Floats) * (weights.scales[k / kPart][v] * scales[rounded]);
        if constexpr (Block::kLeast) own[r][v] += weights.leasts[k / kPart][v] * totals[rounded];
      }
    }
  }
  std::memcpy(results, own, sizeof(own));
}

template <int kWidth>
constexpr int kMostRows = kWidth == 16 ? 9 : 5;  // whose sums, integers and floats, fit into 32 or 16 registers

// The same, of a number of rows that is known only now.
template <int kWidth, bool kVnni, class Block, int kRows = kMostRows<kWidth>>
SPECDEC_BODY void multiply_rows(const Expanded<kWidth>& weights, const RoundedRows& x, int64_t row, int64_t rows,
                                int64_t first, int64_t count, float* results) {
  if constexpr (kRows > 1) {
    if (rows < kRows) {
      return multiply_rows<kWidth, kVnni, Block, kRows - 1>(weights, x, row, rows, first, count, results);
    }
  }
  multiply<kWidth, kVnni, kRows, Block>(weights, x, row, first, count, results);
}

// Computes the first `outputs` rows of a tile of weights, for all rows of x.
template <int kWidth, bool kVnni, class Block>
SPECDEC_BODY void tile(const PackedParams& params, const Block* blocks, int64_t output, int64_t outputs,
                       float* results) {
  const LinearParams& layer = params.layer;
  const RoundedRows& x = params.x;
  const bool to_second_cache = reads_ahead_to_second_cache();
  std::fill_n(results, x.rows * kTile, 0.0f);
  // With few rows memory is what takes the time, so what is read ahead is asked for evenly: block by block.
  const int64_t most = x.rows <= kMostRows<kWidth> ? Block::kInputs : Expanded<kWidth>::kMost;
  for (int64_t first = 0; first < x.inputs; first += most) {
    const int64_t count = std::min(most, x.inputs - first);
    Expanded<kWidth> weights;
    for (int64_t k = 0; k < count; k += Block::kInputs, ++blocks) {
      read_ahead(reinterpret_cast<const char*>(blocks) + kAhead, sizeof(Block), to_second_cache);
      Block::expand(*blocks, k, &weights);
    }
    const int64_t passes = (x.rows + kMostRows<kWidth> - 1) / kMostRows<kWidth>;
    for (int64_t pass = 0, row = 0; pass < passes; ++pass) {
      const int64_t rows = (x.rows - row) / (passes - pass);
      multiply_rows<kWidth, kVnni, Block>(weights, x, row, rows, first, count, results + row * kTile);
      row += rows;
    }
  }
  for (int64_t r = 0; r < x.rows; ++r) {
    float* y = layer.y + r * layer.outputs + output;
    for (int64_t o = 0; o < outputs; ++o) y[o] = results[r * kTile + o] + (layer.bias ? layer.bias[output + o] : 0);
  }
}

// The last rows of a layer, interleaved with rows of zeros up to a whole tile.
template <class Block>
std::vector<Block> padded(const char* stored, int64_t rows, int64_t count) {
  std::vector<Block> tile(count);
  for (size_t i = 0; i < count * sizeof(Block) / sizeof(Unit); ++i)
    std::memcpy(reinterpret_cast<Unit*>(tile.data()) + i, stored + i * rows * 2, rows * 2);
  return tile;
}

template <int kWidth, bool kVnni, class Block>
SPECDEC_BODY void tiles(const PackedParams& params, int64_t begin, int64_t end) {
  const int64_t count = params.x.inputs / Block::kInputs, outputs = params.layer.outputs;
  std::vector<float> results(params.x.rows * kTile);
  for (int64_t output = (begin + kTile - 1) / kTile * kTile; output < end; output += kTile) {
    const char* stored = params.layer.weight + output * count * static_cast<int64_t>(sizeof(Block)) / kTile;
    const int64_t there = std::min<int64_t>(kTile, outputs - output);
    const auto rest = there < kTile ? padded<Block>(stored, there, count) : std::vector<Block>();
    const auto* blocks = there < kTile ? rest.data() : reinterpret_cast<const Block*>(stored);
    tile<kWidth, kVnni>(params, blocks, output, there, results.data());
  }
}

template <int kWidth, class Block>
SPECDEC_BODY void range(const PackedParams& params, int64_t begin, int64_t end) {
  if constexpr (kWidth == 16 && SPECDEC_NAMED_INSTRUCTIONS) {
    if (has_vnni()) return tiles<kWidth, true, Block>(params, begin, end);
  }
  tiles<kWidth, false, Block>(params, begin, end);
}

SPECDEC_RANGE_OF(of_q4_0, Q4_0, PackedParams)
SPECDEC_RANGE_OF(of_q4_1, Q4_1, PackedParams)
SPECDEC_RANGE_OF(of_q8_0, Q8_0, PackedParams)
SPECDEC_RANGE_OF(of_q4_k, Q4_K, PackedParams)
SPECDEC_RANGE_OF(of_q6_k, Q6_K, PackedParams)

template <class Block>
constexpr BlockSize kSizeOf = {Block::kInputs, sizeof(Block) / kTile};

auto by_stored_in_use(Stored stored) {
  switch (stored) {
    case Stored::kQ4_0:
      return of_q4_0_in_use();
    case Stored::kQ4_1:
      return of_q4_1_in_use();
    case Stored::kQ4_K:
      return of_q4_k_in_use();
    case Stored::kQ6_K:
      return of_q6_k_in_use();
    default:
      return of_q8_0_in_use();
  }
}

}  // namespace

BlockSize packed_block_size(Stored stored) {
  switch (stored) {
    case Stored::kQ4_0:
      return kSizeOf<Q4_0>;
    case Stored::kQ4_1:
      return kSizeOf<Q4_1>;
    case Stored::kQ8_0:
      return kSizeOf<Q8_0>;
    case Stored::kQ4_K:
      return kSizeOf<Q4_K>;
    case Stored::kQ6_K:
      return kSizeOf<Q6_K>;
    default:
      return {0, 0};
  }
}

RoundedRows round_rows(const float* x, int64_t rows, int64_t inputs) {
  const int64_t scales = rows * inputs / kRounded;
  RoundedRows out = {rows, inputs, std::unique_ptr<int16_t[]>(new int16_t[rows * inputs]),
                     std::unique_ptr<float[]>(new float[scales]), std::unique_ptr<float[]>(new float[scales])};
  const RoundParams params = {x, &out};
  const auto run = round_range_in_use();
  parallel_for(scales, kGrainInputs / kRounded, [&](int64_t begin, int64_t end) { run(params, begin, end); });
  return out;
}

void packed_linear(const LinearParams& layer, const RoundedRows& x, int64_t begin, int64_t end) {
  by_stored_in_use(layer.stored)({layer, x}, begin, end);
}

}  // namespace specdec::cpu
