// What the accept rules share: reading rows when they are needed, weighing residuals, drawing and writing tokens.
#pragma once

#include <deque>
#include <vector>

#include "operations.h"
#include "sampling.h"

namespace specdec::cpu {

// Row j of one sequence after it was read: p, and q of the draft that is tested there.
struct VerifiedRow {
  int64_t sequence, j;
  RowStats p;
  Row p_row;
  int64_t draft = -1;        // the token that is tested; -1 if there is none
  DraftDistribution q = {};  // set if there is a draft and the sequence is not greedy
  float log_p_x, log_q_x;    // of the draft; set like q
  int32_t flags = 0;         // faults of the row, as Status
  bool faulty = false;       // p has no distribution
  std::vector<Patch> p_patches, q_patches;

  bool greedy() const { return p.inverse_temperature == 0.0f; }
};

// A residual max(0, w p - q).
struct Residual {
  const VerifiedRow* row;
  float w;
  std::vector<float> mass = {};  // of every block

  float total() const;
};

// Sums residuals over blocks, and draws a token from one.
void weigh(const std::vector<Residual*>& residuals);
int64_t draw_residual(const Residual& residual, Noise noise);

Row row_at(const LogitRows& rows, int64_t b, int64_t j);

// The verification of some sequences of a batch.
class Verification {
 public:
  explicit Verification(const SpeculativeStepParams& params);

  // Row j of these sequences, not read yet.
  std::vector<VerifiedRow> rows_at(const std::vector<int64_t>& sequences, int64_t j) const;
  // Keeps drafts whose acceptance is sure without p. Removes their rows, and returns their sequences.
  std::vector<int64_t> keep_sure(std::vector<VerifiedRow>& rows);
  // Finds p and q. What the rows refer to lives as long as this object.
  void measure(std::vector<VerifiedRow>& rows);
  std::vector<VerifiedRow> read(const std::vector<int64_t>& sequences, int64_t j);  // rows, measured

  float uniform_at(int64_t b, int64_t j) const;  // u in (0, 1), which tests draft j
  // An upper bound of p(x) / q(x) for the draft of row j, without reading the row; 0 if there is no draft.
  float ratio_bound(int64_t b, int64_t j) const;
  int64_t draw_target(const VerifiedRow& row) const;
  int64_t draw_residual(const Residual& residual) const;
  int64_t draw_race(const VerifiedRow& row) const;

  void keep(const VerifiedRow& row);                   // its draft is accepted
  void finish(const VerifiedRow& row, int64_t token);  // the sequence ends here, with this token unless it is -1

  const SpeculativeStepParams& params;

 private:
  int64_t draft_at(int64_t b, int64_t j, int32_t* flags) const;
  bool has_full_q(int64_t b) const;  // q is more than one-hot
  DraftDistribution q_of(int64_t b, int64_t j) const;
  void test_draft(VerifiedRow& row, const RowStats* q_stats) const;
  void emit(const VerifiedRow& row, int64_t token);
  Noise noise(int64_t b, int64_t j) const;

  const int64_t rows_;             // per sequence: K + 1
  std::deque<StatsOfRows> stats_;  // of all rows that were read
};

// The rules. verify_block takes no greedy sequences: `token` decides those in the same way.
void verify_token(Verification& verification, std::vector<int64_t> sequences);
void verify_block(Verification& verification, std::vector<int64_t> sequences);
void verify_coupled(Verification& verification, std::vector<int64_t> sequences);

}  // namespace specdec::cpu
