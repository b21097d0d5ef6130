// Rule `block` only, between measuring and deciding: the masses of the residuals that decide how far drafts are kept.
// Of eight rows, these are 1.3 on average: none up to the last prefix whose joint ratio is 1, and none whose draft
// fails whatever the mass is.
#pragma once

#include "sequence.h"

namespace specdec::cuda {

constexpr int kSumsThreads = 256;

// Grid: parts of a row, sequences.
template <class Rows>
SPECDEC_KERNEL(sums_kernel, kSumsThreads,
               (Rows::kAny     ? 1
                : Rows::kSmall ? 4
                               : 2),
               Work) {
  simt::start_next_launch();
  const Sequence<Rows> s(params, params.first + simt::block_y(), simt::block_x());
  s.look_at_drafts();
  simt::wait_for_launch_before();
  if (s.greedy()) return;
  s.merge_rows(s.limit, true);
  const int warps = num_warps(), part = simt::block_x() * warps + warp();
  s.for_doubtful(s.surely_kept(), [&](int j, float w, float) {
    if (s.examined(j).state != kRecover) return;
#pragma unroll 1
    for (int block = part; block < params.n; block += simt::blocks_x() * warps) {
      const float mass = s.residual_mass(j, w, block);
      if (lane() == 0) {
        simt::write(&params.masses(s.b, j)[block], mass);
      }
    }
  });
}

}  // namespace specdec::cuda
