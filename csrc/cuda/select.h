// The cutoff of top-k, top-p and min-p, found by the threads of a block without sorting. An interval that holds the
// cutoff becomes smaller and smaller: a histogram says which of its bins the cutoff is in, and the next interval is
// between the smallest and the largest logit in that bin, until these are equal. The first bins are linear in the
// logits, so that flat and peaked rows spread over them, and the next ones in the logits' bits, so that few histograms
// suffice whatever the logits are. As soon as a list has room for the logits of the interval, the row is not read any
// more. A cheap lower bound leaves few candidates in most rows.
//
// Masses are integers, so the order of additions does not matter.
#pragma once

#include "bins.h"

namespace specdec::cuda {

constexpr int kListed = 2 * kBins * kCopies;
constexpr int kMostWarps = 32;
// The integer mass of the largest logit. The masses of 4 million tokens add up to less than 2^64.
constexpr float kUnit = 0x1p42f;
constexpr float kLowestFinite = -0x1.fffffep127f;

struct SelectionMemory {
  uint32_t sums[2 * kBins];                         // a histogram
  float smallest[kMostWarps], largest[kMostWarps];  // of the logits that a warp saw in an interval
  float share, most;                                // wanted: a share of all candidates, or `most` if that is less
  float sum;                                        // of the weights of all, or 0 if that must be counted
  uint64_t left;                                    // what the bin that was found must contribute
  uint32_t bin;                                     // the bin that was found
  uint32_t size;                                    // number of listed logits, which may be more than the list holds
  float bound;
  uint32_t list[kListed];  // logits in any order; before they fit, the copies of a histogram
};

// The sum over the lanes before this one; `all` gets the sum over all lanes.
template <class T>
SPECDEC_DEVICE T sum_before(T mine, T* all) {
  const int lane = simt::thread() % kWarp;
  T sum = mine;
  for (int distance = 1; distance < kWarp; distance *= 2) {
    const T other = simt::shuffle(sum, lane >= distance ? lane - distance : lane);
    if (lane >= distance) sum += other;
  }
  *all = simt::shuffle(sum, kWarp - 1);
  return sum - mine;
}

// A row and its candidates: the tokens with logits >= `low`, except -inf.
struct Selection {
  const Row& row;
  const Blocks& blocks;
  float max, inverse_temperature;
  SelectionMemory* memory;
  float low = -INFINITY;
  bool listed = false;  // whether the list has all candidates

  // By the threads of a block together: calls function(logit) for all that are listed.
  template <class Function>
  SPECDEC_DEVICE void for_list(const Function& function) const {
    const int size = static_cast<int>(simt::read(&memory->size));
    for (int i = simt::thread(); i < size; i += simt::num_threads()) function(as_float(simt::read(&memory->list[i])));
  }

  // By the threads of a block together: calls function(logits) for the blocks of logits that reach `lowest`.
  template <class Function>
  SPECDEC_DEVICE void for_blocks(float lowest, const Function& function) const {
    for (int block = simt::thread() / kWarp; block < blocks.n; block += simt::num_threads() / kWarp) {
      if (!(simt::read(&blocks.max[block]) >= lowest)) continue;
      float x[kEach];
      load_block(row, block, x);
      function(x);
    }
  }

  // The smallest and the largest of the logits in an interval. Lists these logits, unless `in_list` says that they
  // are, and sets it if they fit.
  SPECDEC_DEVICE Interval gather(Interval interval, bool* in_list) const {
    Interval mine = {INFINITY, -INFINITY};
    if (*in_list) {
      for_list([&](float logit) {
        if (interval.has(logit)) mine.include(logit);
      });
    } else {
      if (simt::thread() == 0) simt::write(&memory->size, 0u);
      simt::sync_block();
      for_blocks(interval.low, [&](const float (&x)[kEach]) {
        uint32_t inside = 0;
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
          if (interval.has(x[i])) inside |= 1u << i, mine.include(x[i]);
        }
        list(x, inside);
      });
    }
    const int warp = simt::thread() / kWarp, warps = simt::num_threads() / kWarp, lane = simt::thread() % kWarp;
    const auto smaller = [](float a, float b) { return a < b ? a : b; };
    const auto larger = [](float a, float b) { return a > b ? a : b; };
    mine = {simt::reduce(mine.low, smaller), simt::reduce(mine.high, larger)};
    if (lane == 0) simt::write(&memory->smallest[warp], mine.low), simt::write(&memory->largest[warp], mine.high);
    simt::sync_block();
    const int other = lane < warps ? lane : 0;
    mine = {simt::reduce(simt::read(&memory->smallest[other]), smaller),
            simt::reduce(simt::read(&memory->largest[other]), larger)};
    *in_list = *in_list || simt::read(&memory->size) <= kListed;
    simt::sync_block();
    return mine;
  }

