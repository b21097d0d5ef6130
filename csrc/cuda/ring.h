// Brings blocks of logits to the registers: a warp has them copied to shared memory ahead of use, into slots that it
// uses in turn. If it has a slot for each of its blocks, they stay there, and the whole cluster can read them.
#pragma once

#include "rows.h"

namespace specdec::cuda {

struct Piece {
  Row row;
  int block;
};

// The slots of a block's warps. Each warp counts the pieces that it takes, its turns, from the beginning of the kernel:
// the piece of turn t is in slot t % num_slots.
struct Ring {
  char* slots;              // [warps, num_slots, slot_bytes]; null: logits are read in place
  simt::Arrival* arrivals;  // [warps, num_slots]
  int num_slots, slot_bytes;
  bool stay;  // all measured pieces stay, each in a slot of its own

  SPECDEC_DEVICE Ring at(char* base) const {
    return {num_slots == 0 ? nullptr : moved(slots, base), moved(arrivals, base), num_slots, slot_bytes, stay};
  }
  SPECDEC_DEVICE Kept kept() const { return {stay ? slots : nullptr, num_slots, slot_bytes}; }
  SPECDEC_DEVICE int slot(int turn) const { return simt::thread() / kWarp * num_slots + turn % num_slots; }

  // By one thread of a warp, when no other thread reads the slot any more.
  SPECDEC_DEVICE void copy(int turn, const Piece& piece) const {
    simt::copy_bulk(slots + slot(turn) * slot_bytes, piece.row.block_in_memory(piece.block),
                    piece.row.size_of(piece.block) * piece.row.element(), &arrivals[slot(turn)]);
  }

  // Begins the copies of a warp's turns [0, end), as many as there are slots. find(turn) returns the turn's Piece.
  template <class Find>
  SPECDEC_DEVICE void begin(int end, const Find& find) const {
    if (slots == nullptr) return;
    if (simt::thread() % kWarp == 0) {
      for (int turn = 0; turn < num_slots; ++turn) simt::init(&arrivals[slot(turn)]);
      for (int turn = 0; turn < end && turn < num_slots; ++turn) copy(turn, find(turn));
    }
    simt::sync_warp();
  }

  // By a warp: waits for the piece of a turn, and returns where it is.
  SPECDEC_DEVICE const char* arrived(int turn) const {
    simt::wait(&arrivals[slot(turn)], turn / num_slots % 2);
    return slots + slot(turn) * slot_bytes;
  }

  // By a warp: calls function(turn, piece, what adjusts it, its raw logits) for turns [0, end).
  template <class Find, class Function>
  SPECDEC_DEVICE void for_turns(int end, const Find& find, const Function& function) const {
    for (int turn = 0; turn < end; ++turn) {
      const Piece piece = find(turn);
      const Touched touched = touched_of(piece.row, piece.block);
      const char* data = slots == nullptr ? place_of_block(piece.row, piece.block) : arrived(turn);
      float x[kEach];
      load_aligned(data, piece.row.dtype, piece.row.size_of(piece.block), x);
      if (slots != nullptr) {
        simt::sync_warp();  // all lanes have read the slot
        const int next = turn + num_slots;
        if (next < end && simt::thread() % kWarp == 0) copy(next, find(next));
      }
      function(turn, piece, touched, x);
    }
  }
};

}  // namespace specdec::cuda
