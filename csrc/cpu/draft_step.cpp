#include "draft_step.h"

#include "../core/accept.h"
#include "parallel.h"
#include "row_stats.h"

namespace specdec::cpu {

void draft_step(const DraftStepParams& params) {
  std::vector<RowTask> tasks(params.batch);
  for (int64_t b = 0; b < params.batch; ++b) {
    tasks[b] = {{params.logits + b * params.row_stride, params.dtype, params.vocabulary}, params.temperature[b]};
  }
  const StatsOfRows all_stats(tasks);
  parallel_for(params.batch, kGrainBlocks / 4, [&](int64_t begin, int64_t end) {
    for (int64_t b = begin; b < end; ++b) {
      const RowStats& stats = all_stats[b];
      const Row row = tasks[b].row;
      const int32_t fault = row_fault(stats.max);
      params.status[b] = fault << kDraftFlagShift;
      params.cutoff[b] = -INFINITY;
      if (fault != 0) {
        params.tokens[b] = -1;
        params.log_q[b] = -INFINITY;
        params.lse[b] = NAN;
        continue;
      }
      params.lse[b] = stats.lse;
      if (tasks[b].temperature == 0.0f) {
        params.tokens[b] = argmax(row, stats);
        params.log_q[b] = 0.0f;
        continue;
      }
      const Noise noise = {static_cast<uint64_t>(params.seed[b]), static_cast<uint32_t>(params.position[b]),
                           static_cast<uint32_t>(params.offset)};
      const int64_t token = draw(row, stats, -1, noise, kDraftBlock, kDraftToken);
      params.tokens[b] = token;
      params.log_q[b] = log_probability(logit_at(row, token), stats.inverse_temperature, stats.lse);
    }
  });
}

}  // namespace specdec::cpu
