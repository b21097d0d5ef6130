// Of a row with filters, the candidates for what is kept: a lower bound of the cutoff, from the largest logits of the
// blocks' parts, and a list of the logits that reach it. Only the parts that reach it are read.
#pragma once

#include "bins.h"

namespace specdec::cuda {

constexpr uint32_t kListed = 2 * kBins * kCopies;
constexpr uint32_t kFew = 256;  // candidates that are ranked
// Rows of less weight, relative to the largest logit, are tried with few candidates for top-p. No row is decided
// otherwise because of it, but flat ones would be read once more.
constexpr float kPeaked = 32.0f;
constexpr int kTried = 160;  // how many parts are read then
// The integer mass of the largest logit. The masses of 4 million tokens add up to less than 2^64.
constexpr float kUnit = 0x1p42f;
constexpr float kLowestFinite = -0x1.fffffep127f;

struct alignas(16) Selection {
  uint32_t list[kListed];               // logits in any order; before they fit, the copies of a histogram
  uint32_t block[kFew];                 // of listed logits, if they are few
  float sorted[kFew], its_block[kFew];  // the few, the largest first, and their blocks of logits
  uint32_t sums[2 * kBins];             // a histogram
  RowStats row;                         // before filters
  uint32_t smallest[kMostWarps], largest[kMostWarps];  // keys of the logits that a warp saw in an interval
  uint64_t left;                                       // what the bin that was found must contribute
  uint32_t bin;                                        // the bin that was found
  uint32_t reaching;                                   // number of units that reach the bound
  uint32_t size;                                       // number of listed logits, which may be more than the list holds
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

// By a warp: the first of so many places for this thread, of which `taken` counts those that have an owner.
SPECDEC_DEVICE uint32_t take_places(uint32_t* taken, uint32_t mine) {
  uint32_t all, first = 0;
  const uint32_t before = sum_before(mine, &all);
  if (all == 0) return 0;
  if (cuda::lane() == 0) first = simt::add(taken, all);
  return simt::shuffle(first, 0) + before;
}

struct SelectMemory {
  Selection* selection;
  float *parts, *tops;  // largest logits of the blocks' parts, and of the blocks
  int32_t* units;       // that reach the bound

  SPECDEC_HD static SelectMemory cut(Arena& arena, int n) {
    return {arena.take<Selection>(1), arena.take<float>(n * kParts), arena.take<float>(n),
            arena.take<int32_t>(n * kParts)};
  }
};

struct Filters {
  float top_k, top_p, min_p;

  SPECDEC_DEVICE static Filters of(const SamplingArguments& sampling, int64_t b) {
    return {sampling.filters[3 * b], sampling.filters[3 * b + 1], sampling.filters[3 * b + 2]};
  }
  SPECDEC_DEVICE bool any() const { return top_k > 0.0f || top_p < 1.0f || min_p > 0.0f; }
};

// A row and its candidates: the tokens with logits >= `low`, except -inf. It is read in units: parts of blocks, or
// blocks where masks, bias and penalties take a warp.
template <class Rows>
struct Candidates : SelectMemory {
  static constexpr int kUnits = Rows::kAny ? 1 : kParts, kLanes = kWarp / kUnits;
  const Row& row;
  int n;  // blocks
  Filters filters;
  Temperature temperature;
  float max = 0.0f;
  float sum = 0.0f;  // of the weights of all that top-p counts, or 0 if that is what top-k keeps
  float low = kLowestFinite;

  SPECDEC_DEVICE bool counts() const { return filters.top_k > 0.0f; }
  SPECDEC_DEVICE bool weighs() const { return filters.top_p < 1.0f; }
  SPECDEC_DEVICE float top(int unit) const { return simt::read(Rows::kAny ? &tops[unit] : &parts[unit]); }
  SPECDEC_DEVICE int size() const { return static_cast<int>(simt::read(&selection->size)); }
  SPECDEC_DEVICE float listed(int i) const { return as_float(simt::read(&selection->list[i])); }

  // What a logit counts for.
  SPECDEC_DEVICE uint64_t amount_of(float logit, bool masses) const {
    return masses ? static_cast<uint64_t>(weight_of(logit, max, temperature.scale) * kUnit) : 1;
  }

  // What the candidates at or above the cutoff amount to. `all`: what all candidates do.
  SPECDEC_DEVICE uint64_t wanted_of(uint64_t all, bool masses) const {
    const double share = sum > 0.0f ? double{sum} * double{kUnit} : static_cast<double>(all);
    const double amount = masses ? double{filters.top_p} * share : double{filters.top_k};
    return static_cast<uint64_t>(masses || amount < static_cast<double>(all) ? amount : static_cast<double>(all));
  }

  SPECDEC_DEVICE float least() const {
    return filters.min_p > 0.0f ? min_p_cutoff(max, temperature.value, filters.min_p) : -INFINITY;
  }

  // ---- Bounds, and what reaches them

