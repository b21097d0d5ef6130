// The cutoff of top-k, top-p and min-p, found by the threads of a block without sorting. Each pass makes a histogram of
// 256 bins over the next 8 bits of the logits' ordered keys, from the highest bits down, so four passes suffice
// whatever the logits are. A cheap lower bound leaves few candidates in most rows, and these are listed. If there are
// more than the list holds, every pass reads the row again. Masses are integers, so the order of additions does not
// matter.
#pragma once

#include "stats.h"

namespace specdec::cuda {

constexpr int kBins = 256;
constexpr int kListed = 2048;
// The integer mass of the largest logit. The masses of 4 million tokens add up to less than 2^64.
constexpr float kUnit = 0x1p42f;

struct SelectionMemory {
  uint64_t histogram[kBins];
  uint64_t wanted_left;  // what the bin that was found must contribute
  uint32_t size;         // number of candidates, which may be more than the list holds
  uint32_t bin;          // the bin that was found
  float bound;
  uint32_t unused;
  float logit[kListed];
  uint32_t block[kListed];
};

// A row and its candidates: the tokens with logits >= `low`, except -inf.
struct Selection {
  const Row& row;
  const Blocks& blocks;
  float max, inverse_temperature;
  SelectionMemory* memory;
  float low = -INFINITY;

  SPECDEC_DEVICE bool listed() const { return simt::read(&memory->size) <= kListed; }
  // What a candidate adds to a histogram: its mass, or 1.
  SPECDEC_DEVICE uint64_t amount(float logit, bool masses) const {
    return masses ? static_cast<uint64_t>(weight_of(logit, max, inverse_temperature) * kUnit) : 1;
  }

  // By the threads of a block together: calls function(logit, block) for every candidate.
  template <class Function>
  SPECDEC_DEVICE void for_each(bool from_list, const Function& function) const {
    if (from_list) {
      const int size = static_cast<int>(simt::read(&memory->size));
      for (int i = simt::thread(); i < size; i += simt::num_threads()) {
        function(simt::read(&memory->logit[i]), static_cast<int>(simt::read(&memory->block[i])));
      }
      return;
    }
    for (int block = simt::thread() / kWarp; block < blocks.n; block += simt::num_threads() / kWarp) {
      if (!(simt::read(&blocks.max[block]) >= low)) continue;
      float x[kEach];
      load_block(row, block, x);
      const float* own = to_own(row, x);  // from memory, so that the loop need not be unrolled
#pragma unroll 1
      for (int i = 0; i < kEach; ++i) {
        const float logit = simt::read(&own[i * kWarp + simt::thread() % kWarp]);
        if (logit >= low && logit > -INFINITY) function(logit, block);
      }
    }
  }

  SPECDEC_DEVICE void list() const {
    if (simt::thread() == 0) simt::write(&memory->size, 0u);
    simt::sync_block();
    for_each(false, [&](float logit, int block) {
      const uint32_t place = simt::add(&memory->size, 1u);
      if (place >= kListed) return;
      simt::write(&memory->logit[place], logit);
      simt::write(&memory->block[place], static_cast<uint32_t>(block));
    });
    simt::sync_block();
  }

  // Makes the histogram, over bits shift .. shift + 7 of the key, of the candidates >= `lowest` whose higher bits equal
  // those of `found`. With shift 32, all candidates are in bin 0.
  SPECDEC_DEVICE void count(bool from_list, float lowest, bool masses, int shift, uint32_t found) const {
    for (int bin = simt::thread(); bin < kBins; bin += simt::num_threads())
      simt::write(&memory->histogram[bin], uint64_t{0});
    simt::sync_block();
    for_each(from_list, [&](float logit, int) {
      const uint64_t key = ordered_key(logit);
      if (logit < lowest || (shift < 24 && (key ^ found) >> (shift + 8) != 0)) return;
      simt::add(&memory->histogram[key >> shift & 0xffu], amount(logit, masses));
    });
    simt::sync_block();
  }

