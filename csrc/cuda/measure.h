// Computes the statistics of all blocks of logits of a sequence. A warp takes those that are its own one after the
// other, and hands the statistics of many at once to the blocks of the cluster.
#pragma once

#include "ring.h"
#include "stats.h"

namespace specdec::cuda {

// Equal rows of a sequence, one after the other.
struct Rows {
  const char* data;
  int64_t stride;  // bytes from one to the next
  int64_t size;    // logits of a row
  Dtype dtype;
};

// What is measured: items are the blocks of the target's rows, then those of the draft's.
struct Measured {
  Rows target, draft;
  int target_items, items;
};

// A place among the items that goes on in equal steps, without divisions.
struct Cursor {
  const char* row;
  int64_t stride, step_bytes;  // from one row to the next; what a step adds
  int item, end;               // end: of the rows of this size
  int block, num_blocks, step_blocks;
  int whole;  // of the row's blocks, those that begin and end with a granule: [0, whole)
  int last_size;
  Dtype dtype;
  int shift;  // a logit has 2^shift bytes

  SPECDEC_DEVICE static Cursor at(const Measured& measured, int item, int step) {
    const bool of_target = item < measured.target_items;
    Cursor found = {};
    found.item = item, found.end = of_target ? measured.target_items : measured.items;
    if (item >= found.end) return found;
    const Rows& target = measured.target;
    const Rows& draft = measured.draft;
    // By fields, since a choice between two structs would put them into memory.
    const Rows rows = {of_target ? target.data : draft.data, of_target ? target.stride : draft.stride,
                       of_target ? target.size : draft.size, of_target ? target.dtype : draft.dtype};
    const int n = blocks_of(rows.size), before = of_target ? item : item - measured.target_items;
    found.row = rows.data + before / n * rows.stride, found.block = before % n;
    found.stride = rows.stride, found.step_bytes = step / n * rows.stride;
    found.num_blocks = n, found.step_blocks = step % n;
    const bool aligned = (reinterpret_cast<uintptr_t>(rows.data) | static_cast<uint64_t>(rows.stride)) % kGranule == 0;
    found.whole = aligned ? static_cast<int>(rows.size / kBlock) : 0;
    found.last_size = static_cast<int>(rows.size - int64_t{n - 1} * kBlock);
    found.dtype = rows.dtype, found.shift = rows.dtype == Dtype::kFloat32 ? 2 : 1;
    return found;
  }

  SPECDEC_DEVICE void next(const Measured& measured, int step) {
    item += step, row += step_bytes, block += step_blocks;
    if (block >= num_blocks) row += stride, block -= num_blocks;
    if (item >= end && item < measured.items) *this = at(measured, item, step);
  }

  SPECDEC_DEVICE const char* data() const { return row + (int64_t{block} * kBlock << shift); }
  SPECDEC_DEVICE Granules granules() const {
    const int left = (num_blocks - 1 - block) * kBlock + last_size;
    return Granules::of(data(), int64_t{left} << shift, kBlock << shift);
  }
  // By one thread: has the block copied.
  SPECDEC_DEVICE void copy_to(const Slot& slot) const {
    block < whole ? slot.copy(data(), kBlock << shift) : slot.copy(granules());
  }
};

// By a warp: begins the copies of its first items, as many as there are slots. Each lane begins its own, since one lane
// would compute one address after the other.
SPECDEC_DEVICE void begin_copies(const Ring& ring, const Measured& measured, const Place& place) {
  if (ring.slots == nullptr) return;
#pragma unroll 1
  for (int number = simt::thread() % kWarp; number < ring.num_slots; number += kWarp) {
    const Slot slot = ring.slot(number);
    simt::init(slot.arrival);
    const Cursor cursor = Cursor::at(measured, place.my_warp + number * place.all_warps, place.all_warps);
    if (cursor.item < measured.items) cursor.copy_to(slot);
  }
  simt::sync_warp();
}

// Where statistics go, in every block of the cluster. Items of the draft follow those of all of the target's rows.
struct Results {
  float *max, *sum;
  bool wants_raw;
  float *raw_max, *raw_sum;  // if wanted: of the target's items, as they are given, at temperature 1
  int target_items, gap;     // gap: items of target rows that are not measured

