#include <algorithm>

#include "operations.h"
#include "parallel.h"
#include "sampling.h"

namespace specdec::cpu {
namespace {

constexpr int64_t kRowsAtOnce = 1024;  // few enough for the records of rows to stay in the cache

// Sorts arrivals, the first at the beginning (the lowest token of a tie), and keeps the first `count`.
void keep_first(std::vector<Candidate>& arrivals, int64_t count) {
  std::sort(arrivals.begin(), arrivals.end(),
            [](Candidate a, Candidate b) { return a.score != b.score ? a.score > b.score : a.token < b.token; });
  if (static_cast<int64_t>(arrivals.size()) > count) arrivals.resize(count);
}

// The first `count` tokens to arrive in a one-level race of the kept logits: draws without replacement.
std::vector<int64_t> first_arrivals(Row row, const RowStats& stats, int64_t count, Noise noise) {
  const BlockKernels& kernel = block_kernels();
  std::vector<std::vector<Candidate>> found(row.num_blocks());  // of each range of blocks, at its first one
  parallel_for(row.num_blocks(), kGrainBlocks / 8, [&](int64_t begin, int64_t end) {
    std::vector<Candidate>& first = found[begin];
    Candidate candidates[kBlock];
    for (int64_t block = begin; block < end; ++block) {
      const float least = static_cast<int64_t>(first.size()) < count ? 0.0f : first.back().score;
      // E is at least 2^-33. A block whose largest weight could not arrive even with that needs no random numbers.
      const float max = stats.blocks[block].max;
      if (max < stats.cutoff || weight(max, stats.max, stats.inverse_temperature) * 0x1.01p33f < least) continue;
      const int64_t n =
          kernel.arrivals(row, block, stats.max, stats.inverse_temperature, stats.cutoff, noise, least, candidates);
      if (n == 0) continue;
      first.insert(first.end(), candidates, candidates + n);
      keep_first(first, count);
    }
  });
  std::vector<Candidate> all;
  for (const std::vector<Candidate>& each : found) all.insert(all.end(), each.begin(), each.end());
  keep_first(all, count);
  std::vector<int64_t> tokens;
  for (const Candidate& each : all) tokens.push_back(each.token);
  return tokens;
}

class Drafting {
 public:
  explicit Drafting(const DraftChildrenParams& params) : params_(params) {}

  void run() {
    for (int64_t first = 0; first < params_.batch; first += kRowsAtOnce) {
      draw_some(first, std::min(kRowsAtOnce, params_.batch - first));
    }
  }

 private:
  void draw_some(int64_t first, int64_t n) const {
    std::vector<RowTask> tasks(n);
    std::vector<std::vector<Patch>> patches(n);
    for (int64_t i = 0; i < n; ++i) {
      const int64_t b = first + i;
      Row row = {params_.logits + b * params_.row_stride, params_.dtype, params_.vocabulary};
      const int64_t* drafts = params_.drafts == nullptr ? nullptr : params_.drafts + b * params_.depth;
      patches[i] = patches_of(params_.sampling, b, row, params_.d2t, params_.position[b], drafts, params_.depth);
      row.patches = patches[i].data();
      row.num_patches = static_cast<int64_t>(patches[i].size());
      tasks[i] = task_of(params_.sampling, b, row);
      if (params_.sampled) continue;
      if (tasks[i].temperature == 0.0f) {  // the likely tokens are those of temperature 1, without filters
        tasks[i] = {};
        tasks[i].row = row, tasks[i].temperature = 1.0f;
      }
      tasks[i].compact = params_.width;
    }
    const StatsOfRows stats(tasks);
    parallel_for(n, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) draw_one(first + i, tasks[i].row, stats[i]);
    });
  }

  void draw_one(int64_t b, Row row, const RowStats& stats) const {
    const int32_t fault = row_fault(stats.max);
    params_.status[b] = fault << kDraftFlagShift;
    params_.cutoff[b] = fault != 0 ? -INFINITY : stats.cutoff;
    params_.lse[b] = fault != 0 ? NAN : stats.lse;
    const std::vector<int64_t> tokens = fault != 0 ? std::vector<int64_t>() : children(b, row, stats);
    for (int64_t i = 0; i < params_.width; ++i) {
      const bool there = i < static_cast<int64_t>(tokens.size());
      params_.tokens[b * params_.width + i] = there ? target_id(tokens[i]) : -1;
      params_.log_q[b * params_.width + i] = there ? log_q(row, stats, tokens[i]) : -INFINITY;
    }
  }

  std::vector<int64_t> children(int64_t b, Row row, const RowStats& stats) const {
    if (params_.sampled) {
      if (stats.inverse_temperature == 0.0f) return {argmax(row, stats)};
      return first_arrivals(row, stats, params_.width,
                            {static_cast<uint64_t>(params_.seed[b]), static_cast<uint32_t>(params_.position[b]),
                             static_cast<uint32_t>(params_.offset[b])});
    }
    std::vector<int64_t> tokens = most_likely(row, stats, params_.width);
    std::stable_sort(tokens.begin(), tokens.end(),
                     [&](int64_t a, int64_t b) { return logit_at(row, a) > logit_at(row, b); });
    return tokens;
  }

  static float log_q(Row row, const RowStats& stats, int64_t token) {
    if (stats.inverse_temperature == 0.0f) return 0.0f;
    return log_probability(logit_at(row, token), stats.distribution());
  }

  int64_t target_id(int64_t token) const { return params_.d2t == nullptr ? token : params_.d2t[token]; }

  const DraftChildrenParams& params_;
};

}  // namespace

void draft_children(const DraftChildrenParams& params) { Drafting(params).run(); }

}  // namespace specdec::cpu
