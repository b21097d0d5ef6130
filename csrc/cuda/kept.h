// How the blocks of a sequence's rows are divided among warps, and where they are in shared memory if they stay there.
#pragma once

#include "../core/softmax.h"
#include "simt.h"

namespace specdec::cuda {

using simt::kWarp;

// Cuts memory into pieces. The host counts addresses from 0; kernels add the address at which the memory begins.
class Arena {
 public:
  template <class T>
  T* take(int64_t n) {
    T* piece = reinterpret_cast<T*>(size_);
    size_ += (n * static_cast<int64_t>(sizeof(T)) + 15) / 16 * 16;
    return piece;
  }

  int64_t size() const { return size_; }

 private:
  int64_t size_ = 0;
};

template <class T>
SPECDEC_DEVICE T* moved(T* piece, char* base) {
  return reinterpret_cast<T*>(base + reinterpret_cast<intptr_t>(piece));
}

// How a sequence's items, the blocks of its rows, are divided: warp w takes items w, w + all, w + 2 all, ...
struct Place {
  int warp, warps;         // in the block
  int my_warp, all_warps;  // in the cluster
  bool first;              // block 0

  SPECDEC_DEVICE static Place here() {
    const int warps = simt::num_threads() / kWarp, warp = simt::thread() / kWarp;
    return {warp, warps, warps * simt::block_in_cluster() + warp, warps * simt::blocks_in_cluster(),
            simt::block_in_cluster() == 0};
  }
  // The place in a split launch's measuring kernel, in which `blocks` blocks measure sequence cluster() / blocks.
  SPECDEC_DEVICE static Place measuring(int blocks) {
    const int warps = simt::num_threads() / kWarp, warp = simt::thread() / kWarp;
    const int block = static_cast<int>(simt::cluster() % blocks);
    return {warp, warps, warps * block + warp, warps * blocks, block == 0};
  }
  SPECDEC_DEVICE bool lane0() const { return simt::thread() % kWarp == 0; }
  // How many of `items` items this warp takes.
  SPECDEC_DEVICE int turns(int items) const { return (items - my_warp + all_warps - 1) / all_warps; }
  // The first item at or after `first_item` that this warp takes, counted from `first_item`.
  SPECDEC_DEVICE int first_after(int first_item) const {
    return (my_warp + all_warps - first_item % all_warps) % all_warps;
  }
};

// Where items are if all of them stay in shared memory, each in a slot of its own.
struct Kept {
  char* slots;  // of this block, [warps, num_slots, slot_bytes]; null: items do not stay
  int num_slots, slot_bytes;

  // The block of the cluster that has an item; block 0 if none has.
  SPECDEC_DEVICE int block_of(int item) const {
    const Place here = Place::here();
    return slots == nullptr ? 0 : item % here.all_warps / here.warps;
  }
  SPECDEC_DEVICE const char* place_of(int item) const {
    const Place here = Place::here();
    const int warp = item % here.all_warps, block = warp / here.warps;
    char* place = slots + (warp % here.warps * num_slots + item / here.all_warps) * slot_bytes;
    return block == simt::block_in_cluster() ? place : simt::in_block(place, block);
  }
};

}  // namespace specdec::cuda
