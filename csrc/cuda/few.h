// Few candidates: they are ranked, and all that is wanted of the row follows from their sorted list, so that it is not
// read once more. Masses are integers, so the order of additions does not matter; a block's sum is in the order of the
// ranks.
#pragma once

#include "candidates.h"

namespace specdec::cuda {

// By the threads of a block: ranks the listed candidates, and writes the results. If `tries`, it is not known that
// all that top-p keeps are among them, and false says that they are not.
template <class Rows>
SPECDEC_DEVICE bool decide_few(const Candidates<Rows>& its, bool tries, Stats* stats, RowStats* out) {
  Selection* const memory = its.selection;
  const int size = its.size();
  for_ranks<4>(reinterpret_cast<const float*>(memory->list), size, [&](int i, uint32_t rank) {
    simt::write(&memory->sorted[rank], its.listed(i));
    simt::write(&memory->its_block[rank], static_cast<float>(simt::read(&memory->block[i])));
  });
  if (size + simt::thread() < (size + 3) / 4 * 4) simt::write(&memory->its_block[size + simt::thread()], -1.0f);
  simt::sync_block();
  // Every warp does the same.
  const int each = (size + kWarp - 1) / kWarp, first = lane() * each;
  const int kth =
      its.counts() && its.filters.top_k < static_cast<float>(size) ? static_cast<int>(its.filters.top_k) : size;
  float cutoff = simt::read(&memory->sorted[kth - 1]);
  const auto sorted = [&](int i) { return first + i < size ? simt::read(&memory->sorted[first + i]) : -INFINITY; };
  const auto mass = [&](int i) { return sorted(i) >= cutoff ? its.amount_of(sorted(i), true) : 0; };
  const auto sum_of = [&] {
    uint64_t mine = 0;
#pragma unroll 1
    for (int i = 0; i < each; ++i) mine += mass(i);
    return mine;
  };
  if (its.weighs()) {
    uint64_t all, before = sum_before(sum_of(), &all);
    const uint64_t wanted = its.wanted_of(all, true);
    if (tries && all < wanted) return false;
    uint32_t kept = 0;
#pragma unroll 1
    for (int i = 0; i < each; ++i) kept += mass(i) > 0 && before < (wanted > 0 ? wanted : 1), before += mass(i);
    cutoff = simt::read(&memory->sorted[simt::total(kept) - 1]);
  }
  if (its.least() > cutoff || !(its.counts() || its.weighs())) cutoff = its.least();
  const uint64_t kept = simt::reduce(sum_of(), [](uint64_t a, uint64_t b) { return a + b; });
#pragma unroll 1
  for (int block = simt::thread(); block < its.n; block += simt::num_threads()) {
    const float top = simt::read(&its.tops[block]);
    float kept_of_block = 0.0f;
#pragma unroll 1
    for (int i = 0; i < size; i += 4) {
      const Four blocks = Four::at(&memory->its_block[i]);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        if (blocks.of[k] != static_cast<float>(block)) continue;
        const float logit = simt::read(&memory->sorted[i + k]);
        if (logit >= cutoff) kept_of_block += weight_of(logit, top, its.temperature.scale);
      }
    }
    simt::write(&stats[block], Stats{top, kept_of_block});
  }
  const float all = static_cast<float>(kept) / kUnit;
  if (simt::thread() == 0)
    simt::write(out, RowStats{its.max, lse_of(its.max, its.temperature.inverse, all), cutoff, all});
  return true;
}

}  // namespace specdec::cuda
