// Draws from rows whose statistics are known, and what both kernels share: cutting memory, writing to a whole cluster.
#pragma once

#include "../core/accept.h"
#include "draws.h"
#include "measure.h"

namespace specdec::cuda {

constexpr int kThreads = 384;       // of a block, at most: with as many, each has 168 registers
constexpr int kSplitThreads = 256;  // of a block in a split launch
// The number of threads that kernels are compiled for. GPUs without clusters have split launches only.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int kMostThreads = kSplitThreads;
#else
constexpr int kMostThreads = kThreads;
#endif

// Whether every block of all rows begins and ends with a granule.
SPECDEC_HD bool aligned(const LogitRows& rows) {
  const uint64_t all = reinterpret_cast<uintptr_t>(rows.data) | static_cast<uint64_t>(rows.sequence_stride) |
                       static_cast<uint64_t>(rows.row_stride) |
                       static_cast<uint64_t>(rows.vocabulary * size_in_bytes(rows.dtype));
  return all % kGranule == 0;
}

// The most bytes that the granules of a block have.
SPECDEC_HD int block_bytes(const LogitRows& rows) {
  return kBlock * static_cast<int>(size_in_bytes(rows.dtype)) + (aligned(rows) ? 0 : kGranule);
}

// The items of a sequence: the blocks of logits in its rows.
struct Items {
  int64_t most;                  // how many there may be
  int bytes;                     // size of the largest one
  int own_copy;                  // bytes that a warp needs for a copy of a block, or 0
  int warps = kThreads / kWarp;  // of a block, at most
};

// The size of Row::own_copy. `others`: whether the kernel needs it where no bias or penalty does.
SPECDEC_HD int own_copy_of(const SamplingArguments& sampling, bool others, bool aligned, int bytes) {
  return sampling.has_table || others ? kBlock * static_cast<int>(sizeof(float)) : aligned ? 0 : bytes;
}

// The number of warps and slots among which memory is cut.
struct Cut {
  int warps;              // in a block
  int all_warps;          // in a cluster
  int num_slots;          // of a warp, for copies ahead
  bool measured = false;  // by the launch before, so that no items stay
};

// The statistics in a sequence's memory, in bytes from its blocks' largest logits on.
struct Statistics {
  int64_t mass_at, size;

  static Statistics of(const float* max, const float* mass, const void* end) {
    const auto from_max = [&](const void* piece) {
      return reinterpret_cast<intptr_t>(piece) - reinterpret_cast<intptr_t>(max);
    };
    return {from_max(mass), from_max(end)};
  }
};

// The argument of a kernel. A sequence's memory is the shared memory of its cluster. If a launch before has measured
// its rows, the cluster loads their statistics. If its shared memory is too small, all of it is `scratch`, and one
// block decides.
template <class Params, class Memory>
struct Work {
  Params params;
  Memory pieces;            // of a sequence's memory, as if it began at address 0
  int own_copy;             // bytes, as in Items
  char* scratch = nullptr;  // null: the memory is shared memory
  int64_t stride = 0;       // bytes of scratch, or of `measured`, per sequence
  int blocks = 0;           // of the launch that measures into scratch, for each sequence
  const char* measured =
      nullptr;  // the statistics of all sequences; null: this launch measures, or they are in scratch

  SPECDEC_DEVICE bool measures() const { return scratch == nullptr && measured == nullptr; }
  // By the threads of a block: copies a sequence's statistics to its memory, where they begin at `max`.
  SPECDEC_DEVICE void load_statistics(int64_t sequence, float* max) const {
    const int granules = static_cast<int>(stride / kGranule);
    for (int i = simt::thread(); i < granules; i += simt::num_threads()) {
      simt::write(reinterpret_cast<Bytes16*>(max) + i,
                  simt::load16(measured + sequence * stride + int64_t{i} * kGranule));
    }
  }

