// With filters, between measuring and deciding: the cutoff of top-k, top-p and min-p, the masses of what they keep, and
// lse. A block of threads takes a row.
//
// A lower bound from the largest logits of the blocks' parts leaves few candidates in most rows. Only the parts that
// reach it are read. If the candidates are few, they are ranked, and all that is wanted follows from their list. Else
// an interval that holds the cutoff becomes smaller and smaller: a histogram says which of its bins the cutoff is in,
// and the next interval is between the smallest and the largest logit in that bin, until these are equal. The first
// bins are linear in the logits, so that flat and peaked rows spread over them, and the next ones in the logits' bits,
// so that few histograms suffice whatever the logits are. As soon as a list has room for the logits of the interval,
// the row is not read any more.
//
// Masses are integers, so the order of additions does not matter.
#pragma once

#include "few.h"

namespace specdec::cuda {

constexpr int kSelectThreads = 256;

// ---- Many candidates

// Makes the histogram of an interval: of the logits' masses or, if not `masses`, of their number.
template <class Rows>
SPECDEC_DEVICE void count(const Candidates<Rows>& its, const Bins& bins, bool in_list, bool masses) {
  const Histogram<1> sums = {its.selection->sums};
  const Histogram<kCopies> copies = {its.selection->list};
  const auto add = [&](const auto& histogram, float logit) {
    if (!bins.interval.has(logit)) return;
    histogram.add(bins.bin(logit), its.amount_of(logit, masses));
  };
  if (in_list) {
    sums.clear();
    simt::sync_block();
#pragma unroll 1
    for (int i = simt::thread(); i < its.size(); i += simt::num_threads()) add(sums, its.listed(i));
  } else {
    copies.clear();
    simt::sync_block();
    its.for_units(bins.interval.low, [&](const auto& x, int) {
#pragma unroll
      for (int i = 0; i < kEach; ++i) add(copies, x[i]);
    });
    simt::sync_block();
    for (int bin = simt::thread(); bin < kBins; bin += simt::num_threads()) sums.set(bin, copies.sum(bin));
  }
  simt::sync_block();
}

// By a warp: finds the first bin that is not empty and at which the sum reaches what is wanted; the last that is not
// empty, if rounding has made all less than that. Stores the bin, and what is left to it. `first`: what
// is wanted is still to be computed.
template <class Rows>
SPECDEC_DEVICE void find_bin(const Candidates<Rows>& its, bool first, bool masses) {
  constexpr int each = kBins / kWarp;
  const Histogram<1> sums = {its.selection->sums};
  const int lane = cuda::lane();
  uint64_t mine = 0, all;
  for (int i = 0; i < each; ++i) mine += sums.sum(lane * each + i);
  uint64_t sum = sum_before(mine, &all), before = sum;
  const uint64_t left = first ? its.wanted_of(all, masses) : simt::read(&its.selection->left);
  int found = -1;
  for (int i = 0; i < each && (found < 0 || sum < left); ++i) {
    const uint64_t of_bin = sums.sum(lane * each + i);
    if (of_bin == 0) continue;
    found = lane * each + i, before = sum, sum += of_bin;
  }
  const uint32_t reached = simt::ballot(found >= 0 && sum >= left), filled = simt::ballot(found >= 0);
  simt::sync_warp();  // all lanes have read what was left
  if (reached != 0 ? (reached & (0u - reached)) != 1u << lane : filled >> lane != 1u) return;
  simt::write(&its.selection->bin, static_cast<uint32_t>(found));
  simt::write(&its.selection->left, left > before ? left - before : 0);
}

// ---- All together

// By the threads of a block: the cutoff; NaN if all results are written.
template <class Rows>
SPECDEC_DEVICE float cutoff_of(Candidates<Rows>& its, Stats* stats, RowStats* out) {
  bool tries = !its.counts() && its.weighs() && its.filters.top_p * its.sum <= kPeaked;
  if (its.counts() || tries) {
    const int some = its.n * kParts / 2 < kTried ? its.n * kParts / 2 : kTried;
    its.low = its.bound_of(its.counts() ? static_cast<uint32_t>(its.filters.top_k) : some);
  } else {
    its.low = its.weighs() ? its.bound_of_top_p() : its.least() > kLowestFinite ? its.least() : kLowestFinite;
  }
  Interval interval = {its.low, its.max};
  // `opens`: the units that reach the bound are not known. `masses`: the cutoff of top-p is looked for, else that of
  // top-k. `first`: no histogram was made for it.
  bool opens = true, in_list = false, has_all = false, masses = !its.counts(), first = true;
#pragma unroll 1
  while (true) {
    if (opens) its.find_units();
    its.gather(interval, in_list);
    const uint32_t size = simt::read(&its.selection->size);
    in_list = in_list || size <= kListed;
    if (opens) {
      if (size <= kFew && decide_few(its, tries, stats, out)) return NAN;
      opens = tries, has_all = in_list;
      if (!its.counts() && !its.weighs()) return its.least();
    }
    if (tries) {
      tries = in_list = false;
      its.low = its.bound_of_top_p();
      interval = {its.low, its.max};
    } else {
      interval = its.extremes();
      if (interval.low < interval.high) {
        const Bins bins = Bins::of(interval, first);
        count(its, bins, in_list, masses);
        if (warp() == 0) find_bin(its, first, masses);
        simt::sync_block();
        first = false;
        interval = bins.interval_of(simt::read(&its.selection->bin));
      } else if (masses || !its.weighs()) {
        return interval.low > its.least() ? interval.low : its.least();
      } else {  // top-p of what top-k keeps
        interval = {interval.low, its.max};
        masses = first = true, in_list = has_all;
      }
    }
    simt::sync_block();
    if (simt::thread() == 0 && !in_list) simt::write(&its.selection->size, 0u);
    if (simt::thread() == 0 && opens) simt::write(&its.selection->reaching, 0u);
    simt::sync_block();
  }
}

// Grid: rows, sequences.
template <class Rows>
SPECDEC_KERNEL(select_kernel, kSelectThreads,
               (Rows::kAny     ? 1
                : Rows::kSmall ? 3
                               : 2),
               Work) {
  simt::start_next_launch();
  const int i = simt::block_x(), n = params.blocks(i);
  const uint32_t b = params.first + simt::block_y();
  const Row row = params.row(b, i);
  const Scratch& scratch = params.scratch;
  Stats* stats = params.stats(b, i);
  const float* parts = scratch.parts + params.place(b, i, 0) * kParts;
  RowStats* out = &scratch.rows[params.place(b, i)];
  Arena arena(simt::shared_memory());
  Candidates<Rows> its = {SelectMemory::cut(arena, n), row, n, Filters::of(params.params.sampling, b),
                          params.temperature(b)};
  Selection* const selection = its.selection;
  for (int k = simt::thread(); k < kBins; k += simt::num_threads()) simt::write(&selection->sums[k], 0u);
  for (uint32_t k = simt::thread(); k < kFew; k += simt::num_threads()) {
    simt::write(&selection->list[k], as_bits(-INFINITY));
  }
  if (simt::thread() == 0) simt::write(&selection->reaching, 0u), simt::write(&selection->size, 0u);
  simt::wait_for_launch_before();
  if (!params.used(b, i)) return;
  for (int block = simt::thread(); block < n; block += simt::num_threads()) {
    simt::write(&its.tops[block], simt::fresh(&stats[block]).max);
  }
  Interval mine;
  for (int at = 4 * simt::thread(); at < n * kParts; at += 4 * simt::num_threads()) {
    const Four four = simt::fresh(reinterpret_cast<const Four*>(&parts[at]));
    simt::write(reinterpret_cast<Four*>(&its.parts[at]), four);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      if (four.of[k] > -INFINITY) mine.include(four.of[k]);
    }
  }
  its.write_extremes(mine);
  if (warp() == 0) {
    const RowStats found = merged(stats, n, its.temperature);
    if (lane() == 0) simt::write(&selection->row, found);
  }
  simt::sync_block();
  RowStats found = simt::read(&selection->row);
  if (its.temperature.greedy() || !its.filters.any() || found.fault(its.temperature) != 0) {
    if (simt::thread() == 0) simt::write(out, found);
    return;
  }
  its.max = found.max;
  // Without top-k, top_p is a share of the whole row, including what the bound left out.
  its.sum = its.counts() ? 0.0f : found.sum;
  const float cutoff = cutoff_of(its, stats, out);
  if (cutoff != cutoff) return;
#pragma unroll 1
  for (int block = warp(); block < n; block += num_warps()) {
    const float top = simt::read(&its.tops[block]);
    float kept = 0.0f;
    if (top >= cutoff) {
      const auto x = Rows::load(row, block);
      kept = sum_of_weights([&](int k) { return x[k] >= cutoff ? x[k] : -INFINITY; }, top, its.temperature.scale);
    }
    if (lane() == 0) simt::write(&stats[block], Stats{top, kept});
  }
  simt::sync_block();
  if (warp() != 0) return;
  found = merged(stats, n, its.temperature);
  found.cutoff = cutoff;
  if (simt::thread() == 0) simt::write(out, found);
}

}  // namespace specdec::cuda
