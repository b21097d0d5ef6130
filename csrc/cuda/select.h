// With filters, between measuring and deciding: the cutoff of top-k, top-p and min-p, the masses of what they keep, and
// lse. A block of threads takes a row.
//
// Nothing is sorted. An interval that holds the cutoff becomes smaller and smaller: a histogram says which of its bins
// the cutoff is in, and the next interval is between the smallest and the largest logit in that bin, until these are
// equal. The first bins are linear in the logits, so that flat and peaked rows spread over them, and the next ones in
// the logits' bits, so that few histograms suffice whatever the logits are. As soon as a list has room for the logits
// of the interval, the row is not read any more. A cheap lower bound leaves few candidates in most rows.
//
// Masses are integers, so the order of additions does not matter.
#pragma once

#include "bins.h"

namespace specdec::cuda {

constexpr int kSelectThreads = 256;
constexpr int kListed = 2 * kBins * kCopies;
constexpr uint32_t kFew = 256;  // of listed logits
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
  uint32_t reach[2][kMostWarps];                    // how many logits a warp found to reach a bound
  uint32_t list[kListed];                           // logits in any order; before they fit, the copies of a histogram
};

// The sum over the lanes before this one; `all` gets the sum over all lanes.
template <class T>
SPECDEC_DEVICE T sum_before(T mine, T* all) {
  const int lane = cuda::lane();
  T sum = mine;
  for (int distance = 1; distance < kWarp; distance *= 2) {
    const T other = simt::shuffle(sum, lane >= distance ? lane - distance : lane);
    if (lane >= distance) sum += other;
  }
  *all = simt::shuffle(sum, kWarp - 1);
  return sum - mine;
}

