// How the launch of an operation is cut: arithmetic on what a machine has, without a GPU.
#pragma once

#include <algorithm>
#include <array>

#include "row_draws.h"

namespace specdec::cuda {

constexpr int kMostBlocks = 16;  // of a cluster; more than 8 where the machine has a place for it
constexpr int kAhead = 4;        // slots of a warp that has more items than there is room for
constexpr int kWarps = kThreads / kWarp, kSplitWarps = kSplitThreads / kWarp;

// Own copies are all the shared memory of a launch that is split, on machines that were not asked for more.
static_assert(kSplitWarps * kBlock * 4 <= 48 * 1024);

// What a device has for a kernel.
struct Machine {
  int multiprocessors;
  bool has_clusters;                        // and what follows
  int64_t shared_memory, half_of_it;        // bytes, of a block that has a multiprocessor or half of one
  std::array<int, kMostBlocks + 1> places;  // clusters of so many blocks that run at once, a multiprocessor each block
};

// Of a fused launch; no blocks: it must be split.
struct Plan {
  int blocks, threads, num_slots;
  int64_t shared;  // bytes a block
};

// As many blocks to a sequence as finish soonest. cut_memory(cut): cuts a sequence's memory and says how many bytes it
// is; its last call is that of the plan.
template <class CutMemory>
Plan plan_of(const Machine& machine, int64_t batch, const Items& items, const CutMemory& cut_memory) {
  if (!machine.has_clusters) return {0, 0, 0, 0};
  // More sequences than multiprocessors: two share one, so that one decides while the other one measures.
  const bool many = batch > machine.multiprocessors;
  const int warps = many ? kWarps / 2 : kWarps;
  int blocks = 1;
  double soonest = 0.0;
  for (int n = 1; !many && n <= kMostBlocks && (n - 1) * warps < items.most; ++n) {
    if (machine.places[n] == 0) continue;
    const int64_t waves = (batch + machine.places[n] - 1) / machine.places[n];
    const double time = static_cast<double>(waves) / n;
    if (soonest == 0.0 || time < soonest) blocks = n, soonest = time;
  }
  const int64_t limit = many ? machine.half_of_it : machine.shared_memory;
  const auto shared_with = [&](int num_slots) {
    return warps * items.own_copy + cut_memory(Cut{warps, blocks * warps, num_slots});
  };
  const int64_t without = shared_with(0);
  if (without > limit) return {0, 0, 0, 0};
  int num_slots = 0;
  if (items.aligned) {
    const int64_t a_slot = warps * (items.bytes + static_cast<int64_t>(sizeof(simt::Arrival))) + 16;
    const int64_t fit = (limit - without) / a_slot, all = (items.most + blocks * warps - 1) / (blocks * warps);
    num_slots = static_cast<int>(all <= fit ? all : std::min<int64_t>(fit, kAhead));
  }
  return {blocks, warps * kWarp, num_slots, shared_with(num_slots)};
}

}  // namespace specdec::cuda