  // By a warp: adds those of its logits to the list that have a bit in `inside`.
  SPECDEC_DEVICE void list(const float (&x)[kEach], uint32_t inside) const {
    uint32_t all, place = 0;
    const uint32_t before = sum_before(simt::count_bits(inside), &all);
    if (all == 0) return;
    if (simt::thread() % kWarp == 0) place = simt::add(&memory->size, all);
    place = simt::shuffle(place, 0);
    if (place + all > kListed) return;
    place += before;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (inside >> i & 1u) simt::write(&memory->list[place++], as_bits(x[i]));
    }
  }

  // Makes the histogram of an interval: of the logits' masses or, if not `masses`, of their number.
  SPECDEC_DEVICE void count(const Bins& bins, bool in_list, bool masses) const {
    const Histogram<1> sums = {memory->sums};
    const Histogram<kCopies> copies = {memory->list};
    const auto add = [&](const auto& histogram, float logit) {
      if (!bins.interval.has(logit)) return;
      const float mass = masses ? weight_of(logit, max, inverse_temperature) * kUnit : 1.0f;
      histogram.add(bins.bin(logit), static_cast<uint64_t>(mass));
    };
    if (in_list) {
      sums.clear();
      simt::sync_block();
      for_list([&](float logit) { add(sums, logit); });
    } else {
      copies.clear();
      simt::sync_block();
      for_blocks(bins.interval.low, [&](const float (&x)[kEach]) {
#pragma unroll
        for (int i = 0; i < kEach; ++i) add(copies, x[i]);
      });
      simt::sync_block();
      for (int bin = simt::thread(); bin < kBins; bin += simt::num_threads()) sums.set(bin, copies.sum(bin));
    }
    simt::sync_block();
  }

  // What the candidates at or above the cutoff amount to. `all`: what all candidates in the histogram do.
  SPECDEC_DEVICE uint64_t wanted_of(uint64_t all, bool masses) const {
    const float sum = masses ? simt::read(&memory->sum) : 0.0f, most = simt::read(&memory->most);
    const double amount =
        simt::read(&memory->share) * (sum > 0.0f ? double{sum} * double{kUnit} : static_cast<double>(all));
    return static_cast<uint64_t>(amount < most ? amount : double{most});
  }

  // By a warp: finds the first bin that is not empty and at which the sum reaches what is wanted; the last that is not
  // empty, if rounding has made all less than that. Stores the bin, and what is left to it. `first`: what
  // is wanted is still to be computed.
  SPECDEC_DEVICE void find_bin(bool first, bool masses) const {
    constexpr int each = kBins / kWarp;
    const Histogram<1> sums = {memory->sums};
    const int lane = simt::thread() % kWarp;
    uint64_t mine = 0, all;
    for (int i = 0; i < each; ++i) mine += sums.sum(lane * each + i);
    uint64_t sum = sum_before(mine, &all), before = sum;
    const uint64_t left = first ? wanted_of(all, masses) : simt::read(&memory->left);
    int found = -1;
    for (int i = 0; i < each && (found < 0 || sum < left); ++i) {
      const uint64_t of_bin = sums.sum(lane * each + i);
      if (of_bin == 0) continue;
      found = lane * each + i, before = sum, sum += of_bin;
    }
    const uint32_t reached = simt::ballot(found >= 0 && sum >= left), filled = simt::ballot(found >= 0);
    simt::sync_warp();  // all lanes have read what was left
    if (reached != 0 ? (reached & (0u - reached)) != 1u << lane : filled >> lane != 1u) return;
    simt::write(&memory->bin, static_cast<uint32_t>(found));
    simt::write(&memory->left, left > before ? left - before : 0);
  }

  // The largest logit such that the candidates at or above it amount to a share of those >= `lowest`, in masses or in
  // number, or to `most` if that is less.
  SPECDEC_DEVICE float select(float lowest, bool masses, float share, float most) {
    Interval interval = {lowest > low ? lowest : low, max};
    if (interval.low == -INFINITY) interval.low = kLowestFinite;
    bool in_list = listed;
    if (simt::thread() == 0) simt::write(&memory->share, share), simt::write(&memory->most, most);
#pragma unroll 1
    for (bool first = true;; first = false) {
      interval = gather(interval, &in_list);
      if (first && lowest <= low) listed = in_list;
      if (!(interval.low < interval.high)) return interval.low;
      const Bins bins = Bins::of(interval, first);
      count(bins, in_list, masses);
      if (simt::thread() < kWarp) find_bin(first, masses);
      simt::sync_block();
      interval = bins.interval_of(simt::read(&memory->bin));
    }
  }

  // A lower bound of the k-th largest logit: the k-th largest of the blocks' maxima.
  SPECDEC_DEVICE float bound_of(int64_t k) const {
    if (k > blocks.n) return -INFINITY;
    for (int i = simt::thread(); i < blocks.n; i += simt::num_threads()) {
      const float mine = simt::read(&blocks.max[i]);
      int rank = 0;
      for (int other = 0; other < blocks.n; ++other) {
        const float its = simt::read(&blocks.max[other]);
        rank += its > mine || (its == mine && other < i);
      }
      if (rank == k - 1) simt::write(&memory->bound, mine);
    }
    simt::sync_block();
    const float bound = simt::read(&memory->bound);
    simt::sync_block();
    return bound;
  }
};

