// Drafts under top-p that rule `token` accepts wherever the cutoff is, so that it need not be found.
//
// Let Z be the weight of all tokens of a row, and S that of the kept ones: top_p Z <= S <= Z. One pass gives Z and the
// weight of the tokens above a known one, x. If those weigh less than top_p Z, x is kept, and then p(x) = w(x) / S is
// at least w(x) / Z and at most w(x) / (top_p Z). A draft is surely accepted if the least p(x) exceeds u times the
// largest q(x). A share of about 1 - top_p of those that are accepted is missed. The rows of these are read again, and
// those of rejected drafts, whose residual needs the cutoff. Finding one costs as much as two to three such passes.
// It would hold with min-p as well, but a pass that also looks for its cutoff saves less.
//
// Tokens do not depend on any of this: what is not sure is decided as if it had not been looked at.
#include "verification.h"

namespace specdec::cpu {
namespace {

constexpr float kLeastTopP = 0.5f;  // below it, too many rows would be read again

bool only_top_p(const RowTask& task) {
  return task.temperature != 0.0f && task.top_k == 0.0f && task.min_p == 0.0f && task.top_p >= kLeastTopP &&
         task.top_p < 1.0f;
}

// Asks for the weight of all tokens of a row, and of those above `logit`.
RowTask weighing(RowTask task, float logit) {
  task.top_p = 1.0f;
  task.mark = logit;
  return task;
}

// The natural logarithm of a token's probability, at least and at most.
struct Bounds {
  float least = -INFINITY, most = INFINITY;  // until something is known
};

// The margin is far more than what is rounded otherwise once the cutoff is known: sums, by less than 1e-4 of them, and
// logits / T, by 6e-8 of them. In a row without a distribution some sum is not finite, so nothing is known.
Bounds bounds_of(const RowStats& stats, float logit, float top_p) {
  const float log_weight = logit * stats.inverse_temperature, log_top_p = logf(top_p);
  const float margin = 1e-3f + 1e-6f * (fabsf(stats.max) * stats.inverse_temperature + fabsf(log_weight));
  const bool kept = stats.lse_above + margin < stats.lse + log_top_p;
  if (!kept) return {};
  return {log_weight - stats.lse - margin, log_weight - stats.lse - log_top_p + margin};
}

}  // namespace

std::vector<int64_t> Verification::keep_sure(std::vector<VerifiedRow>& rows) {
  if (params.sampling.filters == nullptr || params.log_probs != nullptr) return {};  // those need the kept weight
  const int64_t n = static_cast<int64_t>(rows.size());
  std::vector<RowTask> tasks(2 * n);  // as in `measure`
  std::vector<DraftDistribution> drafts(n);
  bool any = false;
  for (int64_t i = 0; i < n; ++i) {
    const VerifiedRow& row = rows[i];
    const RowTask task = task_of(params.sampling, row.sequence, row.p_row);
    if (row.draft < 0 || !only_top_p(task)) continue;
    any = true;
    tasks[i] = weighing(task, logit_at(row.p_row, row.draft));
    drafts[i] = has_full_q(row.sequence) ? row.q : q_of(row.sequence, row.j);
    if (drafts[i].row.data == nullptr || params.draft_lse != nullptr) continue;
    tasks[n + i] = weighing(task_of(params.sampling, row.sequence, drafts[i].row), drafts[i].logit(row.draft));
  }
  if (!any) return {};
  const StatsOfRows stats(tasks);
  const auto is_sure = [&](int64_t i) {
    const std::optional<float> of_p = tasks[i].mark, of_q = tasks[n + i].mark;
    if (!of_p) return false;
    const float top_p = task_of(params.sampling, rows[i].sequence, rows[i].p_row).top_p;
    const float least = bounds_of(stats[i], *of_p, top_p).least;
    const float most = of_q ? bounds_of(stats[n + i], *of_q, top_p).most : drafts[i].log_probability(rows[i].draft);
    return most > -INFINITY && accept(uniform_at(rows[i].sequence, rows[i].j), least, most);
  };
  std::vector<int64_t> kept;
  std::vector<VerifiedRow> others;
  for (int64_t i = 0; i < n; ++i) {
    if (is_sure(i)) {
      keep(rows[i]);
      kept.push_back(rows[i].sequence);
    } else {
      others.push_back(std::move(rows[i]));
    }
  }
  rows = std::move(others);
  return kept;
}

}  // namespace specdec::cpu
