#include "speculative_step.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "../core/accept.h"
#include "parallel.h"
#include "row_stats.h"

namespace specdec::cpu {
namespace {

enum class Outcome { kKept, kFinished, kRecovering };

// One sequence at the row that is being decided.
struct Decision {
  int64_t sequence;
  int64_t draft;  // the token that is tested, or -1
  const RowStats* p_stats;
  Distribution p, q;
  Outcome outcome;
};

// Row by row for all sequences that are still walking, so rows behind a rejection are never read.
class Verification {
 public:
  explicit Verification(const SpeculativeStepParams& params)
      : params_(params), rows_(params.num_drafts_max + 1), kernel_(block_kernels()) {}

  void run() {
    std::vector<int64_t> walking(params_.batch);
    std::iota(walking.begin(), walking.end(), int64_t{0});
    std::fill_n(params_.tokens, params_.batch * rows_, int64_t{-1});
    std::fill_n(params_.num_accepted, params_.batch, 0);
    std::fill_n(params_.status, params_.batch, 0);
    for (int64_t j = 0; !walking.empty(); ++j) {  // row K has no draft to keep, so it ends every walk
      walking = decide(walking, j);
    }
  }

 private:
  // Decides row j of these sequences; returns those that walk on.
  std::vector<int64_t> decide(const std::vector<int64_t>& walking, int64_t j) {
    const size_t n = walking.size();
    std::vector<Decision> decisions(n);
    std::vector<RowTask> tasks(2 * n);  // the target's rows, then the draft's where they are needed
    for (size_t i = 0; i < n; ++i) {
      const int64_t b = walking[i];
      const float temperature = params_.temperature[b];
      decisions[i] = {b, draft_at(b, j), nullptr, {}, {}, Outcome::kFinished};
      tasks[i] = {row(params_.target, b, j), temperature};
      if (decisions[i].draft >= 0 && has_full_q(b) && params_.draft_lse == nullptr) {
        tasks[n + i] = {row(params_.draft, b, j), temperature};
      }
    }
    const StatsOfRows stats(tasks);
    parallel_for(static_cast<int64_t>(n), kGrainBlocks / 4, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        Decision& d = decisions[i];
        d.p_stats = &stats[i];
        d.p = {stats[i].inverse_temperature, stats[i].lse};
        d.outcome = test(d, j, params_.draft_lse == nullptr ? &stats[n + i] : nullptr);
      }
    });
    recover(decisions, j);
    std::vector<int64_t> walking_on;
    for (const Decision& d : decisions) {
      if (d.outcome == Outcome::kKept) walking_on.push_back(d.sequence);
    }
    return walking_on;
  }

  // The draft token of row j if there is one, else -1.
  int64_t draft_at(int64_t b, int64_t j) {
    const int64_t k = params_.num_drafts_max;
    if (j >= (params_.num_drafts == nullptr ? k : std::min(params_.num_drafts[b], k))) return -1;
    const int64_t x = params_.draft_tokens[b * k + j];
    if (x >= 0 && x < params_.vocabulary) return x;
    if (x != -1) params_.status[b] |= kDraftOutOfRange;
    return -1;
  }

  // Greedy sequences take drafts for one-hot, whatever their logits.
  bool has_full_q(int64_t b) const { return params_.draft.data != nullptr && params_.temperature[b] != 0.0f; }

