// Draws from rows whose blocks are known; and what kernels share: pieces of shared memory, words to a whole cluster.
#pragma once

#include "../core/accept.h"
#include "draws.h"
#include "ring.h"

namespace specdec::cuda {

constexpr int kThreads = 384;       // of a block, at most: each holds a share of a block of logits in 168 registers
constexpr int kSplitThreads = 256;  // where a launch is split
// What a kernel is compiled for: before clusters, all launches are split.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int kMostThreads = kSplitThreads;
#else
constexpr int kMostThreads = kThreads;
#endif

SPECDEC_HD int blocks_of(int64_t vocabulary) { return static_cast<int>((vocabulary + kBlock - 1) / kBlock); }
SPECDEC_HD int block_bytes(const LogitRows& rows) { return kBlock * static_cast<int>(size_in_bytes(rows.dtype)); }

// Whether every block of all rows is aligned, its end too.
SPECDEC_HD bool aligned(const LogitRows& rows) {
  const uint64_t all = reinterpret_cast<uintptr_t>(rows.data) | static_cast<uint64_t>(rows.sequence_stride) |
                       static_cast<uint64_t>(rows.row_stride) |
                       static_cast<uint64_t>(rows.vocabulary * size_in_bytes(rows.dtype));
  return all % sizeof(Bytes16) == 0;
}

// What a sequence's blocks of logits are, and how many it may have.
struct Items {
  int64_t most;
  int bytes;     // of the largest one
  bool aligned;  // all of them
  int own_copy;  // bytes that a warp needs for a block of its own, or 0
};

// As Row::own_copy has it, where all that is aligned is copied.
SPECDEC_HD int own_copy_of(const SamplingArguments& sampling, bool lists, bool aligned, int bytes) {
  return sampling.has_table || sampling.filters != nullptr || lists ? kBlock * static_cast<int>(sizeof(float))
         : aligned                                                  ? 0
                                                                    : bytes;
}

// How blocks of threads are cut.
struct Cut {
  int warps;      // of a block
  int all_warps;  // of a cluster
  int num_slots;  // of a warp: copies ahead; 0 where items are not aligned
};

// What a kernel is told. A launch is fused, with a sequence's memory shared by the blocks of its cluster; or it is
// split in two, with that memory in `scratch`: many blocks measure a sequence's rows, and one decides.
template <class Params, class Memory>
struct Work {
  Params params;
  Memory pieces;   // of a sequence's memory, from address 0 on
  int own_copy;    // bytes: Items
  char* scratch;   // null: shared memory
  int64_t stride;  // bytes of it a sequence
  int blocks;      // that measure a sequence, where it is split

  // Shared memory begins with the warps' own copies.
  SPECDEC_DEVICE char* place_for_copy() const { return simt::shared_memory() + simt::thread() / kWarp * own_copy; }
  SPECDEC_DEVICE Memory memory(int64_t sequence) const {
    char* shared = simt::shared_memory() + simt::num_threads() / kWarp * own_copy;
    // Opaque, or the compiler keeps every piece's address in registers of which there are few.
    return pieces.at(simt::opaque(scratch == nullptr ? shared : scratch + sequence * stride));
  }
};

inline Ring ring_of(Arena& arena, const Items& items, const Cut& cut) {
  if (cut.num_slots == 0) return {nullptr, nullptr, 0, 0, false};
  const int64_t slots = int64_t{cut.num_slots} * cut.warps;
  const bool stay = int64_t{cut.num_slots} * cut.all_warps >= items.most;
  return {arena.take<char>(slots * items.bytes), arena.take<simt::Arrival>(slots), cut.num_slots, items.bytes, stay};
}

// By a warp: to the same place in every block of the cluster.
template <class T>
SPECDEC_DEVICE void publish(T* place, T value) {
  if (simt::blocks_in_cluster() == 1) {  // whose memory may be scratch
    if (simt::thread() % kWarp == 0) simt::write(place, value);
    return;
  }
  for (int block = simt::thread() % kWarp; block < simt::blocks_in_cluster(); block += kWarp) {
    simt::write(simt::in_block(place, block), value);
  }
}

// By one thread: to the same place in block 0.
template <class T>
SPECDEC_DEVICE void write_to_first(T* place, T value) {
  simt::write(simt::blocks_in_cluster() == 1 ? place : simt::in_block(place, 0), value);
}

// By a warp: the token of the largest logit, the lowest of a tie.
SPECDEC_DEVICE int64_t argmax(const Row& row, const Blocks& blocks, float max) {
  Candidate first = 0;
  for (int i = simt::thread() % kWarp; i < blocks.n; i += kWarp) {
    if (simt::read(&blocks.max[i]) == max) first = Better()(first, candidate(1.0f, static_cast<uint32_t>(i)));
  }
  const int block = static_cast<int>(index_of(simt::reduce(first, Better())));
  float x[kEach];
  load_block(row, block, x);
  Candidate best = 0;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    if (x[i] == max) best = Better()(best, candidate(1.0f, static_cast<uint32_t>(place_of(i))));
  }
  return int64_t{block} * kBlock + index_of(simt::reduce(best, Better()));
}

// By a warp: a token of the kept ones, in two levels.
SPECDEC_DEVICE int64_t draw(const Row& row, const Blocks& blocks, float inverse_temperature, float cutoff, Noise noise,
                            Stream block_stream, Stream token_stream) {
  const int block = static_cast<int>(race_among(blocks.mass, blocks.n, noise, block_stream));
  if (block < 0) return -1;
  float x[kEach];
  load_block(row, block, x);
  weights_above(x, simt::read(&blocks.max[block]), inverse_temperature, cutoff);
  return index_of(race_in_block(x, block, noise, token_stream, 0));
}

// By a warp: its part of a row's flat race.
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