struct Filters {
  float top_k, top_p, min_p;

  SPECDEC_HD bool any() const { return top_k > 0.0f || top_p < 1.0f || min_p > 0.0f; }
};

SPECDEC_DEVICE Filters filters_of(const SamplingArguments& sampling, int64_t b) {
  if (sampling.filters == nullptr) return {0.0f, 1.0f, 0.0f};
  return {sampling.filters[3 * b], sampling.filters[3 * b + 1], sampling.filters[3 * b + 2]};
}

struct Cutoffs {
  float kept;    // the smallest logit that the filters keep
  float likely;  // the smallest logit of the most likely tokens among these
};

// The cutoffs of a row whose largest logit is finite. `sum`: of all weights relative to it; `likely`: how many most
// likely tokens are wanted, or 0.
SPECDEC_DEVICE Cutoffs cutoffs_of(Selection& selection, int64_t likely, float temperature, float sum) {
  // Read again where they are needed, since registers are scarce.
  const auto filters = [&] { return filters_of(*selection.row.sampling, selection.row.b); };
  const auto of_min_p = [&] {
    const float min_p = filters().min_p;
    return min_p > 0.0f ? min_p_cutoff(selection.max, temperature, min_p) : -INFINITY;
  };
  const bool counts = filters().top_k > 0.0f, weighs = filters().top_p < 1.0f;
  Cutoffs found = {-INFINITY, -INFINITY};
  if (counts || (!weighs && likely > 0)) {
    selection.low = selection.bound_of(counts ? static_cast<int64_t>(filters().top_k) : likely);
  } else if (weighs) {
    // All logits below this one together weigh less than 1 - top_p, so none of them is kept. Allows for rounding.
    const float share = (1.0f - filters().top_p) * sum / static_cast<float>(selection.row.size);
    selection.low = selection.max + logf(share) * temperature;
    selection.low -= 1e-5f * (1.0f + fabsf(selection.low));
    selection.low = selection.low < selection.max ? selection.low : selection.max;
  }
  if (counts || weighs || likely > 0) {
    // Without top-k, top_p is a share of the whole row, including what the bound left out.
    if (simt::thread() == 0) simt::write(&selection.memory->sum, counts ? 0.0f : sum);
#pragma unroll 1
    for (int pass = counts ? 0 : weighs ? 1 : 2; pass < (likely > 0 ? 3 : 2); ++pass) {
      if (pass == 1 && !weighs) continue;
      const float share = pass == 1 ? filters().top_p : 1.0f;
      const float most = pass == 0 ? filters().top_k : pass == 1 ? INFINITY : static_cast<float>(likely);
      const float of_others = pass == 2 ? of_min_p() : -INFINITY;
      const float lowest = of_others > found.kept ? of_others : found.kept;
      const float cutoff = selection.select(lowest, pass == 1, share, most);
      (pass == 2 ? found.likely : found.kept) = cutoff;
    }
  }
  const float least = of_min_p();
  found.kept = least > found.kept ? least : found.kept;
  return found;
}

}  // namespace specdec::cuda
