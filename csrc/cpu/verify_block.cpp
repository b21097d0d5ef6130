// Rule `block` (Sun et al., arXiv 2403.10444, Algorithm 2): keeps the longest prefix that passes its test.
//
// A prefix passes with probability h, which is at most its joint ratio w and needs a sum over the row after the prefix.
// To save work, rows are read forwards only while some longer prefix may still pass (1 / q bounds the growth of w
// without reading p). Then sums are taken backwards, from the longest prefix with u < w, until a prefix passes. This
// does not change which prefix is kept.
#include <algorithm>

#include "../common/parallel.h"
#include "verification.h"

namespace specdec::cpu {
namespace {

struct Sequence {
  int64_t b;
  std::vector<VerifiedRow> rows;  // as many as were read
  std::vector<float> w = {1.0f};  // joint ratio of every prefix of the drafts that were tested
  int64_t length = 0;             // of the prefix that is being decided
  bool forced = false;            // it is kept without a test
  Residual residual = {};

  const VerifiedRow& row() const { return rows[length]; }
};

// Whether a prefix that reaches beyond the rows read so far may pass.
bool may_go_on(const Verification& verification, const Sequence& sequence) {
  float bound = sequence.w.back();
  for (int64_t length = static_cast<int64_t>(sequence.rows.size()); bound > 0.0f; ++length) {
    if (verification.uniform_at(sequence.b, length - 1) < bound) return true;
    const float ratio = verification.ratio_bound(sequence.b, length);
    if (ratio == 0.0f) return false;                 // no more drafts
    bound = std::min(1.0f, 1.001f * bound * ratio);  // 1.001 allows for rounding
  }
  return false;
}

void read_forwards(Verification& verification, std::vector<Sequence>& sequences) {
  std::vector<int64_t> walking, index;
  for (size_t i = 0; i < sequences.size(); ++i) walking.push_back(sequences[i].b), index.push_back(i);
  for (int64_t j = 0; !walking.empty(); ++j) {
    std::vector<VerifiedRow> rows = verification.read(walking, j);
    std::vector<int64_t> still_walking, still;
    for (size_t i = 0; i < rows.size(); ++i) {
      Sequence& sequence = sequences[index[i]];
      sequence.rows.push_back(std::move(rows[i]));
      const VerifiedRow& row = sequence.rows.back();
      if (row.draft < 0) continue;
      const bool possible = row.log_q_x > -INFINITY;
      sequence.w.push_back(possible ? joint_ratio(sequence.w.back(), ratio(row.log_p_x, row.log_q_x)) : 0.0f);
      if (may_go_on(verification, sequence)) still_walking.push_back(sequence.b), still.push_back(index[i]);
    }
    walking.swap(still_walking), index.swap(still);
  }
}

// Shortens to the next prefix that may pass; the empty one always does.
void shorten(const Verification& verification, Sequence& sequence) {
  while (sequence.length > 0 &&
         !(verification.uniform_at(sequence.b, sequence.length - 1) < sequence.w[sequence.length])) {
    --sequence.length;
  }
}

void finish(Verification& verification, const Sequence& sequence, int64_t token) {
  for (int64_t i = 0; i < sequence.length; ++i) verification.keep(sequence.rows[i]);
  verification.finish(sequence.row(), token);
}

// Tests the current prefix, whose residual has been weighed. False: another prefix is to be decided instead.
bool decide(Verification& verification, Sequence& sequence) {
  const VerifiedRow& row = sequence.row();
  const float mass = sequence.residual.total();
  if (sequence.length > 0 && !sequence.forced &&
      !(verification.uniform_at(sequence.b, sequence.length - 1) <
        keep_probability(sequence.w[sequence.length], mass))) {
    --sequence.length;
    shorten(verification, sequence);
    return false;
  }
  if (mass > 0.0f) {
    finish(verification, sequence, verification.draw_residual(sequence.residual));
  } else if (possible(row.log_p_x)) {
    // A residual without mass: p and q are equal up to rounding, so the draft is accepted.
    sequence.length += 1;
    sequence.forced = true;
    return false;
  } else {
    finish(verification, sequence, verification.draw_target(row));  // p(x) = 0: the draft must not be accepted
  }
  return true;
}

}  // namespace

void verify_block(Verification& verification, std::vector<int64_t> numbers) {
  std::vector<Sequence> sequences;
  for (int64_t b : numbers) sequences.push_back({b, {}});
  read_forwards(verification, sequences);
  std::vector<Sequence*> undecided;
  for (Sequence& sequence : sequences) {
    sequence.length = static_cast<int64_t>(sequence.rows.size()) - 1;
    shorten(verification, sequence);
    undecided.push_back(&sequence);
  }
  while (!undecided.empty()) {
    std::vector<Residual*> residuals;
    for (Sequence* sequence : undecided) {
      if (sequence->length == static_cast<int64_t>(sequence->rows.size())) {  // a forced prefix
        sequence->rows.push_back(std::move(verification.read({sequence->b}, sequence->length)[0]));
      }
      if (sequence->row().draft < 0) continue;
      sequence->residual = {&sequence->row(), sequence->w[sequence->length]};
      residuals.push_back(&sequence->residual);
    }
    weigh(residuals);
    std::vector<uint8_t> decided(undecided.size(), 1);
    parallel_for(static_cast<int64_t>(undecided.size()), kGrainBlocks / 4, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        Sequence& sequence = *undecided[i];
        if (sequence.row().faulty) {
          finish(verification, sequence, -1);
        } else if (sequence.row().draft < 0) {
          finish(verification, sequence, verification.draw_target(sequence.row()));
        } else {
          decided[i] = decide(verification, sequence);
        }
      }
    });
    std::vector<Sequence*> rest;
    for (size_t i = 0; i < undecided.size(); ++i) {
      if (!decided[i]) rest.push_back(undecided[i]);
    }
    undecided.swap(rest);
  }
}

}  // namespace specdec::cpu
