// The first arrivals of a flat race over a row's tokens: draws without replacement, by the blocks of a cluster.
//
// Every pass over the row computes the same scores anew, since a row of them would need memory. The first one counts
// them by their exponents. It shows above which score there are enough, and, in nearly all rows, hardly twice as many,
// which the last pass lists. In between, the bin that holds the last arrival is divided until the list has room.
#pragma once

#include "draws.h"
#include "select.h"

namespace specdec::cuda {

constexpr int kMostArrivals = 2048;

struct ArrivalsMemory {
  uint32_t counts[kBins * kCopies];  // of this block's candidates, the best bin first; lanes use different copies
  uint32_t sums[kBins];              // the same, added up
  uint32_t size;                     // of the list
  uint32_t bin, above, inside;       // the bin of the last arrival; candidates before it, and in it
  Candidate list[kMostArrivals];
};

// The candidates from `low` on, `size` of them, in 256 equal bins. `above`: how many are beyond.
struct CandidateBins {
  Candidate low = 0, size = Candidate{1} << 63;  // no score has the highest bit
  int shift = 55;                                // a bin is 2^shift candidates; at first, one exponent
  uint32_t above = 0;

  SPECDEC_HD bool has(Candidate x) const { return x - low < size; }
  SPECDEC_HD int bin(Candidate x) const { return kBins - 1 - static_cast<int>((x - low) >> shift); }
  // The smallest one in a bin.
  SPECDEC_HD Candidate first_of(uint32_t bin) const { return low + (Candidate{kBins - 1 - bin} << shift); }
};

// By a warp: calls found(candidate) for all of its blocks' candidates that are at least `low`.
template <class Found>
SPECDEC_DEVICE void for_candidates(const Row& row, const Blocks& blocks, float max, Distribution q, Noise noise,
                                   Candidate low, const Place& place, const Found& found) {
#pragma unroll 1
  for (int block = place.first_after(row.first_item); block < blocks.n; block += place.all_warps) {
    const float of_block = simt::read(&blocks.max[block]);
    if (of_block < q.cutoff || !can_beat(low, weight_of(of_block, max, q.inverse_temperature))) continue;
    float x[kEach];
    load_block(row, block, x);
    weights_above(x, max, q.inverse_temperature, q.cutoff);
#pragma unroll
    for (int i = 0; i < kEach; i += 4) {
      float largest = x[i];
      for (int k = 1; k < 4; ++k) largest = x[i + k] > largest ? x[i + k] : largest;
      if (!can_beat(low, largest)) continue;
      const uint32_t index = static_cast<uint32_t>(block) * kBlock + static_cast<uint32_t>(place_of(i));
      const Words words = philox(noise.seed, index / 4, noise.position, noise.offset, kDraftToken);
      for (int k = 0; k < 4; ++k) {
        const Candidate its = candidate(score(x[i + k], exponential(uniform(words.word[k]))), index + k);
        if (its != 0 && its >= low) found(its);
      }
    }
  }
}

// By a warp, when all blocks of the cluster have counted: finds the bin of the last of `width` arrivals.
SPECDEC_DEVICE void find_last_bin(ArrivalsMemory* memory, uint32_t before, uint32_t width) {
  constexpr int each = kBins / kWarp;
  const int lane = simt::thread() % kWarp;
  uint32_t counts[each], mine = 0;
#pragma unroll
  for (int i = 0; i < each; ++i) {
    counts[i] = 0;
    for (int block = 0; block < simt::blocks_in_cluster(); ++block) {
      const uint32_t* sums = simt::blocks_in_cluster() == 1 ? memory->sums : simt::in_block(memory->sums, block);
      counts[i] += simt::read(&sums[lane * each + i]);
    }
    mine += counts[i];
  }
  uint32_t all;
  uint32_t sum = before + sum_before(mine, &all);
  const uint32_t reached = simt::ballot(sum + mine >= width);
  // The first lane whose bins reach the width; if all have fewer, the last bin.
  if (reached == 0 ? lane != kWarp - 1 : (reached & (0u - reached)) != 1u << lane) return;
  int found = 0;
#pragma unroll
  for (int i = 0; i < each; ++i) {
    if (found == i && i + 1 < each && sum + counts[i] < width) sum += counts[i], ++found;
  }
  uint32_t inside = 0;
#pragma unroll
  for (int i = 0; i < each; ++i) inside = i == found ? counts[i] : inside;
  simt::write(&memory->bin, static_cast<uint32_t>(lane * each + found));
  simt::write(&memory->above, sum), simt::write(&memory->inside, inside);
}

// By the whole cluster: lists, in each block's memory, its candidates among which the first `width` arrivals are. All
// lists together have at most kMostArrivals of them. Ends with a barrier.
SPECDEC_DEVICE void list_arrivals(const Row& row, const Blocks& blocks, float max, Distribution q, Noise noise,
                                  uint32_t width, ArrivalsMemory* memory, const Place& place) {
  CandidateBins bins;
  Candidate least = 0;
  if (simt::thread() == 0) simt::write(&memory->size, 0u);
  for (int i = simt::thread(); i < kBins * kCopies; i += simt::num_threads()) simt::write(&memory->counts[i], 0u);
  simt::sync_block();
  simt::arrive_only();
#pragma unroll 1
  for (bool lists = false;;) {
    for_candidates(row, blocks, max, q, noise, least, place, [&](Candidate its) {
      if (lists) {
        simt::write(&memory->list[simt::add(&memory->size, 1)], its);
      } else if (bins.has(its)) {
        simt::add(&memory->counts[bins.bin(its) * kCopies + simt::thread() % kCopies], 1);
      }
    });
    simt::wait_cluster();  // all blocks run, and have read the former sums
    if (lists) break;
    simt::sync_block();
    for (int bin = simt::thread(); bin < kBins; bin += simt::num_threads()) {
      uint32_t sum = 0;
      for (int i = bin * kCopies; i < (bin + 1) * kCopies; ++i) {
        sum += simt::read(&memory->counts[i]), simt::write(&memory->counts[i], 0u);
      }
      simt::write(&memory->sums[bin], sum);
    }
    simt::sync_cluster();
    if (place.warp == 0) find_last_bin(memory, bins.above, width);
    simt::sync_block();
    const uint32_t above = simt::read(&memory->above), inside = simt::read(&memory->inside);
    bins.low = least = bins.first_of(simt::read(&memory->bin));
    bins.above = above;
    lists = above + inside <= kMostArrivals;
    bins.size = Candidate{1} << bins.shift;
    bins.shift = bins.shift > 8 ? bins.shift - 8 : 0;
    simt::arrive_cluster();
  }
  simt::sync_cluster();
}

// By the threads of block 0: adds the lists of the other blocks to its own, and returns its size.
SPECDEC_DEVICE int gather_arrivals(ArrivalsMemory* memory) {
  int size = static_cast<int>(simt::read(&memory->size));
  for (int block = 1; block < simt::blocks_in_cluster(); ++block) {
    const ArrivalsMemory* its = simt::in_block(memory, block);
    const int more = static_cast<int>(simt::read(&its->size));
    for (int i = simt::thread(); i < more; i += simt::num_threads()) {
      simt::write(&memory->list[size + i], simt::read(&its->list[i]));
    }
    size += more;
  }
  return size;
}

// By the threads of a block: sorts a list, the largest first. It must have room for the next power of two.
SPECDEC_DEVICE void sort_falling(Candidate* list, int size) {
  int n = 1;
  while (n < size) n *= 2;
  for (int i = size + simt::thread(); i < n; i += simt::num_threads()) simt::write(&list[i], Candidate{0});
  simt::sync_block();
#pragma unroll 1
  for (int sorted = 2; sorted <= n; sorted *= 2) {
#pragma unroll 1
    for (int distance = sorted / 2; distance > 0; distance /= 2) {
      for (int i = simt::thread(); i < n / 2; i += simt::num_threads()) {
        const int at = 2 * i - (i & (distance - 1));
        const Candidate a = simt::read(&list[at]), b = simt::read(&list[at + distance]);
        if ((a < b) == ((at & sorted) == 0)) simt::write(&list[at], b), simt::write(&list[at + distance], a);
      }
      simt::sync_block();
    }
  }
}

}  // namespace specdec::cuda
