#include "nucleus.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <vector>

namespace specdec::cpu {
namespace {

constexpr int64_t kFewestBlocks = 8;
// An end of a bracket allows for so many standard errors: few at first, as another pass costs less than a wide bracket.
constexpr double kErrorsAtFirst = 1.25, kErrorsAgain = 3.0;
constexpr int kFew = 25;    // a bracket has no upper end if it holds less than one in kFew of the sample
constexpr int kDense = 32;  // with so many of the sample in a bracket, two of them can be its ends

// A sample of a row, in bins. Weights are relative to the sample's largest logit, and equal within a bin.
class Sample {
 public:
  Sample(Row row, float inverse_temperature, double share, double errors)
      : errors_(errors),
        logits_(row.size / kBlock * kSampled),  // a last block that is not whole has none
        scale_(static_cast<double>(row.size) / size()),
        range_(std::log(row.size / share) + 3.0) {  // all logits beyond it together weigh less than share / 20
    const BlockKernels& kernel = block_kernels();
    for (int64_t at = 0; at < size(); at += kSampled) kernel.sample(row, at / kSampled, &logits_[at]);
    const Row sampled = {logits_.data(), Dtype::kFloat32, size()};
    bins_.max = -INFINITY;
    for (int64_t b = 0; b < sampled.num_blocks(); ++b) bins_.max = std::max(bins_.max, kernel.max(sampled, b, nullptr));
    bins_.scale = static_cast<float>(kBins * inverse_temperature / range_);
    width_ = range_ / inverse_temperature / kBins;
    if (!usable()) return;
    std::vector<int32_t> copies(SampleBins::kCount * Bins::kCopies);
    kernel.tally(logits_.data(), size(), bins_, copies.data());
    const double ratio = std::exp(-range_ / kBins);
    double weight = std::sqrt(ratio);
    for (int bin = 0; bin < kBins; ++bin, weight *= ratio) {
      const int32_t* count = &copies[bin * Bins::kCopies];
      counts_[bin] = std::accumulate(count, count + Bins::kCopies, 0);
      weights_[bin] = weight;
      sum_ += counts_[bin] * weight, squares_ += counts_[bin] * weight * weight;
    }
  }

  bool usable() const { return bins_.max - bins_.max == 0.0f && bins_.scale < INFINITY; }
  int64_t size() const { return static_cast<int64_t>(logits_.size()); }
  float max() const { return bins_.max; }

  // What the row weighs at least and at most, if no few logits weigh much more than those of the sample.
  void weigh(double* least, double* most) const {
    const double error = errors_ * scale_ * std::sqrt(squares_);
    *least = std::max(scale_ * sum_ - error, sum_), *most = scale_ * sum_ + error;
  }

  // A bracket around the cutoff below which the logits weigh at least `least` and at most `most`.
  Bracket bracket(double least, double most) const {
    int low = kBins - 1, high, inside = 0;
    double below = 0.0, variance = 0.0;
    for (; low >= 0; --low) {
      const double each = scale_ * weights_[low], count = counts_[low];
      // As if one more were in the sample: that none is seen is no proof that there is none.
      if (!beyond(least, below + each * count, variance + each * each * (count + 1))) break;
      below += each * count, variance += each * each * count;
    }
    bool found = false;
    for (high = low; high >= 0 && !found; --high) {
      const double each = scale_ * weights_[high], count = counts_[high];
      below += each * count, variance += each * each * count, inside += counts_[high];
      found = beyond(below, most, variance);
    }
    const int above = std::accumulate(counts_, counts_ + high + 1, 0);
    if (!found || kFew * (above + inside) <= size()) return {end(low + 1), INFINITY};
    if (inside < kDense) return {end(low + 1), end(high + 1)};
    return block_kernels().sample_range(logits_.data(), size(), bins_, high + 1, low);
  }

 private:
  static constexpr int kBins = SampleBins::kCount - 1;

  bool beyond(double larger, double smaller, double variance) const {
    const double distance = larger - smaller;
    return distance >= 0.0 && distance * distance >= errors_ * errors_ * variance;
  }

