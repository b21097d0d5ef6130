// Rows of logits: plain ones in one format, and any, which have a format of their own and whose logits masks, bias and
// penalties may adjust. Kernels are compiled for both: `Rows` is Plain<format> or Any.
#pragma once

#include "../core/distribution.h"
#include "blocks.h"

namespace specdec::cuda {

// A row of sequence b, after the drafts [0, num_drafts) of its step.
struct Row {
  const char* data;
  Dtype dtype;
  int64_t size;
  const int64_t* d2t;  // the target's ids of its tokens; null: they have the target's ids
  const SamplingArguments* sampling;
  int64_t b, position;  // of the step's first token
  const int64_t* drafts;
  int64_t num_drafts;
  AllowedTokens allowed;

  // Logits from the block's first to the row's end.
  SPECDEC_DEVICE int left(int block) const { return static_cast<int>(size) - block * kBlock; }
  SPECDEC_DEVICE int64_t target_id(int64_t index) const { return d2t == nullptr ? index : d2t[index]; }
};

// The index of the last of `size` ascending ids that is <= id, or 0.
SPECDEC_DEVICE int64_t find(const int64_t* sorted, int64_t size, int64_t id) {
  int64_t place = 0;
#pragma unroll 1
  for (int64_t left = size; left > 1;) {
    const int64_t half = left / 2;
    if (sorted[place + half] <= id) place += half;
    left -= half;
  }
  return place;
}

// The index of the first of `size` ascending ids that is >= id, or `size`.
SPECDEC_DEVICE int64_t first_from(const int64_t* sorted, int64_t size, int64_t id) {
  if (size == 0) return 0;
  const int64_t place = find(sorted, size, id);
  return place + (sorted[place] < id);
}

// `kAligned`: all blocks begin at, and rows end with, a multiple of 16 bytes.
template <class Its, bool kAligned>
struct Plain {
  using Format = Its;
  static constexpr bool kAny = false;
  static constexpr bool kSmall = kAligned && Format::kInWord == 2;  // few registers suffice for a block
  static constexpr int kMeasuring = Format::kInWord == 2 ? 5 : 4;   // blocks of threads that measure at the same time
  SPECDEC_DEVICE static float raw_logit(const Row& row, int64_t index) {
    return Format::logit(Format::bits(row.data, index), 0);
  }
  SPECDEC_DEVICE static float logit(const Row& row, int64_t index) { return raw_logit(row, index); }

  // What a thread has of a block: [i] is its i-th logit, -inf behind the row's end.
  using Block = Logits<Format>;

  // By a warp.
  SPECDEC_DEVICE static Block load(const Row& row, int block) { return load(row, block, row.left(block), lane()); }
  // What a lane has of the first `left` logits of a block.
  template <bool kShifts = false>
  SPECDEC_DEVICE static Block load(const Row& row, int block, int left, int lane) {
    Block logits;
    const char* data = row.data + static_cast<uint64_t>(static_cast<uint32_t>(block)) * (kBlock * Block::kBytes);
    if constexpr (kAligned) {
      logits.template load_vectors<false>(data, left, lane);
    } else {
      logits.template load<kShifts>(data, left, lane);
    }
    return logits;
  }
  SPECDEC_DEVICE static Block load_raw(const Row& row, int block) {
    return load<true>(row, block, row.left(block), lane());
  }
};

struct Any {
  static constexpr bool kAny = true;
  static constexpr bool kSmall = false;
  static constexpr int kMeasuring = 2;
  SPECDEC_DEVICE static float raw_logit(const Row& row, int64_t index) {
    float logit = 0.0f;
    with_format(row.dtype, [&](auto format) { logit = Plain<decltype(format), false>::raw_logit(row, index); });
    return logit;
  }

  SPECDEC_DEVICE static float logit(const Row& row, int64_t index) {
    return adjusted(row, row.target_id(index), row.allowed.has(index) ? raw_logit(row, index) : -INFINITY);
  }

  // The logit of a token, by the target's id, after bias and penalties.
  SPECDEC_DEVICE static float adjusted(const Row& row, int64_t id, float raw) {
    const SamplingArguments& sampling = *row.sampling;
    if (!sampling.has_table) return raw;
    float bias = 0.0f;
    bool in_prompt = false;
    int32_t count = 0;
    if (sampling.table_size > 0) {
      const int64_t at =
          row.b * sampling.table_size + find(sampling.table_ids + row.b * sampling.table_size, sampling.table_size, id);
      if (sampling.table_ids[at] == id)
        bias = sampling.table_bias[at], in_prompt = sampling.table_in_prompt[at], count = sampling.table_count[at];
    }
#pragma unroll 1
    for (int64_t i = 0; i < row.num_drafts; ++i) count += row.drafts[i] == id;
    Penalties penalties = {1.0f, 0.0f, 0.0f};
    if (const float* its = sampling.penalties; its != nullptr) {
      penalties = {its[3 * row.b], its[3 * row.b + 1], its[3 * row.b + 2]};
    }
    if (sampling.num_ends > 0 && row.position + row.num_drafts < sampling.first_end[row.b]) {
#pragma unroll 1
      for (int64_t i = 0; i < sampling.num_ends; ++i) {
        if (sampling.ends[row.b * sampling.num_ends + i] == id) return -INFINITY;
      }
    }
    return adjust(raw, bias, in_prompt, count, penalties);
  }

