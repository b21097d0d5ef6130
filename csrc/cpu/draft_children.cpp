#include <algorithm>

#include "../common/parallel.h"
#include "operations.h"
#include "sampling.h"

namespace specdec::cpu {
namespace {

constexpr int64_t kRowsAtOnce = 1024;  // few enough for the records of rows to stay in the cache

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
    DraftRows rows = draft_rows(params_, params_.depth, first, n);
    for (RowTask& task : rows.tasks) {
      if (params_.sampled) continue;
      if (task.temperature == 0.0f) {  // the likely tokens are those of temperature 1, without filters
        const Row row = task.row;
        task = {};
        task.row = row, task.temperature = 1.0f;
      }
      task.likely = params_.width;
    }
    const StatsOfRows stats(rows.tasks);
    parallel_for(n, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) draw_one(first + i, rows.tasks[i].row, stats[i]);
    });
  }

  void draw_one(int64_t b, Row row, const RowStats& stats) const {
    const int32_t fault = row_fault(stats.max, stats.inverse_temperature);
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
      const Noise noise = {static_cast<uint64_t>(params_.seed[b]), static_cast<uint32_t>(params_.position[b]),
                           static_cast<uint32_t>(params_.offset[b])};
      return first_arrivals(row, stats, params_.width, nullptr, noise, kDraftToken);
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