  // The upper end of a bin.
  float end(int bin) const {
    return std::max(static_cast<float>(bins_.max - bin * width_), -std::numeric_limits<float>::max());
  }

  double errors_;
  std::vector<float> logits_;
  double scale_;  // logits of the row for each of the sample
  double range_, width_;
  double sum_ = 0.0, squares_ = 0.0;  // of the sample's weights
  SampleBins bins_;
  int32_t counts_[kBins];
  double weights_[kBins];
};

}  // namespace

bool can_be_sampled(Row row) { return row.size >= kFewestBlocks * kBlock; }

Bracket guess_bracket(Row row, float inverse_temperature, float top_p) {
  const double share = 1.0 - top_p;
  const Sample sample(row, inverse_temperature, share, kErrorsAtFirst);
  if (!sample.usable()) return {};
  double least, most;
  sample.weigh(&least, &most);
  return sample.bracket(share * least, share * most);
}

Bracket guess_bracket(const SelectionRow& row, float top_p) {
  const double share = 1.0 - top_p;
  const Sample sample(row.row, row.inverse_temperature, share, kErrorsAgain);
  if (!sample.usable()) return {};
  const double below = share * total_weight(row) * std::exp((double{row.max} - sample.max()) * row.inverse_temperature);
  return sample.bracket(below, below);
}

std::optional<float> cutoff_in_bracket(const SelectionRow& row, Bracket bracket, const Split* splits, double wanted) {
  const BlockKernels& kernel = block_kernels();
  const int64_t blocks = row.num_blocks();
  double above = 0.0;
  int64_t count = 0;
  bool complete = true;
  for (int64_t block = 0; block < blocks; ++block) {
    above += double{splits[block].above} * weight(row.blocks[block].max, row.max, row.inverse_temperature);
    count += splits[block].count;
    complete &= splits[block].count <= Split::kMost;
  }
  if (!(above < wanted)) return {};
  if (bracket.low == bracket.high) {
    if (above + count * double{weight(bracket.low, row.max, row.inverse_temperature)} < wanted) return {};
    return bracket.low;
  }
  if (!complete || count == 0) return {};
  std::vector<float> logits;
  logits.reserve(count);
  for (int64_t block = 0; block < blocks; ++block) {
    logits.insert(logits.end(), splits[block].logits, splits[block].logits + splits[block].count);
  }
  SelectionRow inside = {{logits.data(), Dtype::kFloat32, count}, -INFINITY, row.inverse_temperature, nullptr, nullptr};
  std::vector<BlockStats> stats(inside.num_blocks());
  std::vector<float> lanes(inside.num_blocks() * kLanes);
  for (int64_t block = 0; block < inside.num_blocks(); ++block) {
    stats[block] = kernel.stats(inside.row, block, row.inverse_temperature, &lanes[block * kLanes]);
    inside.max = std::max(inside.max, stats[block].max);
  }
  inside.blocks = stats.data(), inside.lanes = lanes.data();
  // The weights of these logits are relative to their largest.
  wanted = (wanted - above) / weight(inside.max, row.max, row.inverse_temperature);
  if (total_weight(inside) < wanted) return {};
  return cutoff_of_weight(inside, bracket.low, wanted);
}

void sum_kept(const SelectionRow& row, Bracket bracket, const Split* splits, float cutoff, BlockStats* blocks) {
  for (int64_t block = 0; block < row.num_blocks(); ++block) {
    const Split& split = splits[block];
    const float max = blocks[block].max;
    float& sum = blocks[block].sum;
    if (max < cutoff) {
      sum = 0.0f;
    } else if (bracket.low == bracket.high) {
      sum = split.above + split.count * weight(bracket.low, max, row.inverse_temperature);
    } else {
      const Row inside = {split.logits, Dtype::kFloat32, (split.count + kLanes - 1) / kLanes * kLanes};
      sum = split.above;
      if (split.count > 0) sum += block_kernels().sum_above(inside, 0, max, row.inverse_temperature, cutoff);
    }
  }
}

}  // namespace specdec::cpu