  Outcome test(Decision& d, int64_t j, const RowStats* q_stats) {
    const int64_t b = d.sequence;
    const Row p_row = row(params_.target, b, j);
    if (const int32_t fault = row_fault(d.p_stats->max)) {
      params_.status[b] |= fault;
      return Outcome::kFinished;
    }
    if (params_.temperature[b] == 0.0f) {
      const int64_t best = argmax(p_row, *d.p_stats);
      return d.draft == best ? keep(b, j, best) : finish(b, j, best);
    }
    float log_q = 0.0f;  // one-hot
    if (d.draft >= 0 && has_full_q(b)) {
      // A NaN is how draft_step hands over the statistics of a row without a distribution.
      const float handed_over = q_stats ? 0.0f : params_.draft_lse[b * params_.num_drafts_max + j];
      const int32_t fault = row_fault(q_stats ? q_stats->max : handed_over);
      params_.status[b] |= fault << kDraftFlagShift;
      d.q = {d.p.inverse_temperature, q_stats ? q_stats->lse : handed_over};
      if (fault != 0)
        d.draft = -1;
      else
        log_q = log_probability(logit_at(row(params_.draft, b, j), d.draft), d.q.inverse_temperature, d.q.lse);
    }
    if (d.draft < 0) return finish(b, j, draw_target(d, j, -1));
    if (log_q == -INFINITY) {
      params_.status[b] |= kDraftZeroProbability;
      return Outcome::kRecovering;
    }
    const float log_p = log_probability(logit_at(p_row, d.draft), d.p.inverse_temperature, d.p.lse);
    const Noise n = noise(b, j);
    if (accept(uniform(philox(n.seed, 0, n.position, n.offset, kAccept).word[0]), log_p, log_q)) {
      return keep(b, j, d.draft);
    }
    if (has_full_q(b)) return Outcome::kRecovering;
    const int64_t token = draw_target(d, j, d.draft);
    return token < 0 ? keep(b, j, d.draft) : finish(b, j, token);  // negative: p has no mass but on the draft
  }

  // Draws from max(0, p - q) for every sequence whose draft was rejected under a full q.
  void recover(std::vector<Decision>& decisions, int64_t j) {
    std::vector<Decision*> recovering;
    for (Decision& d : decisions) {
      if (d.outcome == Outcome::kRecovering) recovering.push_back(&d);
    }
    if (recovering.empty()) return;
    const int64_t count = static_cast<int64_t>(recovering.size());
    const int64_t blocks = row(params_.target, 0, 0).num_blocks();
    std::vector<float> mass(count * blocks);
    parallel_for(count * blocks, kGrainBlocks / 2, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const Decision& d = *recovering[i / blocks];
        mass[i] = kernel_.residual_sum(row(params_.target, d.sequence, j), d.p, row(params_.draft, d.sequence, j), d.q,
                                       i % blocks);
      }
    });
    parallel_for(count, kGrainBlocks / 4, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) draw_recovered(*recovering[i], j, &mass[i * blocks], blocks);
    });
  }

  void draw_recovered(Decision& d, int64_t j, const float* mass, int64_t blocks) {
    const int64_t b = d.sequence;
    const Row p_row = row(params_.target, b, j);
    const int64_t block = kernel_.draw_index(mass, blocks, noise(b, j), kRecoverBlock);
    if (block >= 0) {
      d.outcome = finish(b, j, kernel_.draw_residual(p_row, d.p, row(params_.draft, b, j), d.q, block, noise(b, j)));
    } else if (probability(logit_at(p_row, d.draft), d.p.inverse_temperature, d.p.lse) > 0.0f) {
      d.outcome = keep(b, j, d.draft);  // no mass: p and q are equal up to rounding, so the draft stands
    } else {
      d.outcome = finish(b, j, draw_target(d, j, -1));  // but for a draft that p never yields
    }
  }

  int64_t draw_target(const Decision& d, int64_t j, int64_t without) const {
    return draw(row(params_.target, d.sequence, j), *d.p_stats, without, noise(d.sequence, j), kRecoverBlock,
                kRecoverToken);
  }

  Outcome keep(int64_t b, int64_t j, int64_t token) {
    params_.tokens[b * rows_ + j] = token;
    params_.num_accepted[b] = static_cast<int32_t>(j + 1);
    return Outcome::kKept;
  }

  Outcome finish(int64_t b, int64_t j, int64_t token) {
    params_.tokens[b * rows_ + j] = token;
    return Outcome::kFinished;
  }

  Noise noise(int64_t b, int64_t j) const {
    return {static_cast<uint64_t>(params_.seed[b]), static_cast<uint32_t>(params_.position[b]),
            static_cast<uint32_t>(j)};
  }

  Row row(const LogitRows& rows, int64_t b, int64_t j) const {
    return {rows.data + b * rows.sequence_stride + j * rows.row_stride, rows.dtype, params_.vocabulary};
  }

  const SpeculativeStepParams& params_;
  const int64_t rows_;  // a sequence: K + 1
  const BlockKernels& kernel_;
};

}  // namespace

void speculative_step(const SpeculativeStepParams& params) { Verification(params).run(); }

}  // namespace specdec::cpu
