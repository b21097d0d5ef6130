// How a warp loads a row's blocks, masks them, and adjusts them by bias and penalties.
#pragma once

#include "../core/distribution.h"
#include "formats.h"

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
  Kept kept;       // where its blocks are in shared memory, if they stay there
  int first_item;  // the item that its first block is
  char* own_copy;  // the warp's shared memory for a block that is not aligned, or that bias and penalties adjust
  const AllowedRows* masks = nullptr;
  int mask = -1;  // the one of these rows that is this row's; -1: none

  SPECDEC_HD int element() const { return dtype == Dtype::kFloat32 ? 4 : 2; }
  SPECDEC_HD int size_of(int block) const {
    const int64_t left = size - int64_t{block} * kBlock;
    return left < kBlock ? static_cast<int>(left) : kBlock;
  }
  SPECDEC_DEVICE Granules granules(int block) const {
    const int64_t before = int64_t{block} * kBlock;
    return Granules::of(data + before * element(), (size - before) * element(), kBlock * element());
  }
  // Not kept, since registers are scarce.
  SPECDEC_DEVICE AllowedTokens allowed() const { return masks == nullptr ? AllowedTokens{} : masks->row(mask, d2t); }
  SPECDEC_DEVICE const int64_t* ends() const { return sampling->ends + b * sampling->num_ends; }
  SPECDEC_HD int num_blocks() const { return blocks_of(size); }
  // Whether this thread block draws from a block of logits, -1 standing for none.
  SPECDEC_DEVICE bool drawn_here(int block) const {
    return simt::block_in_cluster() == (block < 0 ? 0 : kept.block_of(first_item + block));
  }
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

// Indices [begin, end) of a list.
struct Range {
  int64_t begin, end;
};

// The range of the ids in [first, last] among `size` > 0 ascending ones.
SPECDEC_DEVICE Range range(const int64_t* sorted, int64_t size, int64_t first, int64_t last) {
  const int64_t begin = find(sorted, size, first), end = find(sorted, size, last);
  return {begin + (sorted[begin] < first), end + (sorted[end] <= last)};
}

SPECDEC_DEVICE float raw_logit(const Row& row, int64_t index) {
  if (row.dtype == Dtype::kFloat32) return reinterpret_cast<const float*>(row.data)[index];
  const uint32_t bits = reinterpret_cast<const uint16_t*>(row.data)[index];
  return row.dtype == Dtype::kBFloat16 ? as_float(bits << 16) : simt::half_to_float(bits);
}

// The same, or -inf where the token may not follow.
SPECDEC_DEVICE float masked_logit(const Row& row, int64_t index) {
  return row.allowed().has(index) ? raw_logit(row, index) : -INFINITY;
}

SPECDEC_DEVICE int64_t target_id(const Row& row, int64_t index) { return row.d2t == nullptr ? index : row.d2t[index]; }

// The logit of a token, by the target's id, after bias and penalties.
SPECDEC_DEVICE float adjusted(const Row& row, int64_t id, float raw) {
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
  if (sampling.penalties != nullptr) {
    penalties = {sampling.penalties[3 * row.b], sampling.penalties[3 * row.b + 1], sampling.penalties[3 * row.b + 2]};
  }
  if (sampling.num_ends > 0 && row.position + row.num_drafts < sampling.first_end[row.b]) {
#pragma unroll 1
    for (int64_t i = 0; i < sampling.num_ends; ++i) {
      if (row.ends()[i] == id) return -INFINITY;
    }
  }
  return adjust(raw, bias, in_prompt, count, penalties);
}

SPECDEC_DEVICE float logit_at(const Row& row, int64_t index) {
  return adjusted(row, target_id(row, index), masked_logit(row, index));
}

// By a warp: copies a block that is not aligned, or does not end with a granule, to the warp's own_copy, and pads it
// with -inf. Shifted while they are loaded, as `Logits` does it, the logits would need registers that draws do not
// have.
SPECDEC_DEVICE const char* aligned_copy(const Row& row, const char* data, const Granules& granules) {
  const uint32_t padding = row.dtype == Dtype::kFloat32    ? Float32::kLowest
                           : row.dtype == Dtype::kBFloat16 ? BFloat16::kLowest
                                                           : Float16::kLowest;
  const Shifted from = Shifted::of(granules, data, padding);
  simt::sync_warp();  // no lane reads the previous block any more
#pragma unroll 1
  for (int at = kGranule * (simt::thread() % kWarp); at < kBlock * row.element(); at += kGranule * kWarp) {
    simt::write(reinterpret_cast<Bytes16*>(row.own_copy + at), from.bytes(at));
  }
  simt::sync_warp();
  return row.own_copy;
}

// By a warp: loads a block's raw logits, padded with -inf. `copied`: where its granules were copied to, or null.
SPECDEC_DEVICE void load_raw(const Row& row, int block, const char* copied, float (&x)[kEach]) {
  const Granules granules = row.granules(block);
  const char* data = copied != nullptr           ? copied
                     : row.kept.slots != nullptr ? row.kept.place_of(row.first_item + block)
                                                 : granules.first;
  if (granules.shift != 0 || granules.rest != 0) data = aligned_copy(row, data, granules);
  load_aligned(data, row.dtype, row.size_of(block), x);
}

