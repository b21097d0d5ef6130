// Brings blocks of logits near: a warp has them copied to shared memory ahead of use, into slots that it uses in turn.
// If it has a slot for each of its blocks, they stay there, and the whole cluster can read them.
#pragma once

#include "rows.h"

namespace specdec::cuda {

// A place for one block of logits.
struct Slot {
  char* data;
  simt::Arrival* arrival;

  // By one thread of a warp, when no other thread reads the slot any more. `from` is aligned.
  SPECDEC_DEVICE void copy(const char* from, int bytes) const { simt::copy_bulk(data, from, bytes, arrival); }
  SPECDEC_DEVICE void copy(const Granules& granules) const {
    copy(granules.first, granules.whole);
    if (granules.rest > 0) simt::prefetch(granules.first + granules.whole);
  }
  // By a warp: waits for what is copied to the slot, an even or odd time, and returns where it is.
  SPECDEC_DEVICE const char* arrived(int round) const {
    simt::wait(arrival, round);
    return data;
  }
};

// The slots of a block's warps. Each warp counts the blocks of logits that it takes, its turns, from the beginning of
// the kernel: that of turn t is in slot t % num_slots, and is the slot's (t / num_slots)-th.
struct Ring {
  char* slots;              // [warps, num_slots, slot_bytes]; null: logits are read in place
  simt::Arrival* arrivals;  // [warps, num_slots]
  int num_slots, slot_bytes;
  bool stay;  // all measured blocks stay, each in a slot of its own

  SPECDEC_DEVICE Ring at(char* base) const {
    return {num_slots == 0 ? nullptr : moved(slots, base), moved(arrivals, base), num_slots, slot_bytes, stay};
  }
  // By a warp, if no copies are begun at once: makes its slots ready.
  SPECDEC_DEVICE void begin() const {
    for (int i = simt::thread() % kWarp; i < num_slots; i += kWarp) simt::init(slot(i).arrival);
    simt::sync_warp();
  }
  SPECDEC_DEVICE Kept kept() const { return {stay ? slots : nullptr, num_slots, slot_bytes}; }
  // The warp's slots, by number and by turn.
  SPECDEC_DEVICE Slot slot(int number) const {
    const int place = simt::thread() / kWarp * num_slots + number;
    return {slots + place * slot_bytes, &arrivals[place]};
  }
  SPECDEC_DEVICE Slot of_turn(int turn) const { return slot(turn % num_slots); }
  SPECDEC_DEVICE const char* arrived(int turn) const { return of_turn(turn).arrived(turn / num_slots % 2); }
};

}  // namespace specdec::cuda
