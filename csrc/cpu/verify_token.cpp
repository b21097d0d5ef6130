// Rule `token`: Leviathan et al., arXiv 2211.17192, Algorithm 1 = Chen et al., arXiv 2302.01318, Algorithm 2.
#include "../common/parallel.h"
#include "verification.h"

namespace specdec::cpu {
namespace {

enum class Outcome { kKept, kFinished, kRecovering };

Outcome test(Verification& verification, const VerifiedRow& row) {
  if (row.faulty) {
    verification.finish(row, -1);
    return Outcome::kFinished;
  }
  if (row.greedy()) {
    const int64_t best = argmax(row.p_row, row.p);
    if (row.draft == best) {
      verification.keep(row);
      return Outcome::kKept;
    }
    verification.finish(row, best);
    return Outcome::kFinished;
  }
  if (row.draft < 0) {
    verification.finish(row, verification.draw_target(row));
    return Outcome::kFinished;
  }
  if (row.log_q_x == -INFINITY || !accept(verification.uniform_at(row.sequence, row.j), row.log_p_x, row.log_q_x)) {
    return Outcome::kRecovering;
  }
  verification.keep(row);
  return Outcome::kKept;
}

Outcome recover(Verification& verification, const Residual& residual) {
  const VerifiedRow& row = *residual.row;
  if (residual.total() > 0.0f) {
    verification.finish(row, verification.draw_residual(residual));
  } else if (possible(row.log_p_x)) {
    // A residual without mass: p and q are equal up to rounding, so the draft is accepted.
    verification.params.status[row.sequence] |= row.flags;
    verification.keep(row);
    return Outcome::kKept;
  } else {
    verification.finish(row, verification.draw_target(row));  // p(x) = 0: the draft must not be accepted
  }
  return Outcome::kFinished;
}

}  // namespace

// Goes row by row over all sequences that have not ended, so rows after a rejection are never read. The last row has no
// draft, so it ends every sequence. Under top-p, most acceptances are known before the cutoff (sure_drafts.cpp).
void verify_token(Verification& verification, std::vector<int64_t> walking) {
  for (int64_t j = 0; !walking.empty(); ++j) {
    std::vector<VerifiedRow> rows = verification.rows_at(walking, j);
    walking = verification.keep_sure(rows);
    verification.measure(rows);
    const int64_t n = static_cast<int64_t>(rows.size());
    std::vector<Outcome> outcomes(n);
    parallel_for(n, kGrainBlocks / 4, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) outcomes[i] = test(verification, rows[i]);
    });
    std::vector<Residual> residuals;
    std::vector<Residual*> recovering;
    std::vector<int64_t> whose;
    for (int64_t i = 0; i < n; ++i) {
      if (outcomes[i] == Outcome::kRecovering) residuals.push_back({&rows[i], 1.0f}), whose.push_back(i);
    }
    for (Residual& residual : residuals) recovering.push_back(&residual);
    weigh(recovering);
    parallel_for(static_cast<int64_t>(whose.size()), kGrainBlocks / 4, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) outcomes[whose[i]] = recover(verification, residuals[i]);
    });
    for (int64_t i = 0; i < n; ++i) {
      if (outcomes[i] == Outcome::kKept) walking.push_back(rows[i].sequence);
    }
  }
}

}  // namespace specdec::cpu