// A row and its candidates: the tokens with logits >= `low`, except -inf.
template <class Rows>
struct Selection {
  const Row& row;
  int n;  // blocks
  float max, scale;
  SelectionMemory* memory;
  const float *parts, *tops;  // largest logits of the blocks' parts, and of the blocks, in shared memory
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
#pragma unroll 1
    for (int block = warp(); block < n; block += num_warps()) {
      if (!(simt::read(&tops[block]) >= lowest)) continue;
      function(Rows::load(row, block));
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
      for_blocks(interval.low, [&](const auto& x) {
        uint32_t inside = 0;
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
          if (interval.has(x[i])) inside |= 1u << i, mine.include(x[i]);
        }
        list(x, inside);
      });
    }
    const int warp = cuda::warp(), warps = num_warps(), lane = cuda::lane();
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
  SPECDEC_DEVICE void list(const typename Rows::Block& x, uint32_t inside) const {
    uint32_t all, place = 0;
    const uint32_t before = sum_before(static_cast<uint32_t>(simt::count_bits(inside)), &all);
    if (all == 0) return;
    if (cuda::lane() == 0) place = simt::add(&memory->size, all);
    place = simt::shuffle(place, 0);
    if (place + all > kListed) return;
    place += before;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (inside >> i & 1u) simt::write(&memory->list[place++], as_bits(x[i]));
    }
  }

  // What a logit counts for.
  SPECDEC_DEVICE uint64_t amount_of(float logit, bool masses) const {
    return masses ? static_cast<uint64_t>(weight_of(logit, max, scale) * kUnit) : 1;
  }

  // Makes the histogram of an interval: of the logits' masses or, if not `masses`, of their number.
  SPECDEC_DEVICE void count(const Bins& bins, bool in_list, bool masses) const {
    const Histogram<1> sums = {memory->sums};
    const Histogram<kCopies> copies = {memory->list};
    const auto add = [&](const auto& histogram, float logit) {
      if (!bins.interval.has(logit)) return;
      histogram.add(bins.bin(logit), amount_of(logit, masses));
    };
    if (in_list) {
      sums.clear();
      simt::sync_block();
      for_list([&](float logit) { add(sums, logit); });
    } else {
      copies.clear();
      simt::sync_block();
      for_blocks(bins.interval.low, [&](const auto& x) {
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
    const int lane = cuda::lane();
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
      if (first && in_list && simt::read(&memory->size) <= kFew) return select_listed(interval, masses);
      const Bins bins = Bins::of(interval, first);
      count(bins, in_list, masses);
      if (simt::thread() < kWarp) find_bin(first, masses);
      simt::sync_block();
      interval = bins.interval_of(simt::read(&memory->bin));
    }
  }

  // The same of an interval of a short list: every thread sums what lies above its logit.
  SPECDEC_DEVICE float select_listed(Interval interval, bool masses) const {
    const int size = static_cast<int>(simt::read(&memory->size));
    float least = INFINITY;
#pragma unroll 1
    for (int i = simt::thread(); i < size; i += simt::num_threads()) {
      const float mine = as_float(simt::read(&memory->list[i]));
      uint64_t above = 0, all = 0;
#pragma unroll 1
      for (int other = 0; other < size; ++other) {
        const float its = as_float(simt::read(&memory->list[other]));
        const uint64_t amount = interval.has(its) ? amount_of(its, masses) : 0;
        all += amount, above += its > mine ? amount : 0;
      }
      const uint64_t wanted = wanted_of(all, masses);
      const bool kept = interval.has(mine) && amount_of(mine, masses) > 0 && above < (wanted > 0 ? wanted : 1);
      least = kept && mine < least ? mine : least;
    }
    const auto smaller = [](float a, float b) { return a < b ? a : b; };
    least = simt::reduce(least, smaller);
    if (cuda::lane() == 0) simt::write(&memory->smallest[cuda::warp()], least);
    simt::sync_block();
    least = simt::reduce(cuda::lane() < num_warps() ? simt::read(&memory->smallest[cuda::lane()]) : INFINITY, smaller);
    simt::sync_block();
    return least;
  }

  // A lower bound of the k-th largest logit: the k-th largest of the parts' largest, to 16 bits.
  SPECDEC_DEVICE float bound_of(uint32_t k) const {
    const uint32_t all = static_cast<uint32_t>(n * kParts);
    if (k > all) return -INFINITY;
    uint32_t key = 0;
    int turn = 0;
#pragma unroll 1
    for (uint32_t bit = 1u << 31; bit >= 1u << 16; bit /= 2, turn ^= 1) {
      uint32_t reach = 0;
      for (uint32_t i = simt::thread(); i < all; i += simt::num_threads()) {
        reach += ordered_key(simt::read(&parts[i])) >= (key | bit);
      }
      reach = simt::total(reach);
      if (cuda::lane() == 0) simt::write(&memory->reach[turn][cuda::warp()], reach);
      simt::sync_block();  // one is enough, as there are two places in turn
      if (simt::total(cuda::lane() < num_warps() ? simt::read(&memory->reach[turn][cuda::lane()]) : 0) >= k) key |= bit;
    }
    return from_ordered_key(key);
  }
};

// The smallest logit that the filters keep, of a row whose largest is finite. `sum`: of all weights relative to it.
template <class Rows>
SPECDEC_DEVICE float cutoff_of(Selection<Rows>& selection, Filters filters, float temperature, float sum) {
  const bool counts = filters.top_k > 0.0f, weighs = filters.top_p < 1.0f;
  float kept = -INFINITY;
  if (counts) {
    selection.low = selection.bound_of(static_cast<uint32_t>(filters.top_k));
  } else if (weighs) {
    // All logits below this one together weigh less than 1 - top_p, so none of them is kept. Allows for rounding.
    const float share = (1.0f - filters.top_p) * sum / static_cast<float>(selection.row.size);
    selection.low = selection.max + logf(share) * temperature;
    selection.low -= 1e-5f * (1.0f + fabsf(selection.low));
    selection.low = selection.low < selection.max ? selection.low : selection.max;
  }
  // Without top-k, top_p is a share of the whole row, including what the bound left out.
  if (simt::thread() == 0) simt::write(&selection.memory->sum, counts ? 0.0f : sum);
#pragma unroll 1
  for (int pass = counts ? 0 : 1; pass < (weighs ? 2 : 1); ++pass) {
    kept = selection.select(kept, pass == 1, pass == 1 ? filters.top_p : 1.0f, pass == 0 ? filters.top_k : INFINITY);
  }
  const float least = filters.min_p > 0.0f ? min_p_cutoff(selection.max, temperature, filters.min_p) : -INFINITY;
  return least > kept ? least : kept;
}

struct SelectMemory {
  SelectionMemory* selection;
  RowStats* row;
  float *parts, *tops;

  SPECDEC_HD static SelectMemory cut(Arena& arena, int n) {
    return {arena.take<SelectionMemory>(1), arena.take<RowStats>(1), arena.take<float>(n * kParts),
            arena.take<float>(n)};
  }
};

// Grid: rows, sequences.
template <class Rows, class Work>
SPECDEC_KERNEL(select_kernel, kSelectThreads,
               (Rows::kAny     ? 1
                : Rows::kSmall ? 3
                               : 2),
               Work) {
  simt::start_next_launch();
  const int i = simt::block_x(), n = params.blocks(i), warp = cuda::warp();
  const int64_t b = params.first + simt::block_y();
  const SamplingArguments& sampling = params.params.sampling;
  const float temperature = sampling.temperature[b],
              inverse_temperature = temperature == 0.0f ? 0.0f : 1.0f / temperature;
  const float scale = inverse_temperature * kLog2e;
  const Filters filters = filters_of(sampling, b);
  const Row row = params.row(b, i);
  const Scratch& scratch = params.scratch;
  Stats* stats = scratch.stats + params.place(b, i);
  RowStats* out = &scratch.rows[b * params.rows() + i];
  Arena arena(simt::shared_memory());
  const SelectMemory memory = SelectMemory::cut(arena, n);
  simt::wait_for_launch_before();
  if (!params.used(b, i)) return;
  for (int block = simt::thread(); block < n; block += simt::num_threads()) {
    simt::write(&memory.tops[block], simt::fresh(&stats[block]).max);
  }
  for (int part = simt::thread(); part < n * kParts; part += simt::num_threads()) {
    simt::write(&memory.parts[part], simt::fresh(&scratch.parts[params.place(b, i) * kParts + part]));
  }
  if (warp == 0) {
    const RowStats found = merged(stats, n, inverse_temperature, scale);
    if (simt::thread() == 0) simt::write(memory.row, found);
  }
  simt::sync_block();
  RowStats found = simt::read(memory.row);
  if (temperature == 0.0f || !filters.any() || row_fault(found.max) != 0) {
    if (simt::thread() == 0) simt::write(out, found);
    return;
  }
  Selection<Rows> selection = {row, n, found.max, scale, memory.selection, memory.parts, memory.tops};
  const float cutoff = cutoff_of(selection, filters, temperature, found.sum);
#pragma unroll 1
  for (int block = warp; block < n; block += num_warps()) {
    const float top = simt::read(&memory.tops[block]);
    float kept = 0.0f;
    if (top >= cutoff) {
      const auto x = Rows::load(row, block);
      kept = sum_of_weights([&](int k) { return x[k] >= cutoff ? x[k] : -INFINITY; }, top, scale);
    }
    if (lane() == 0) simt::write(&stats[block], Stats{top, kept});
  }
  simt::sync_block();
  if (warp != 0) return;
  found = merged(stats, n, inverse_temperature, scale);
  found.cutoff = cutoff;
  if (simt::thread() == 0) simt::write(out, found);
}

}  // namespace specdec::cuda