  SPECDEC_DEVICE void write(int item, const BlockStats& stats, const BlockStats& raw) const {
    const bool of_target = item < target_items;
    const int at = of_target ? item : item + gap;
    for (int block = 0; block < simt::blocks_in_cluster(); ++block) {
      simt::write(there(max, block) + at, stats.max);
      simt::write(there(sum, block) + at, stats.sum);
      if (!wants_raw || !of_target) continue;
      simt::write(there(raw_max, block) + at, raw.max);
      simt::write(there(raw_sum, block) + at, raw.sum);
    }
  }

 private:
  // The memory of a lone block may be scratch, which in_block cannot map.
  SPECDEC_DEVICE static float* there(float* place, int block) {
    return simt::blocks_in_cluster() == 1 ? place : simt::in_block(place, block);
  }
};

// By a warp: the statistics of a block after mask, bias and penalties. Calls read() when it has read `data`.
template <class Read>
SPECDEC_DEVICE BlockStats adjusted_stats(const char* data, const Row& row, int block, float inverse_temperature,
                                         bool wants_raw, BlockStats* raw, const Read& read) {
  float x[kEach];
  load_raw(row, block, data, x);
  read();
  if (wants_raw) *raw = block_stats(logits_of(x), 1.0f);
  mask_block(row, block, x);
  adjust_block(touched_of(row, block), block, x);
  return block_stats(logits_of(x), inverse_temperature);
}

// By a warp: computes the statistics of its items. row_of(item) returns the item's Row. `adjusts`: whether logits count
// otherwise than they are given, by mask, bias or penalties.
template <class RowOf>
SPECDEC_DEVICE void measure(const Measured& measured, const Ring& ring, const Place& place, const Results& results,
                            bool adjusts, float inverse_temperature, const RowOf& row_of) {
  const int step = place.all_warps, lane = simt::thread() % kWarp;
  const bool refills = ring.slots != nullptr && !ring.stay;
  Cursor now = Cursor::at(measured, place.my_warp, step), ahead = {};
  if (refills) ahead = Cursor::at(measured, place.my_warp + ring.num_slots * step, step);
  int number = 0, round = 0, count = 0;
  BlockStats mine = {}, my_raw = {};  // of the lane's item: lane i has the i-th of those that were not written
  int my_item = now.item + lane * step;
  while (now.item < measured.items) {
    Slot slot = {};
    const char* data;
    if (ring.slots == nullptr) {
      data = now.data();
    } else {
      slot = ring.slot(number);
      data = slot.arrived(round);
    }
    const auto release = [&] {
      if (!refills) return;
      simt::sync_warp();  // all lanes have read the slot
      if (lane == 0 && ahead.item < measured.items) ahead.copy_to(slot);
      ahead.next(measured, step);
    };
    BlockStats stats, raw = {};
    if (adjusts) {
      stats = adjusted_stats(data, row_of(now.item), now.block, inverse_temperature, results.wants_raw, &raw, release);
    } else {
      with_format(now.dtype, [&](auto format) {
        Logits<decltype(format)> logits;
        if (now.block < now.whole) {
          logits.load(data);
        } else {
          logits.load(Shifted::of(now.granules(), data, format.kLowest));
        }
        release();
        if (results.wants_raw) raw = block_stats(logits, 1.0f);
        stats = block_stats(logits, inverse_temperature);
      });
    }
    if (lane == count) mine = stats, my_raw = raw;
    if (++number == ring.num_slots) number = 0, round ^= 1;
    now.next(measured, step);
    if (++count == kWarp || now.item >= measured.items) {
      if (lane < count) results.write(my_item, mine, my_raw);
      my_item += kWarp * step, count = 0;
    }
  }
}

}  // namespace specdec::cuda
