// Some rows of a layer's weights as floats: what an embedding is.
#include "stored_rows.h"

#include <algorithm>
#include <cstring>

#include "../../common/parallel.h"
#include "packed.h"

namespace specdec::cpu {
namespace {

constexpr int64_t kGrainInputs = 16 * 1024;

// Copies the blocks of one row to lane 0 of a tile's, whose other lanes are zeros.
template <int kWidth, class Block>
SPECDEC_BODY void range(const StoredRowsParams& params, int64_t begin, int64_t end) {
  constexpr int64_t kUnits = sizeof(Block) / sizeof(Unit);
  const int64_t count = params.inputs / Block::kInputs;
  Block block = {};
  Expanded<kWidth> numbers;
  for (int64_t i = begin; i < end; ++i) {
    const int64_t first = params.rows[i] / kTile * kTile, there = std::min<int64_t>(kTile, params.size - first);
    const char* own = params.weight + 2 * (first * count * kUnits + params.rows[i] - first);
    float* y = params.y + i * params.inputs;
    for (int64_t b = 0; b < count; ++b, y += Block::kInputs) {
      for (int64_t unit = 0; unit < kUnits; ++unit, own += 2 * there)
        std::memcpy(reinterpret_cast<Unit*>(&block) + unit, own, 2);
      Block::expand(block, 0, &numbers);
      for (int64_t k = 0; k < Block::kInputs; ++k) {
        float number = numbers.scales[k / Block::kPart][0][0] * numbers.integers[k / 2][0][k % 2];
        keep_in_register(&number);  // rounded, and not fused with the addition
        y[k] = Block::kLeast ? number + numbers.leasts[k / Block::kPart][0][0] : number;
      }
    }
  }
}

SPECDEC_RANGE_OF(of_q4_0, Q4_0, StoredRowsParams)
SPECDEC_RANGE_OF(of_q4_1, Q4_1, StoredRowsParams)
SPECDEC_RANGE_OF(of_q8_0, Q8_0, StoredRowsParams)
SPECDEC_RANGE_OF(of_q4_k, Q4_K, StoredRowsParams)
SPECDEC_RANGE_OF(of_q6_k, Q6_K, StoredRowsParams)

template <class Weight>
void of_numbers(const StoredRowsParams& params, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    const auto* row = reinterpret_cast<const Weight*>(params.weight) + params.rows[i] * params.inputs;
    for (int64_t k = 0; k < params.inputs; ++k) params.y[i * params.inputs + k] = to_float(row[k]);
  }
}

auto by_stored(Stored stored) {
  switch (stored) {
    case Stored::kQ4_0:
      return of_q4_0_in_use();
    case Stored::kQ4_1:
      return of_q4_1_in_use();
    case Stored::kQ8_0:
      return of_q8_0_in_use();
    case Stored::kQ4_K:
      return of_q4_k_in_use();
    case Stored::kQ6_K:
      return of_q6_k_in_use();
    case Stored::kFloat16:
      return of_numbers<Float16>;
    case Stored::kBFloat16:
      return of_numbers<BFloat16>;
    default:
      return of_numbers<float>;
  }
}

}  // namespace

bool stored_rows(const StoredRowsParams& params) {
  const int64_t* end = params.rows + params.count;
  if (std::any_of(params.rows, end, [&](int64_t row) { return row < 0 || row >= params.size; })) return false;
  const auto run = by_stored(params.stored);
  const int64_t grain = kGrainInputs / std::max<int64_t>(params.inputs, 1) + 1;
  parallel_for(params.count, grain, [&](int64_t begin, int64_t end) { run(params, begin, end); });
  return true;
}

}  // namespace specdec::cpu
