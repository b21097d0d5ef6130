// Plans the launch of an operation: plain arithmetic on a machine's properties, which needs no GPU.
#pragma once

#include <algorithm>
#include <array>

#include "row_draws.h"

namespace specdec::cuda {

constexpr int kMostBlocks = 16;  // in a cluster; more than 8 only where the GPU can place them
constexpr int kAhead = 4;        // slots of a warp whose items do not all fit
constexpr int kSplitWarps = kSplitThreads / kWarp;
// What a launch takes besides reading its items (to begin, the cluster's barriers, the decision), counted in items that
// a thread block reads meanwhile. An H200 took 16 us for it, and 0.07 us for an item (docs/cuda.md).
constexpr int kItemsOfDecision = 224;

// A split launch uses shared memory for own copies only, within the 48 KiB that need no opting in.
static_assert(kSplitWarps * kBlock * 4 <= 48 * 1024);

// What a device offers to a kernel.
struct Machine {
  int multiprocessors;
  bool has_clusters;                        // if not, what follows is not set
  int64_t shared_memory, half_of_it;        // bytes for a block that has a whole multiprocessor, or half of one
  std::array<int, kMostBlocks + 1> places;  // [n]: how many clusters of n blocks, one per multiprocessor, run at once
};

// How many blocks measure a sequence into scratch: as many as keep the machine busy.
inline int measuring_blocks(const Machine& machine, int64_t batch, const Items& items) {
  const int64_t wanted = (machine.multiprocessors + batch - 1) / batch;
  return static_cast<int>(std::min(wanted, (items.most + kSplitWarps - 1) / kSplitWarps));
}

// A launch of clusters; with 0 blocks there is none, since a sequence needs more memory than they have.
struct Plan {
  int blocks, threads, num_slots;
  int64_t shared;  // bytes a block
};

// The plan that finishes soonest, or that with `asked` blocks in a cluster. cut_memory(cut) cuts a sequence's memory
// and returns its size in bytes; the last call is made with the plan's own cut.
template <class CutMemory>
Plan plan_of(const Machine& machine, int64_t batch, const Items& items, const CutMemory& cut_memory, int asked = 0) {
  if (!machine.has_clusters) return {};
  // With more sequences than multiprocessors, two share one: while one decides, the other one measures.
  const bool many = batch > machine.multiprocessors;
  const int warps = many ? items.warps / 2 : items.warps;
  int blocks = 1;
  double soonest = 0.0;
  for (int n = 1; !many && n <= kMostBlocks && (n - 1) * warps < items.most; ++n) {
    if (machine.places[n] == 0 || (asked > 0 && n != asked)) continue;
    const int64_t waves = (batch + machine.places[n] - 1) / machine.places[n];
    const double time = static_cast<double>(waves) * (kItemsOfDecision + static_cast<double>(items.most) / n);
    if (soonest == 0.0 || time < soonest) blocks = n, soonest = time;
  }
  const int64_t limit = many ? machine.half_of_it : machine.shared_memory;
  const auto shared_with = [&](int num_slots) {
    return warps * items.own_copy + cut_memory(Cut{warps, blocks * warps, num_slots});
  };
  const int64_t without = shared_with(0);
  if (without > limit) return {};
  const int all_warps = blocks * warps;
  const int64_t a_slot = warps * (items.bytes + static_cast<int64_t>(sizeof(simt::Arrival))) + 16;
  const int64_t fit = (limit - without) / a_slot, all = (items.most + all_warps - 1) / all_warps;
  const int num_slots = static_cast<int>(all <= fit ? all : std::min<int64_t>(fit, kAhead));
  return {blocks, warps * kWarp, num_slots, shared_with(num_slots)};
}

}  // namespace specdec::cuda
