#include "speculative_step.h"

#include <algorithm>

#include "../core/accept.h"
#include "parallel.h"
#include "row_stats.h"

namespace specdec::cpu {
namespace {

// Where one sequence's walk over its drafts stands.
struct Walk {
  int64_t position = 0;     // the row that is decided next
  bool recovering = false;  // its draft was rejected, and max(0, p - q) with a full q has to be weighed
  bool done = false;
};

class Verification {
 public:
  explicit Verification(const SpeculativeStepParams& params)
      : params_(params), rows_(params.num_drafts_max + 1), target_stats_(target_tasks()), draft_stats_(draft_tasks()) {}

  void run() {
    const int64_t blocks = Row{nullptr, Dtype::kFloat32, params_.vocabulary}.num_blocks();
    std::vector<Walk> walks(params_.batch);
    std::vector<int64_t> recovering;
    std::vector<float> mass;
    for (int64_t b = 0; b < params_.batch; ++b) {
      std::fill_n(params_.tokens + b * rows_, rows_, int64_t{-1});
      params_.num_accepted[b] = params_.status[b] = 0;
    }
    // One round, but for the rare rejection whose residual has no mass: then the draft stands and its walk goes on.
    while (true) {
      parallel_for(params_.batch, kGrainBlocks / 4, [&](int64_t begin, int64_t end) {
        for (int64_t b = begin; b < end; ++b) advance(b, walks[b]);
      });
      recovering.clear();
      for (int64_t b = 0; b < params_.batch; ++b) {
        if (walks[b].recovering) recovering.push_back(b);
      }
      if (recovering.empty()) return;
      const int64_t count = static_cast<int64_t>(recovering.size());
      mass.resize(count * blocks);
      parallel_for(count * blocks, kGrainBlocks / 4, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) {
          const int64_t b = recovering[i / blocks], j = walks[b].position;
          mass[i] = block_kernels().residual_sum(target_row(b, j), target_law(b, j), draft_row(b, j), draft_law(b, j),
                                                 i % blocks);
        }
      });
      parallel_for(count, kGrainBlocks / 4, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) recover(recovering[i], walks[recovering[i]], &mass[i * blocks], blocks);
      });
    }
  }

 private:
  // Walks until the sequence is done or has to recover from a full q.
  void advance(int64_t b, Walk& walk) {
    const bool greedy = params_.temperature[b] == 0.0f;
    while (!walk.done && !walk.recovering) {
      const int64_t j = walk.position;
      const RowStats& p = target_stats_[b * rows_ + j];
      if (const int32_t fault = row_fault(p.max)) {
        params_.status[b] |= fault;
        walk.done = true;
        return;
      }
      const int64_t x = testable_draft(b, j, greedy);
      if (greedy) {
        const int64_t best = argmax(target_row(b, j), p);
        if (x == best) {
          keep(b, walk, x);
        } else {
          finish(b, walk, best);
        }
      } else if (x < 0) {
        finish(b, walk, draw(target_row(b, j), p, -1, noise(b, j), kRecoverBlock, kRecoverToken));
      } else {
        test(b, walk, x);
      }
    }
  }

  // The draft token of row j if there is one that can be tested, else -1.
  int64_t testable_draft(int64_t b, int64_t j, bool greedy) {
    if (j >= limit(b)) return -1;
    const int64_t x = params_.draft_tokens[b * params_.num_drafts_max + j];
    if (x < 0 || x >= params_.vocabulary) {
      if (x != -1) params_.status[b] |= kDraftOutOfRange;
      return -1;
    }
    if (greedy || params_.draft.data == nullptr) return x;
    // A NaN is how draft_step hands over the statistics of a row without a distribution.
    const int64_t i = b * params_.num_drafts_max + j;
    const int32_t fault = row_fault(params_.draft_lse == nullptr ? draft_stats_[i].max : params_.draft_lse[i]);
    params_.status[b] |= fault << kDraftFlagShift;
    return fault == 0 ? x : -1;
  }

  void test(int64_t b, Walk& walk, int64_t x) {
    const int64_t j = walk.position;
    const Row p_row = target_row(b, j);
    const Distribution p = target_law(b, j);
    const float log_p = log_probability(logit_at(p_row, x), p.inverse_temperature, p.lse);
    float log_q = 0.0f;  // one-hot
    if (params_.draft.data != nullptr) {
      const Distribution q = draft_law(b, j);
      log_q = log_probability(logit_at(draft_row(b, j), x), q.inverse_temperature, q.lse);
    }
    const uint32_t bits =
        philox(static_cast<uint64_t>(params_.seed[b]), 0, static_cast<uint32_t>(params_.position[b]),
               static_cast<uint32_t>(j), kAccept)
            .word[0];
    if (log_q == -INFINITY) {
      params_.status[b] |= kDraftZeroProbability;
      walk.recovering = true;
    } else if (accept(uniform(bits), log_p, log_q)) {
      keep(b, walk, x);
    } else if (params_.draft.data != nullptr) {
      walk.recovering = true;
    } else {
      const int64_t token =
          draw(p_row, target_stats_[b * rows_ + j], x, noise(b, j), kRecoverBlock, kRecoverToken);
      if (token < 0) {
        keep(b, walk, x);  // p has no mass but on x
      } else {
        finish(b, walk, token);
      }
    }
  }

  void recover(int64_t b, Walk& walk, const float* mass, int64_t blocks) {
    const int64_t j = walk.position;
    walk.recovering = false;
    const int64_t block = block_kernels().draw_index(mass, blocks, noise(b, j), kRecoverBlock);
    if (block >= 0) {
      finish(b, walk,
             block_kernels().draw_residual(target_row(b, j), target_law(b, j), draft_row(b, j), draft_law(b, j), block,
                                           noise(b, j)));
      return;
    }
    // No mass: p and q are equal up to rounding, so the draft stands, unless p never yields it.
    const int64_t x = params_.draft_tokens[b * params_.num_drafts_max + j];
    const Distribution p = target_law(b, j);
    if (probability(logit_at(target_row(b, j), x), p.inverse_temperature, p.lse) > 0.0f) {
      keep(b, walk, x);
    } else {
      finish(b, walk,
             draw(target_row(b, j), target_stats_[b * rows_ + j], -1, noise(b, j), kRecoverBlock, kRecoverToken));
    }
  }

  void keep(int64_t b, Walk& walk, int64_t token) {
    params_.tokens[b * rows_ + walk.position] = token;
    params_.num_accepted[b] = static_cast<int32_t>(++walk.position);
  }

  void finish(int64_t b, Walk& walk, int64_t token) {
    params_.tokens[b * rows_ + walk.position] = token;
    walk.done = true;
  }

  int64_t limit(int64_t b) const {
    const int64_t k = params_.num_drafts_max;
    return params_.num_drafts == nullptr ? k : std::clamp<int64_t>(params_.num_drafts[b], 0, k);
  }

  Noise noise(int64_t b, int64_t j) const {
    return {static_cast<uint64_t>(params_.seed[b]), static_cast<uint32_t>(params_.position[b]),
            static_cast<uint32_t>(j)};
  }

  Row row(const LogitRows& rows, int64_t b, int64_t j) const {
    return {rows.data + b * rows.sequence_stride + j * rows.row_stride, rows.dtype, params_.vocabulary};
  }
  Row target_row(int64_t b, int64_t j) const { return row(params_.target, b, j); }
  Row draft_row(int64_t b, int64_t j) const { return row(params_.draft, b, j); }

  Distribution target_law(int64_t b, int64_t j) const {
    const RowStats& stats = target_stats_[b * rows_ + j];
    return {stats.inverse_temperature, stats.lse};
  }
  Distribution draft_law(int64_t b, int64_t j) const {
    const int64_t i = b * params_.num_drafts_max + j;
    return {1.0f / params_.temperature[b], params_.draft_lse == nullptr ? draft_stats_[i].lse : params_.draft_lse[i]};
  }

  std::vector<RowTask> target_tasks() const {
    std::vector<RowTask> tasks(params_.batch * rows_);
    for (int64_t b = 0; b < params_.batch; ++b) {
      for (int64_t j = 0; j <= limit(b); ++j) tasks[b * rows_ + j] = {target_row(b, j), params_.temperature[b]};
    }
    return tasks;
  }

  std::vector<RowTask> draft_tasks() const {
    std::vector<RowTask> tasks(params_.batch * params_.num_drafts_max);
    if (params_.draft.data == nullptr || params_.draft_lse != nullptr) return tasks;
    for (int64_t b = 0; b < params_.batch; ++b) {
      if (params_.temperature[b] == 0.0f) continue;  // q is not consulted
      for (int64_t j = 0; j < limit(b); ++j) {
        tasks[b * params_.num_drafts_max + j] = {draft_row(b, j), params_.temperature[b]};
      }
    }
    return tasks;
  }

  const SpeculativeStepParams& params_;
  const int64_t rows_;  // a sequence: K + 1
  const StatsOfRows target_stats_;
  const StatsOfRows draft_stats_;
};

}  // namespace

void speculative_step(const SpeculativeStepParams& params) { Verification(params).run(); }

}  // namespace specdec::cpu
