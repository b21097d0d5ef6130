#include <algorithm>

#include "../common/parallel.h"
#include "operations.h"
#include "sampling.h"

namespace specdec::cpu {
namespace {

constexpr int64_t kSequencesAtOnce = 1024;  // few enough for the records of their rows to stay in the cache

class Drafting {
 public:
  explicit Drafting(const DraftStepParams& params) : params_(params) {}

  void run() {
    for (int64_t first = 0; first < params_.batch; first += kSequencesAtOnce) {
      draw_some(first, std::min(kSequencesAtOnce, params_.batch - first));
    }
  }

 private:
  void draw_some(int64_t first, int64_t n) const {
    const DraftRows rows = draft_rows(params_, params_.offset, first, n, params_.allowed);
    const StatsOfRows stats(rows.tasks);
    parallel_for(n, kGrainBlocks / 4, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) draw_one(first + i, rows.tasks[i].row, stats[i]);
    });
  }

  void draw_one(int64_t b, Row row, const RowStats& stats) const {
    const int32_t fault = row_fault(stats.max, stats.inverse_temperature);
    params_.status[b] = fault << kDraftFlagShift;
    if (fault != 0) return write(b, -1, -INFINITY, -INFINITY, NAN);
    if (stats.inverse_temperature == 0.0f) return write(b, argmax(row, stats), 0.0f, -INFINITY, stats.lse);
    Noise noise = {static_cast<uint64_t>(params_.seed[b]), static_cast<uint32_t>(params_.position[b]),
                   static_cast<uint32_t>(params_.offset)};
    int64_t token;
    if (params_.coupled) {
      noise = {noise.seed, noise.position + noise.offset, 0};
      token = draw_coupled(row, stats, params_.d2t, noise);
    } else {
      token = draw(row, stats, noise, kDraftBlock, kDraftToken);
    }
    write(b, token, log_probability(logit_at(row, token), stats.distribution()), stats.cutoff, stats.lse);
  }

  void write(int64_t b, int64_t token, float log_q, float cutoff, float lse) const {
    params_.tokens[b] = target_id(token);
    params_.log_q[b] = log_q;
    params_.cutoff[b] = cutoff;
    params_.lse[b] = lse;
  }

  int64_t target_id(int64_t token) const { return params_.d2t == nullptr || token < 0 ? token : params_.d2t[token]; }

  const DraftStepParams& params_;
};

}  // namespace

void draft_step(const DraftStepParams& params) { Drafting(params).run(); }

}  // namespace specdec::cpu
