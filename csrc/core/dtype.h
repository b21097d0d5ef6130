// The numbers of logits, keys and values, as they are in memory.
#pragma once

#include "hd.h"

namespace specdec {

enum class Dtype : int32_t { kFloat32, kBFloat16, kFloat16 };

SPECDEC_HD int64_t size_in_bytes(Dtype dtype) { return dtype == Dtype::kFloat32 ? 4 : 2; }

}  // namespace specdec
