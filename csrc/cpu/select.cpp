#include "select.h"

#include <algorithm>
#include <numeric>
#include <vector>

namespace specdec::cpu {
namespace {

class Selection {
 public:
  Selection(const SelectionRow& row, float low, bool weigh)
      : row_(row), bins_{row.row.size > kBlock ? Bins::kMost : 16,
                         low,
                         row.max,
                         true,
                         0.0f,
                         0,
                         0,
                         weigh,
                         row.max,
                         row.inverse_temperature} {}

  // The largest logit c such that the logits >= c amount to `wanted`, in number or weight; the smallest logit if all
  // together do not. wanted_of(amount of all logits in the range) returns `wanted`.
  template <class Function>
  float run(const Function& wanted_of) {
    if (bins_.low == -INFINITY) narrow(-1);
    double wanted = 0.0, above = 0.0;
    for (bool first = true; bins_.low < bins_.high; first = false) {
      cut(first);
      double sums[Bins::kMost];
      histogram(sums);
      if (first) wanted = wanted_of(std::accumulate(sums, sums + bins_.count, 0.0));
      int chosen = -1;  // ends as the lowest bin if rounding leaves the sum below `wanted`
      for (int bin = 0; bin < bins_.count; ++bin) {
        if (sums[bin] == 0.0) continue;
        if (chosen >= 0) above += sums[chosen];
        chosen = bin;
        if (above + sums[bin] >= wanted) break;
      }
      if (chosen < 0) break;  // all weights are 0
      if (bins_.linear) {
        narrow(chosen);
      } else {
        const uint64_t first_key = uint64_t{bins_.high_key} - (static_cast<uint64_t>(chosen) << bins_.shift);
        const uint64_t width = uint64_t{1} << bins_.shift;
        bins_.high = from_ordered_key(static_cast<uint32_t>(first_key));
        const float lowest = from_ordered_key(static_cast<uint32_t>(first_key - std::min(first_key, width - 1)));
        bins_.low = std::max(bins_.low, lowest);
      }
    }
    return bins_.low;
  }

 private:
  void cut(bool first) {
    const float scale = (bins_.count - 1) / (0.5f * bins_.high - 0.5f * bins_.low);
    bins_.linear = first && scale < INFINITY;
    bins_.scale = scale;
    bins_.high_key = ordered_key(bins_.high);
    bins_.shift = 0;
    while ((bins_.high_key - ordered_key(bins_.low)) >> bins_.shift >= static_cast<uint32_t>(bins_.count)) {
      ++bins_.shift;
    }
  }

  // Computes sums[count], one for each bin.
  void histogram(double* sums) const {
    double copies[(Bins::kMost + 1) * Bins::kCopies];
    std::fill_n(copies, (bins_.count + 1) * Bins::kCopies, 0.0);
    for (int64_t block = 0; block < row_.num_blocks(); ++block) {
      if (row_.blocks[block].max < bins_.low) continue;
      block_kernels().histogram(row_.row, block, row_.lanes + block * kLanes, bins_, copies);
    }
    for (int bin = 0; bin < bins_.count; ++bin) {
      const double* of_bin = copies + bin * Bins::kCopies;
      sums[bin] = std::accumulate(of_bin, of_bin + Bins::kCopies, 0.0);
    }
  }

  // Narrows the range to the logits of one bin, or, with -1, to the finite ones.
  void narrow(int bin) {
    float low = INFINITY, high = -INFINITY;
    for (int64_t block = 0; block < row_.num_blocks(); ++block) {
      if (row_.blocks[block].max >= bins_.low) block_kernels().range(row_.row, block, bins_, bin, &low, &high);
    }
    bins_.low = low, bins_.high = high;
  }

  const SelectionRow& row_;
  Bins bins_;
};

}  // namespace

float kth_largest(const SelectionRow& row, int64_t k) {
  // The k-th largest maximum of disjoint groups is a lower bound, since k logits are at least as large. With at least
  // 2 k groups, few other logits are.
  std::vector<float> maxima;
  if (2 * k <= row.num_blocks()) {
    for (int64_t block = 0; block < row.num_blocks(); ++block) maxima.push_back(row.blocks[block].max);
  } else {
    maxima.assign(row.lanes, row.lanes + row.num_blocks() * kLanes);
  }
  float low = -INFINITY;
  if (k <= static_cast<int64_t>(maxima.size())) {
    std::nth_element(maxima.begin(), maxima.begin() + (k - 1), maxima.end(), std::greater<float>());
    low = maxima[k - 1];
  }
  return Selection(row, low, false).run([&](double) { return static_cast<double>(k); });
}

double total_weight(const SelectionRow& row) {
  double total = 0.0;
  for (int64_t block = 0; block < row.num_blocks(); ++block) {
    total += double{row.blocks[block].sum} * weight(row.blocks[block].max, row.max, row.inverse_temperature);
  }
  return total;
}

float cutoff_of_weight(const SelectionRow& row, float low, double wanted) {
  return Selection(row, low, true).run([&](double) { return wanted; });
}

float nucleus_cutoff_of_all(const SelectionRow& row, float top_p) {
  const double total = total_weight(row);
  // All logits below this one together weigh less than 1 - top_p, so none of them is kept.
  const double share = (1.0 - double{top_p}) * total / static_cast<double>(row.row.size);
  float low = static_cast<float>(row.max + std::log(share) / row.inverse_temperature);
  low -= 1e-5f * (1.0f + fabsf(low));  // allows for the rounding of this bound and of weights
  return cutoff_of_weight(row, std::min(low, row.max), top_p * total);
}

float nucleus_cutoff(const SelectionRow& row, float low, float top_p) {
  return Selection(row, low, true).run([&](double all) { return top_p * all; });
}

}  // namespace specdec::cpu
