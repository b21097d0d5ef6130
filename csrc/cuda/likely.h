// The most likely of a row's kept tokens (the lowest ids of a tie), in ascending order.
#pragma once

#include "draws.h"
#include "select.h"

namespace specdec::cuda {

constexpr int kMostLikely = 1024;  // MAX_WIDTH of specdec_kernels.types

struct LikelyMemory {
  float logit[kMostLikely];  // of the slots
  uint32_t token[kMostLikely];
};

// Of this thread's eight neighbouring tokens from x[i] on: how many lie above `cutoff` (low half of the result) and how
// many at it (high half).
SPECDEC_DEVICE uint32_t counts(const float (&x)[kEach], int i, float cutoff) {
  uint32_t found = 0;
  for (int e = 0; e < kVector; ++e) found += x[i + e] > cutoff ? 1u : x[i + e] == cutoff ? 0x10000u : 0u;
  return found;
}

// By the threads of a block: fills the slots with the tokens above a finite `cutoff` and the first ones at it, `size`
// at most. `above`, `at`: scratch, [blocks] each. Returns the number of slots filled.
SPECDEC_DEVICE int fill_slots(const Row& row, const Blocks& blocks, float cutoff, int size, uint32_t* above,
                              uint32_t* at, LikelyMemory* memory) {
  const int warp = simt::thread() / kWarp, warps = simt::num_threads() / kWarp, lane = simt::thread() % kWarp;
  for (int block = warp; block < blocks.n; block += warps) {
    uint32_t found = 0;
    if (simt::read(&blocks.max[block]) >= cutoff) {
      float x[kEach];
      load_block(row, block, x);
#pragma unroll
      for (int i = 0; i < kEach; i += kVector) found += counts(x, i, cutoff);
    }
    const uint32_t all_above = simt::reduce(found & 0xffffu, [](uint32_t a, uint32_t b) { return a + b; });
    const uint32_t all_at = simt::reduce(found >> 16, [](uint32_t a, uint32_t b) { return a + b; });
    if (lane == 0) simt::write(&above[block], all_above), simt::write(&at[block], all_at);
  }
  simt::sync_block();
  uint32_t total_above = 0, total_at = 0;
  for (int block = 0; block < blocks.n; ++block) {
    total_above += simt::read(&above[block]), total_at += simt::read(&at[block]);
  }
  const uint32_t ties = static_cast<uint32_t>(size) - total_above < total_at ? size - total_above : total_at;
  for (int block = warp; block < blocks.n; block += warps) {
    if (!(simt::read(&blocks.max[block]) >= cutoff)) continue;
    uint32_t before_above = 0, before_at = 0;
    for (int other = 0; other < block; ++other) {
      before_above += simt::read(&above[other]), before_at += simt::read(&at[other]);
    }
    float x[kEach];
    load_block(row, block, x);
#pragma unroll
    for (int i = 0; i < kEach; i += kVector) {
      uint32_t all;
      const uint32_t before = sum_before(counts(x, i, cutoff), &all);
      uint32_t mine_above = before_above + (before & 0xffffu), mine_at = before_at + (before >> 16);
      for (int e = 0; e < kVector; ++e) {
        const bool is_above = x[i + e] > cutoff, is_tie = x[i + e] == cutoff && mine_at < ties;
        if (is_above || is_tie) {
          const uint32_t slot = mine_above + (mine_at < ties ? mine_at : ties);
          simt::write(&memory->logit[slot], x[i + e]);
          simt::write(&memory->token[slot], static_cast<uint32_t>(block * kBlock + place_of(i + e)));
        }
        mine_above += is_above, mine_at += x[i + e] == cutoff;
      }
      before_above += all & 0xffffu, before_at += all >> 16;
    }
  }
  simt::sync_block();
  return static_cast<int>(total_above + ties);
}

}  // namespace specdec::cuda
