// Plans the launch of an operation: plain arithmetic on a machine's properties, which needs no GPU.
#pragma once

#include <algorithm>
#include <array>

#include "row_draws.h"

namespace specdec::cuda {

constexpr int kMostBlocks = 16;  // in a cluster; more than 8 only where the GPU can place them
constexpr int kAhead = 4;        // slots of a warp whose items do not all fit
// Of a row, for each block of the cluster, if rows are decided one by one: an H100's multiprocessor reads as much in
// the microsecond that a decision takes.
constexpr int64_t kLeastBytes = 24 * 1024;
constexpr int kNearRows = 3;  // how many decisions' rows are near: of what is read after a rejection, nothing is used
constexpr int kSplitWarps = kSplitThreads / kWarp;

// A split launch uses shared memory for own copies only, within the 48 KiB that need no opting in.
static_assert(kSplitWarps * kBlock * 4 <= 48 * 1024);

// What a device offers to a kernel.
struct Machine {
  int multiprocessors;
  bool has_clusters;                        // if not, what follows is not set
  int64_t shared_memory, half_of_it;        // bytes for a block that has a whole multiprocessor, or half of one
  std::array<int, kMostBlocks + 1> places;  // [n]: how many clusters of n blocks, one per multiprocessor, run at once
};

// How many blocks measure a sequence in a split launch: as many as keep the machine busy. `dependent`: they leave a
// multiprocessor to each sequence's deciding block, whose registers do not fit beside theirs.
inline int measuring_blocks(const Machine& machine, int64_t batch, const Items& items, bool dependent) {
  const int64_t theirs = machine.multiprocessors - (dependent ? batch : 0);
  const int64_t wanted = dependent ? std::max<int64_t>(theirs / batch, 1) : (theirs + batch - 1) / batch;
  return static_cast<int>(std::min(wanted, (items.most + kSplitWarps - 1) / kSplitWarps));
}

// A fused launch; with 0 blocks, the launch must be split.
struct Plan {
  int blocks, threads, num_slots;
  int64_t shared;  // bytes a block
  bool by_rows;    // each row is decided before the rows that do not fit are read
};

// The plan that finishes soonest. cut_memory(cut) cuts a sequence's memory and returns its size in bytes; the last call
// is made with the plan's own cut.
template <class CutMemory>
Plan plan_of(const Machine& machine, int64_t batch, const Items& items, const CutMemory& cut_memory) {
  if (!machine.has_clusters) return {};
  // With more sequences than multiprocessors, two share one: while one decides, the other one measures.
  const bool many = batch > machine.multiprocessors;
  const int warps = many ? items.warps / 2 : items.warps;
  int blocks = 1;
  double soonest = 0.0;
  for (int n = 1; !many && n <= kMostBlocks && (n - 1) * warps < items.most; ++n) {
    if (machine.places[n] == 0) continue;
    const int64_t waves = (batch + machine.places[n] - 1) / machine.places[n];
    const double time = static_cast<double>(waves) / n;
    if (soonest == 0.0 || time < soonest) blocks = n, soonest = time;
  }
  const int64_t limit = many ? machine.half_of_it : machine.shared_memory;
  const auto shared_with = [&](int num_slots, bool by_rows = false) {
    return warps * items.own_copy + cut_memory(Cut{warps, blocks * warps, num_slots, by_rows});
  };
  const int64_t without = shared_with(0);
  if (without > limit) return {};
  const int all_warps = blocks * warps;
  const int64_t a_slot = warps * (items.bytes + static_cast<int64_t>(sizeof(simt::Arrival))) + 16;
  const int64_t fit = (limit - without) / a_slot, all = (items.most + all_warps - 1) / all_warps;
  const bool long_enough = items.of_row * items.bytes >= kLeastBytes * blocks;
  const bool near = slots_hold(static_cast<int>(fit), items.rows, items.of_row, all_warps);
  if (items.rows > 0 && !many && all > fit && long_enough && near) {
    const int64_t wanted = slots_of(kNearRows * items.rows, items.of_row, all_warps);
    const int num_slots = static_cast<int>(std::min(fit, wanted));
    return {blocks, warps * kWarp, num_slots, shared_with(num_slots, true), true};
  }
  const int num_slots = static_cast<int>(all <= fit ? all : std::min<int64_t>(fit, kAhead));
  return {blocks, warps * kWarp, num_slots, shared_with(num_slots), false};
}

}  // namespace specdec::cuda