  struct Block {
    float x[kEach];
    SPECDEC_DEVICE float operator[](int i) const { return x[i]; }
    SPECDEC_DEVICE static Block only(int64_t place) {
      Block logits;
#pragma unroll
      for (int i = 0; i < kEach; ++i) logits.x[i] = place_of(i) == place ? 0.0f : -INFINITY;
      return logits;
    }
    SPECDEC_DEVICE float max() const {
      float largest = x[0];
#pragma unroll
      for (int i = 1; i < kEach; ++i) largest = simt::larger(largest, x[i]);
      return largest;
    }

    // By a warp: masks raw logits, and applies bias and penalties.
    SPECDEC_DEVICE void adjust(const Row& row, int block) {
      const int64_t first = int64_t{block} * kBlock;
      if (row.allowed.words != nullptr) {
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
          if (place_of(i) < row.left(block) && !row.allowed.has(first + place_of(i))) x[i] = -INFINITY;
        }
      }
      if (!row.sampling->has_table) return;
#pragma unroll 1
      for (uint32_t touched = touched_of(row, block); touched != 0; touched &= touched - 1) {
        const int which = simt::lowest_bit(touched);
        float logit = 0.0f;
#pragma unroll
        for (int i = 0; i < kEach; ++i) logit = i == which ? x[i] : logit;
        logit = adjusted(row, row.target_id(first + place_of(which)), logit);
#pragma unroll
        for (int i = 0; i < kEach; ++i) x[i] = i == which ? logit : x[i];
      }
    }
  };

  SPECDEC_DEVICE static Block load_raw(const Row& row, int block) {
    Block logits;
    with_format(row.dtype, [&](auto format) {
      const auto raw = Plain<decltype(format), false>::load(row, block);
#pragma unroll
      for (int i = 0; i < kEach; ++i) logits.x[i] = raw[i];
    });
    return logits;
  }

  SPECDEC_DEVICE static Block load(const Row& row, int block) {
    Block logits = load_raw(row, block);
    logits.adjust(row, block);
    return logits;
  }

  // By a warp: a bit for each of this thread's logits of a block that bias or penalties may adjust. These are tokens of
  // the sequence's table, its drafts and its ends, whose ids the lanes look up, each another one.
  SPECDEC_DEVICE static uint32_t touched_of(const Row& row, int block) {
    const SamplingArguments& sampling = *row.sampling;
    const int64_t first = int64_t{block} * kBlock;
    const int size = row.left(block) < kBlock ? row.left(block) : kBlock;
    const int64_t* table = sampling.table_ids + row.b * sampling.table_size;
    const int64_t begin = first_from(table, sampling.table_size, row.target_id(first));
    const int64_t listed = first_from(table, sampling.table_size, row.target_id(first + size - 1) + 1) - begin;
    uint32_t touched = 0;
#pragma unroll 1
    for (int64_t from = 0; from < listed + row.num_drafts + sampling.num_ends; from += kWarp) {
      const int64_t i = from + lane(), other = i - listed, end = other - row.num_drafts;
      const int64_t id = other < 0                 ? table[begin + i]
                         : end < 0                 ? row.drafts[other]
                         : end < sampling.num_ends ? sampling.ends[row.b * sampling.num_ends + end]
                                                   : -1;
      int64_t index = id;
      if (row.d2t != nullptr && id >= 0) {
        index = find(row.d2t, row.size, id);
        if (row.d2t[index] != id) index = -1;
      }
      const int place = index >= first && index < first + size ? static_cast<int>(index - first) : -1;
#pragma unroll 1
      for (uint32_t lanes = simt::ballot(place >= 0); lanes != 0; lanes &= lanes - 1) {
        const int its = simt::shuffle(place, simt::lowest_bit(lanes));
        if (its / kVector % kWarp == lane()) {
          touched |= 1u << (its / (kVector * kWarp) * kVector + its % kVector);
        }
      }
    }
    return touched;
  }
};

}  // namespace specdec::cuda
