// Blocks of logits on their way to the registers: a warp has them copied to shared memory ahead of its use, into slots
// that take turns. Where it has a slot for each of them, they stay there for all of the cluster.
#pragma once

#include "rows.h"

namespace specdec::cuda {

struct Piece {
  Row row;
  int block;
};

// Of a block's warps. A warp takes pieces in turns, which it counts from the kernel's beginning: turn t is in slot
// t % num_slots.
struct Ring {
  char* slots;              // [warps, num_slots, slot_bytes]; null: logits are read where they lie
  simt::Arrival* arrivals;  // [warps, num_slots]
  int num_slots, slot_bytes;
  bool stay;  // the pieces that are measured, each in a slot of its own

  SPECDEC_DEVICE Ring at(char* base) const {
    return {num_slots == 0 ? nullptr : moved(slots, base), moved(arrivals, base), num_slots, slot_bytes, stay};
  }
  SPECDEC_DEVICE Kept kept() const { return {stay ? slots : nullptr, num_slots, slot_bytes}; }
  SPECDEC_DEVICE int slot(int turn) const { return simt::thread() / kWarp * num_slots + turn % num_slots; }

  // By one thread of a warp, once no other one reads what was there.
  SPECDEC_DEVICE void copy(int turn, const Piece& piece) const {
    simt::copy_bulk(slots + slot(turn) * slot_bytes, piece.row.block_in_memory(piece.block),
                    piece.row.size_of(piece.block) * piece.row.element(), &arrivals[slot(turn)]);
  }

  // Begins the copies of a warp's turns [0, end), as far as there are slots. find(turn): its Piece.
  template <class Find>
  SPECDEC_DEVICE void begin(int end, const Find& find) const {
    if (slots == nullptr) return;
    if (simt::thread() % kWarp == 0) {
      for (int turn = 0; turn < num_slots; ++turn) simt::init(&arrivals[slot(turn)]);
      for (int turn = 0; turn < end && turn < num_slots; ++turn) copy(turn, find(turn));
    }
    simt::sync_warp();
  }

  // By a warp: where the piece of a turn is, that has come now.
  SPECDEC_DEVICE const char* arrived(int turn) const {
    simt::wait(&arrivals[slot(turn)], turn / num_slots % 2);
    return slots + slot(turn) * slot_bytes;
  }

  // function(turn, piece, what touches it, its raw logits) for the turns that have begun, by the warp.
  template <class Find, class Function>
  SPECDEC_DEVICE void for_turns(int end, const Find& find, const Function& function) const {
    for (int turn = 0; turn < end; ++turn) {
      const Piece piece = find(turn);
      const Touched touched = touched_of(piece.row, piece.block);
      const char* data = slots == nullptr ? place_of_block(piece.row, piece.block) : arrived(turn);
      float x[kEach];
      load_aligned(data, piece.row.dtype, piece.row.size_of(piece.block), x);
      if (slots != nullptr) {
        simt::sync_warp();  // all lanes have it
        const int next = turn + num_slots;
        if (next < end && simt::thread() % kWarp == 0) copy(next, find(next));
      }
      function(turn, piece, touched, x);
    }
  }
};

}  // namespace specdec::cuda
