// Loads logits of any dtype as float32, masked and patched. Inlined, so compiled for the caller's instruction set.
#pragma once

#include <algorithm>

#include "../common/floats.h"
#include "block.h"

namespace specdec::cpu {

template <class T>
SPECDEC_BODY void convert(const void* source, int64_t begin, int64_t n, float* x) {
  const T* values = static_cast<const T*>(source) + begin;
  if (n == kBlock) {
    for (int i = 0; i < kBlock; ++i) x[i] = to_float(values[i]);
  } else {
    for (int64_t i = 0; i < n; ++i) x[i] = to_float(values[i]);
  }
}

// The first patch of a token >= `token`.
SPECDEC_BODY const Patch* first_patch(Row row, int64_t token) {
  return std::lower_bound(row.patches, row.patches + row.num_patches, token,
                          [](const Patch& patch, int64_t t) { return patch.token < t; });
}

// Makes those of the logits [begin, begin + n) -inf whose tokens are not allowed.
SPECDEC_BODY void mask(const AllowedTokens& allowed, int64_t begin, int64_t n, float* x) {
  static_assert(kLanes == 32, "a word has a bit for every lane");
  int64_t i = 0;
  if (allowed.ids == nullptr && begin % kLanes == 0) {
    for (; i + kLanes <= n; i += kLanes) {
      const uint32_t word = static_cast<uint32_t>(allowed.words[(begin + i) / kLanes]);
      for (int lane = 0; lane < kLanes; ++lane) x[i + lane] = word & 1u << lane ? x[i + lane] : -INFINITY;
    }
  }
  for (; i < n; ++i) x[i] = allowed.has(begin + i) ? x[i] : -INFINITY;
}

// Logits [begin, begin + n) of a row, n <= kBlock.
SPECDEC_BODY void load_range(Row row, int64_t begin, int64_t n, float* x) {
  switch (row.dtype) {
    case Dtype::kFloat32:
      convert<float>(row.data, begin, n, x);
      break;
    case Dtype::kBFloat16:
      convert<BFloat16>(row.data, begin, n, x);
      break;
    case Dtype::kFloat16:
      convert<Float16>(row.data, begin, n, x);
      break;
  }
  if (row.allowed.words != nullptr) mask(row.allowed, begin, n, x);
  if (row.num_patches == 0) return;
  const Patch* end = row.patches + row.num_patches;
  for (const Patch* p = first_patch(row, begin); p != end && p->token < begin + n; ++p) x[p->token - begin] = p->logit;
}

SPECDEC_BODY int64_t size_of(Row row, int64_t block) { return std::min<int64_t>(row.size - block * kBlock, kBlock); }

// The block's size, rounded up to whole lanes, on which all loops run.
SPECDEC_BODY int64_t padded_size(Row row, int64_t block) {
  return (size_of(row, block) + kLanes - 1) / kLanes * kLanes;
}

// Copies a block to x, padded with -inf to whole lanes.
SPECDEC_BODY void load(Row row, int64_t block, float* x) {
  const int64_t n = size_of(row, block), padded = padded_size(row, block);
  load_range(row, block * kBlock, n, x);
  for (int64_t i = n; i < padded; ++i) x[i] = -INFINITY;
}

// Where the logits of the block after this one would be.
SPECDEC_BODY const void* next_of(Row row, int64_t block) {
  return static_cast<const char*>(row.data) + (block + 1) * kBlock * size_in_bytes(row.dtype);
}

// The block's logits: in place if they are float32, as they are given and in whole lanes, else copied to x[kBlock].
SPECDEC_BODY const float* view(Row row, int64_t block, float* x) {
  const int64_t begin = block * kBlock, n = size_of(row, block);
  if (row.dtype == Dtype::kFloat32 && n % kLanes == 0 && row.allowed.words == nullptr) {
    if (row.num_patches == 0) return static_cast<const float*>(row.data) + begin;
    const Patch* p = first_patch(row, begin);
    if (p == row.patches + row.num_patches || p->token >= begin + n) {
      return static_cast<const float*>(row.data) + begin;
    }
  }
  load(row, block, x);
  return x;
}

// Starts to read kLanes floats from `data` + i on, which need not exist.
SPECDEC_BODY void prefetch_lanes(const void* data, int64_t i) {
  __builtin_prefetch(static_cast<const float*>(data) + i);
  __builtin_prefetch(static_cast<const float*>(data) + i + kLanes / 2);
}

}  // namespace specdec::cpu