  // Shared memory begins with the warps' own copies.
  SPECDEC_DEVICE char* place_for_copy() const { return simt::shared_memory() + simt::thread() / kWarp * own_copy; }
  SPECDEC_DEVICE Memory memory(int64_t sequence) const {
    char* shared = simt::shared_memory() + simt::num_threads() / kWarp * own_copy;
    // Opaque, since the compiler would keep the address of every piece in a register, and registers are scarce.
    return pieces.at(simt::opaque(scratch == nullptr ? shared : scratch + sequence * stride));
  }
};

inline Ring ring_of(Arena& arena, const Items& items, const Cut& cut) {
  if (cut.num_slots == 0) return {nullptr, nullptr, 0, 0, false};
  const int64_t slots = int64_t{cut.num_slots} * cut.warps;
  const bool stay = !cut.measured && int64_t{cut.num_slots} * cut.all_warps >= items.most;
  return {arena.take<char>(slots * items.bytes), arena.take<simt::Arrival>(slots), cut.num_slots, items.bytes, stay};
}

// By a warp: writes to the same place in every block of the cluster.
template <class T>
SPECDEC_DEVICE void publish(T* place, T value) {
  if (simt::blocks_in_cluster() == 1) {  // the memory may be scratch, which in_block cannot map
    if (simt::thread() % kWarp == 0) simt::write(place, value);
    return;
  }
  for (int block = simt::thread() % kWarp; block < simt::blocks_in_cluster(); block += kWarp) {
    simt::write(simt::in_block(place, block), value);
  }
}

// By one thread: writes to the same place in block 0.
template <class T>
SPECDEC_DEVICE void write_to_first(T* place, T value) {
  simt::write(simt::blocks_in_cluster() == 1 ? place : simt::in_block(place, 0), value);
}

// By a warp: the first block of logits that has the row's largest one.
SPECDEC_DEVICE int block_of_max(const Blocks& blocks, float max) {
  Candidate first = 0;
  for (int i = simt::thread() % kWarp; i < blocks.n; i += kWarp) {
    if (simt::read(&blocks.max[i]) == max) first = Better()(first, candidate(1.0f, static_cast<uint32_t>(i)));
  }
  return static_cast<int>(index_of(simt::reduce(first, Better())));
}

// By a warp: the token of this block with the row's largest logit, the lowest id of a tie.
SPECDEC_DEVICE int64_t argmax(const Row& row, int block, float max) {
  float x[kEach];
  load_block(row, block, x);
  Candidate best = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    if (x[i] == max) best = Better()(best, candidate(1.0f, static_cast<uint32_t>(place_of(i))));
  }
  return int64_t{block} * kBlock + index_of(simt::reduce(best, Better()));
}

// Draws have two levels. First, all warps of the cluster choose the same block of logits by the blocks' masses
// (race_among). Then the thread block that keeps these logits draws one of them, since the others may have ended.

// By the threads of a block: draws a token of this block of logits, -1 if that is -1. The warps divide the tokens among
// them: weigh(part, weights) computes the weights of a warp's. `memory`: [warps]
template <class Weigh>
SPECDEC_DEVICE int64_t draw_by(int block, Noise noise, Stream stream, Candidate* memory, const Place& place,
                               const Weigh& weigh) {
  if (block < 0) return -1;
  const Part part = Part::of(place.warp, place.warps);
  float weights[kEach];
  weigh(part, weights);
  const Candidate mine = race_in_block(weights, block, noise, stream, 0, part);
  if (place.lane0()) simt::write(&memory[place.warp], mine);
  simt::sync_block();
  return index_of(best_of(memory, place.warps));
}

// The same: draws one of the kept tokens.
SPECDEC_DEVICE int64_t draw(const Row& row, const Blocks& blocks, int block, float inverse_temperature, float cutoff,
                            Noise noise, Stream stream, Candidate* memory, const Place& place) {
  return draw_by(block, noise, stream, memory, place, [&](Part part, float (&weights)[kEach]) {
    load_block(row, block, weights);
    weights_above(weights, simt::read(&blocks.max[block]), inverse_temperature, cutoff, part);
  });
}

// By a warp: its part of a row's one-level race.
SPECDEC_DEVICE Candidate race_of_row(const Row& row, const Blocks& blocks, float max, float inverse_temperature,
                                     float cutoff, Noise noise, const Place& place) {
  Candidate best = 0;
  for (int block = place.first_after(row.first_item); block < blocks.n; block += place.all_warps) {
    const float of_block = simt::read(&blocks.max[block]);
    if (of_block < cutoff || !can_beat(best, weight_of(of_block, max, inverse_temperature))) continue;
    float x[kEach];
    load_block(row, block, x);
    weights_above(x, max, inverse_temperature, cutoff);
    best = row.d2t == nullptr ? race_in_block(x, block, noise, kRace, best)
                              : race_by_target_ids(x, block, row.d2t, noise, best);
  }
  return best;
}

}  // namespace specdec::cuda