// A warp stores its block to own_copy so that single lanes can adjust single tokens. There, a thread's logits are 32
// apart; own_place maps an index within the block to one in own_copy.
SPECDEC_DEVICE int own_place(int place) {
  return (place / (kVector * kWarp) * kVector + place % kVector) * kWarp + place / kVector % kWarp;
}

SPECDEC_DEVICE float* to_own(const Row& row, const float (&x)[kEach]) {
  float* own = reinterpret_cast<float*>(row.own_copy);
  simt::sync_warp();  // no lane reads the previous block any more
#pragma unroll
  for (int i = 0; i < kEach; ++i) simt::write(&own[i * kWarp + simt::thread() % kWarp], x[i]);
  return own;
}

SPECDEC_DEVICE void from_own(const float* own, float (&x)[kEach]) {
#pragma unroll
  for (int i = 0; i < kEach; ++i) x[i] = simt::read(&own[i * kWarp + simt::thread() % kWarp]);
}

// By a warp: makes those of a block's logits -inf whose tokens may not follow. Before bias and penalties. In own_copy,
// as there are no registers left for it.
SPECDEC_DEVICE void mask_block(const Row& row, int block, float (&x)[kEach]) {
  const AllowedTokens allowed = row.allowed();
  if (allowed.words == nullptr) return;
  float* own = to_own(row, x);
#pragma unroll 1
  for (int i = 0; i < kEach; ++i) {
    const int64_t token = int64_t{block} * kBlock + place_of(i);
    if (token < row.size && !allowed.has(token)) simt::write(&own[i * kWarp + simt::thread() % kWarp], -INFINITY);
  }
  from_own(own, x);
}

// The tokens of a block that bias and penalties may adjust: a range of the sequence's table, its drafts and its ends.
struct Touched {
  Row row;
  Range range;
  bool any;  // whether there is one in the block

  SPECDEC_DEVICE int64_t size() const { return range.end - range.begin + row.num_drafts + row.sampling->num_ends; }
  // The id of the i-th of them; -1 if an earlier one has the same id.
  SPECDEC_DEVICE int64_t id(int64_t i) const {
    const SamplingArguments& sampling = *row.sampling;
    const int64_t* listed = sampling.table_ids + row.b * sampling.table_size;
    const int64_t other = i - (range.end - range.begin);
    if (other < 0) return listed[range.begin + i];
    const int64_t id = other < row.num_drafts ? row.drafts[other] : row.ends()[other - row.num_drafts];
    bool before = sampling.table_size > 0 && listed[find(listed, sampling.table_size, id)] == id;
#pragma unroll 1
    for (int64_t k = 0; k < other; ++k) {
      before |= (k < row.num_drafts ? row.drafts[k] : row.ends()[k - row.num_drafts]) == id;
    }
    return before ? -1 : id;
  }
  // The index of the i-th of them within a block; -1 if it is not in the block.
  SPECDEC_DEVICE int place(int64_t i, int block) const {
    const int64_t its_id = id(i);
    int64_t index = its_id;
    if (row.d2t != nullptr && its_id >= 0) {
      index = find(row.d2t, row.size, its_id);
      if (row.d2t[index] != its_id) return -1;
    }
    const int64_t place = index - int64_t{block} * kBlock;
    return place >= 0 && place < row.size_of(block) ? static_cast<int>(place) : -1;
  }
};

// By a warp, before it loads a block: which of the block's tokens are adjusted. For most blocks, none is.
SPECDEC_DEVICE Touched touched_of(const Row& row, int block) {
  const SamplingArguments& sampling = *row.sampling;
  Touched touched = {row, {0, 0}, false};
  if (!sampling.has_table) return touched;
  if (sampling.table_size > 0) {
    const int64_t first = int64_t{block} * kBlock, last = first + row.size_of(block) - 1;
    touched.range = range(sampling.table_ids + row.b * sampling.table_size, sampling.table_size, target_id(row, first),
                          target_id(row, last));
  }
#pragma unroll 1
  for (int64_t i = simt::thread() % kWarp; i < touched.size(); i += kWarp) touched.any |= touched.place(i, block) >= 0;
  touched.any = simt::ballot(touched.any) != 0;
  return touched;
}

// By a warp: applies bias and penalties to a block's logits. The lanes divide the few affected tokens among them.
SPECDEC_DEVICE void adjust_block(const Touched& touched, int block, float (&x)[kEach]) {
  if (!touched.any) return;
  const Row& row = touched.row;
  float* own = to_own(row, x);
  simt::sync_warp();
#pragma unroll 1
  for (int64_t i = simt::thread() % kWarp; i < touched.size(); i += kWarp) {
    const int place = touched.place(i, block);
    if (place < 0) continue;
    float* its = &own[own_place(place)];
    simt::write(its, adjusted(row, target_id(row, int64_t{block} * kBlock + place), simt::read(its)));
  }
  simt::sync_warp();
  from_own(own, x);
}

SPECDEC_DEVICE void load_block(const Row& row, int block, float (&x)[kEach]) {
  const Touched touched = touched_of(row, block);
  load_raw(row, block, nullptr, x);
  mask_block(row, block, x);
  adjust_block(touched, block, x);
}

}  // namespace specdec::cuda
