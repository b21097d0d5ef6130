#include "packed.h"

#include "lanes.h"

namespace specdec::cpu {
namespace {

struct ExpandParams {
  const LinearParams& layer;
  float* out;
};

template <int kWidth, class Block>
SPECDEC_BODY void expand_blocks(const ExpandParams& params, int64_t begin, int64_t end) {
  using Group = specdec::cpu::Group<kWidth, Block>;
  const int64_t inputs = params.layer.inputs, bytes = inputs / Group::kInputs * static_cast<int64_t>(sizeof(Block));
  float* out = params.out;
  for (int64_t output = begin; output < end; ++output) {
    for (int64_t k = 0; k < inputs; k += Group::kInputs) {
      const Group group = Group::read(params.layer.weight + output * bytes, k);
      for (int part = 0; part < Group::kParts; ++part) {
#pragma GCC unroll 8
        for (int i = 0; i < Group::kVectors; ++i, out += kWidth) {
          typename Lanes<kWidth>::Vector w;
          Group::expand(group, part, i, &w);
          std::memcpy(out, &w, sizeof(w));
        }
      }
    }
  }
}

template <int kWidth>
SPECDEC_BODY void expand_body(const ExpandParams& params, int64_t begin, int64_t end) {
  switch (params.layer.stored) {
    case Stored::kQ4_0:
      return expand_blocks<kWidth, Q4_0>(params, begin, end);
    case Stored::kQ4_1:
      return expand_blocks<kWidth, Q4_1>(params, begin, end);
    case Stored::kQ8_0:
      return expand_blocks<kWidth, Q8_0>(params, begin, end);
    case Stored::kQ4_K:
      return expand_blocks<kWidth, Q4_K>(params, begin, end);
    case Stored::kQ6_K:
      return expand_blocks<kWidth, Q6_K>(params, begin, end);
    case Stored::kFloat32:
    case Stored::kFloat16:
    case Stored::kBFloat16:
      return;
  }
}

SPECDEC_BY_INSTRUCTION_SET(expand_body, ExpandParams)

template <class Block>
constexpr BlockSize kSizeOf = {Group<4, Block>::kInputs, sizeof(Block)};

}  // namespace

BlockSize block_size(Stored stored) {
  switch (stored) {
    case Stored::kFloat32:
      return kSizeOf<float>;
    case Stored::kFloat16:
      return kSizeOf<Float16>;
    case Stored::kBFloat16:
      return kSizeOf<BFloat16>;
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
  }
  return {0, 0};
}

void expand(const LinearParams& layer, int64_t begin, int64_t end, float* out) {
  expand_body_in_use()({layer, out}, begin, end);
}

}  // namespace specdec::cpu