  // The largest logit such that the candidates at or above it amount to `share` of all candidates >= `lowest`, or to
  // `wanted` if that is less. `known`: what all of them amount to, or 0 if that must be counted.
  SPECDEC_DEVICE float select(bool from_list, float lowest, bool masses, double known, double share,
                              double wanted) const {
    uint32_t found = 0;
    uint64_t left = 0;
#pragma unroll 1
    for (int shift = known > 0.0 ? 24 : 32; shift >= 0; shift -= 8) {
      count(from_list, lowest, masses, shift, found);
      if (shift == 32) {
        known = static_cast<double>(simt::read(&memory->histogram[0]));
        simt::sync_block();
        continue;
      }
      if (shift == 24) left = static_cast<uint64_t>(share * known < wanted ? share * known : wanted);
      if (simt::thread() < kWarp) find_bin(left);
      simt::sync_block();
      found |= simt::read(&memory->bin) << shift;
      left = simt::read(&memory->wanted_left);
      simt::sync_block();
    }
    return from_ordered_key(found);
  }

  // By a warp, whose threads have 8 bins each in descending order: finds the highest bin that is not empty and at which
  // the sum from above reaches `wanted`. Stores the bin, and what is wanted of it.
  SPECDEC_DEVICE void find_bin(uint64_t wanted) const {
    constexpr int each = kBins / kWarp;
    const int lane = simt::thread() % kWarp, top = kBins - 1 - lane * each;
    uint64_t mine = 0;
    for (int i = 0; i < each; ++i) mine += simt::read(&memory->histogram[top - i]);
    uint64_t above = mine;  // of this and the lanes before
    for (int distance = 1; distance < kWarp; distance *= 2) {
      const uint64_t other = simt::shuffle(above, lane >= distance ? lane - distance : lane);
      if (lane >= distance) above += other;
    }
    above -= mine;
    const uint32_t reached = simt::ballot(mine > 0 && above + mine >= wanted);
    if (reached == 0 || (reached & (0u - reached)) != 1u << lane) return;
    for (int i = 0; i < each; ++i) {
      const uint64_t of_bin = simt::read(&memory->histogram[top - i]);
      if (of_bin > 0 && above + of_bin >= wanted) {
        simt::write(&memory->bin, static_cast<uint32_t>(top - i));
        simt::write(&memory->wanted_left, wanted > above ? wanted - above : 0);
        return;
      }
      above += of_bin;
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
  float kept;     // the smallest logit that the filters keep
  float compact;  // the smallest logit of the compact q
};

// The cutoffs of a row whose largest logit is finite. `sum`: of all weights relative to it; `compact`: k', or 0.
SPECDEC_DEVICE Cutoffs cutoffs_of(Selection& selection, Filters filters, int64_t compact, float temperature,
                                  float sum) {
  const bool counts = filters.top_k > 0.0f, weighs = filters.top_p < 1.0f;
  const float of_min_p = filters.min_p > 0.0f ? min_p_cutoff(selection.max, temperature, filters.min_p) : -INFINITY;
  Cutoffs found = {-INFINITY, -INFINITY};
  if (counts || (!weighs && compact > 0)) {
    selection.low = selection.bound_of(counts ? static_cast<int64_t>(filters.top_k) : compact);
  } else if (weighs) {
    // All logits below this one together weigh less than 1 - top_p, so none of them is kept. Allows for rounding.
    const float share = (1.0f - filters.top_p) * sum / static_cast<float>(selection.row.size);
    selection.low = selection.max + logf(share) * temperature;
    selection.low -= 1e-5f * (1.0f + fabsf(selection.low));
    selection.low = selection.low < selection.max ? selection.low : selection.max;
  }
  if (counts || weighs || compact > 0) {
    selection.list();
    const bool from_list = selection.listed();
#pragma unroll 1
    for (int pass = counts ? 0 : weighs ? 1 : 2; pass < (compact > 0 ? 3 : 2); ++pass) {
      if (pass == 1 && !weighs) continue;
      // Without top-k, top_p is a share of the whole row, including what the bound left out.
      const double known = pass == 1 && !counts ? static_cast<double>(sum) * static_cast<double>(kUnit) : 0.0;
      const double share = pass == 1 ? static_cast<double>(filters.top_p) : 1.0;
      const double most = pass == 0   ? static_cast<double>(filters.top_k)
                          : pass == 1 ? static_cast<double>(INFINITY)
                                      : static_cast<double>(compact);
      const float lowest = pass == 2 && of_min_p > found.kept ? of_min_p : found.kept;
      const float cutoff = selection.select(from_list, lowest, pass == 1, known, share, most);
      (pass == 2 ? found.compact : found.kept) = cutoff;
    }
  }
  found.kept = of_min_p > found.kept ? of_min_p : found.kept;
  return found;
}

}  // namespace specdec::cuda