  // A lower bound of the k-th largest logit: that of the bin in which the k-th largest of the parts' largest is.
  SPECDEC_DEVICE float bound_of(uint32_t k) const {
    constexpr int each = kBins / kWarp;
    const Bins bins = Bins::of(extremes(), true);
    const bool spreads = bins.scale > 0.0f;
#pragma unroll 1
    for (int i = simt::thread(); i < n * kParts; i += simt::num_threads()) {
      const float part = simt::read(&parts[i]);
      if (part > -INFINITY) {
        simt::add(&selection->sums[spreads ? bins.bin(part) : 0], 1);
      }
    }
    simt::sync_block();
    const int first = lane() * each;
    uint32_t mine = 0, all_parts;
    for (int i = 0; i < each; ++i) mine += simt::read(&selection->sums[first + i]);
    const uint32_t before = sum_before(mine, &all_parts);
    if (all_parts < k) return kLowestFinite;
    uint32_t bins_before = 0;
    for (uint32_t i = 0, reached = before; i < each; ++i) {
      reached += simt::read(&selection->sums[first + i]);
      bins_before += reached < k;
    }
    if (!spreads) return bins.interval.low;
    // Allows for rounding.
    const float depth = 1.00001f * static_cast<float>(simt::total(bins_before) + 1) / bins.scale;
    const float edge = bins.interval.high - depth - 1e-6f * (fabsf(bins.interval.high) + depth);
    return edge > bins.interval.low ? edge : bins.interval.low;
  }

  // All logits below this one together weigh less than 1 - top_p, so none of them is kept. Allows for rounding.
  SPECDEC_DEVICE float bound_of_top_p() const {
    const float below = max + logf((1.0f - filters.top_p) * sum / static_cast<float>(row.size)) * temperature.value;
    const float bound = below - 1e-5f * (1.0f + fabsf(below));
    return bound < max ? bound > kLowestFinite ? bound : kLowestFinite : max;
  }

  // By the threads of a block: finds the units that reach the bound. Ends with a barrier.
  SPECDEC_DEVICE void find_units() const {
    uint32_t mine = 0;
#pragma unroll 1
    for (int unit = simt::thread(); unit < n * kUnits; unit += simt::num_threads()) mine += top(unit) >= low;
    uint32_t place = take_places(&selection->reaching, mine);
#pragma unroll 1
    for (int unit = simt::thread(); unit < n * kUnits; unit += simt::num_threads()) {
      if (top(unit) >= low) simt::write(&units[place++], unit);
    }
    simt::sync_block();
  }

  // By the threads of a block together: calls function(logits, block) for the units that reach `lowest`, by warps.
  template <class Function>
  SPECDEC_DEVICE void for_units(float lowest, const Function& function) const {
    const int reaching = static_cast<int>(simt::read(&selection->reaching));
#pragma unroll 1
    for (int first = warp() * kUnits; first < reaching; first += num_warps() * kUnits) {
      const int at = first + lane() / kLanes, unit = simt::read(&units[at < reaching ? at : first]);
      const bool there = at < reaching && top(unit) >= lowest;
      if (simt::ballot(there) == 0) continue;
      if constexpr (Rows::kAny) {
        function(Rows::load(row, unit), unit);
      } else {
        const int block = unit / kUnits;
        function(Rows::load(row, block, there ? row.left(block) : 0, unit % kUnits * kLanes + lane() % kLanes), block);
      }
    }
  }

  // By a warp: adds those of its logits to the list that have a bit in `inside`. `one`: of a thread, if it has one.
  SPECDEC_DEVICE void list(const typename Rows::Block& x, int block, uint32_t inside, float one) const {
    const uint32_t number = simt::count_bits(inside);
    uint32_t place = take_places(&selection->size, number);
    if (place + number > kListed) return;
    const bool few = place + number <= kFew;
    const auto add = [&](float logit) {
      if (few) simt::write(&selection->block[place], static_cast<uint32_t>(block));
      simt::write(&selection->list[place++], as_bits(logit));
    };
    if (number == 1) add(one);
    if (number <= 1) return;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (inside >> i & 1u) add(x[i]);
    }
  }

  // By the threads of a block: the smallest and the largest of the logits in an interval, by extremes(). Lists these
  // logits, unless the list has them. Ends with a barrier.
  SPECDEC_DEVICE void gather(Interval interval, bool in_list) const {
    Interval mine;
    if (in_list) {
#pragma unroll 1
      for (int i = simt::thread(); i < size(); i += simt::num_threads()) {
        if (interval.has(listed(i))) mine.include(listed(i));
      }
    } else {
      for_units(interval.low, [&](const auto& x, int block) {
        uint32_t inside = 0;
        Interval its;
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
          if (interval.has(x[i])) inside |= 1u << i, its.include(x[i]);
        }
        mine = {fminf(mine.low, its.low), fmaxf(mine.high, its.high)};
        list(x, block, inside, its.low);
      });
    }
    write_extremes(mine);
    simt::sync_block();
  }

  SPECDEC_DEVICE void write_extremes(Interval mine) const {
    const uint32_t smallest = ~simt::largest(~ordered_key(mine.low)), largest = simt::largest(ordered_key(mine.high));
    if (lane() != 0) return;
    simt::write(&selection->smallest[warp()], smallest), simt::write(&selection->largest[warp()], largest);
  }

  SPECDEC_DEVICE Interval extremes() const {
    const int of = lane() < num_warps() ? lane() : 0;
    return {from_ordered_key(~simt::largest(~simt::read(&selection->smallest[of]))),
            from_ordered_key(simt::largest(simt::read(&selection->largest[of])))};
  }
};

}  // namespace specdec::cuda
