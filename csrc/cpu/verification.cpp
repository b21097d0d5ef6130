#include "verification.h"

#include <algorithm>
#include <numeric>

#include "../common/parallel.h"

namespace specdec::cpu {
namespace {

constexpr int64_t kSequencesAtOnce = 1024;  // few enough for the records of their rows to stay in the cache

}  // namespace

Row row_at(const LogitRows& rows, int64_t b, int64_t j) { return {rows.row(b, j), rows.dtype, rows.vocabulary}; }

float Residual::total() const { return std::accumulate(mass.begin(), mass.end(), 0.0f); }

void weigh(const std::vector<Residual*>& residuals) {
  if (residuals.empty()) return;
  const BlockKernels& kernel = block_kernels();
  const int64_t blocks = residuals[0]->row->p_row.num_blocks();
  for (Residual* residual : residuals) residual->mass.resize(blocks);
  parallel_for(static_cast<int64_t>(residuals.size()) * blocks, kGrainBlocks / 2, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      Residual& residual = *residuals[i / blocks];
      const VerifiedRow& row = *residual.row;
      const int64_t block = i % blocks;
      int64_t first = 0, last = 1;
      if (row.q.ids != nullptr) row.q.entries(block, &first, &last);
      if (first == last) {  // q = 0 in this block, and the sum of p is known
        const BlockStats& of_block = row.p.blocks[block];
        residual.mass[block] =
            residual.w * of_block.sum * probability(of_block.max, row.p.inverse_temperature, row.p.lse);
      } else {
        residual.mass[block] = kernel.residual_sum(row.p_row, row.p.distribution(), residual.w, row.q, block);
      }
    }
  });
}

int64_t draw_residual(const Residual& residual, Noise noise) {
  const VerifiedRow& row = *residual.row;
  const BlockKernels& kernel = block_kernels();
  const int64_t block = kernel.draw_index(residual.mass.data(), residual.mass.size(), noise, kRecoverBlock);
  return kernel.draw_residual(row.p_row, row.p.distribution(), residual.w, row.q, block, noise);
}

Verification::Verification(const SpeculativeStepParams& step) : params(step), rows_(step.num_drafts_max + 1) {}

std::vector<VerifiedRow> Verification::rows_at(const std::vector<int64_t>& sequences, int64_t j) const {
  std::vector<VerifiedRow> rows(sequences.size());
  for (size_t i = 0; i < rows.size(); ++i) {
    const int64_t b = sequences[i], position = params.position[b];
    const int64_t* drafts = params.draft_tokens + b * params.num_drafts_max;
    VerifiedRow& row = rows[i];
    row.sequence = b, row.j = j;
    row.p_row = row_at(params.target, b, j);
    row.p_row.allowed = params.allowed.row(params.mask_of_target(b, j), nullptr);
    row.p_patches = patches_of(params.sampling, b, row.p_row, nullptr, position, drafts, j);
    set_patches(row.p_row, row.p_patches);
    row.draft = draft_at(b, j, &row.flags);
    if (row.draft < 0 || !has_full_q(b)) continue;
    row.q = q_of(b, j);
    if (row.q.row.data == nullptr) continue;
    row.q_patches = patches_of(params.sampling, b, row.q.row, params.d2t, position, drafts, j);
    set_patches(row.q.row, row.q_patches);
  }
  return rows;
}

void Verification::measure(std::vector<VerifiedRow>& rows) {
  const int64_t n = static_cast<int64_t>(rows.size());
  std::vector<RowTask> tasks(2 * n);  // the target's rows, then the draft's rows whose statistics are needed
  for (int64_t i = 0; i < n; ++i) {
    const VerifiedRow& row = rows[i];
    tasks[i] = task_of(params.sampling, row.sequence, row.p_row);
    tasks[i].raw = params.log_probs != nullptr;
    tasks[i].weighed = params.rule != kRuleCoupled || tasks[i].raw;
    const bool given = row.q.row.data == nullptr || params.draft_lse != nullptr;
    if (!given) tasks[n + i] = task_of(params.sampling, row.sequence, row.q.row);
  }
  const StatsOfRows& stats = stats_.emplace_back(tasks);
  for (int64_t i = 0; i < n; ++i) {
    rows[i].p = stats[i];
    if (const int32_t fault = row_fault(stats[i].max, stats[i].inverse_temperature)) {
      rows[i].flags = fault, rows[i].faulty = true, rows[i].draft = -1;
    } else if (rows[i].draft >= 0 && !rows[i].greedy() && params.rule != kRuleCoupled) {
      test_draft(rows[i], tasks[n + i].row.data == nullptr ? nullptr : &stats[n + i]);
    }
  }
}

std::vector<VerifiedRow> Verification::read(const std::vector<int64_t>& sequences, int64_t j) {
  std::vector<VerifiedRow> rows = rows_at(sequences, j);
  measure(rows);
  return rows;
}

// The draft token of row j if there is one, else -1.
int64_t Verification::draft_at(int64_t b, int64_t j, int32_t* flags) const {
  const int64_t k = params.num_drafts_max;
  if (j >= (params.num_drafts == nullptr ? k : std::min(params.num_drafts[b], k))) return -1;
  const int64_t x = params.draft_tokens[b * k + j];
  if (x >= 0 && x < params.vocabulary) return x;
  if (x != -1) *flags |= kDraftOutOfRange;
  return -1;
}

// Greedy sequences treat drafts as one-hot, whatever q is.
bool Verification::has_full_q(int64_t b) const {
  return params.draft.data != nullptr && params.sampling.temperature[b] != 0.0f;
}

// q of row j; without lse and cutoff, unless drafting handed them over.
DraftDistribution Verification::q_of(int64_t b, int64_t j) const {
  const int64_t at = b * params.num_drafts_max + j;
  if (!has_full_q(b)) return {{}, {}, params.draft_tokens + at, 1};
  Distribution distribution = {1.0f / params.sampling.temperature[b], 0.0f, -INFINITY};
  if (params.draft_lse != nullptr)
    distribution.lse = params.draft_lse[at], distribution.cutoff = params.draft_cutoff[at];
  Row row = row_at(params.draft, b, j);
  row.allowed = params.allowed.row(params.mask_of_draft(b, j), params.d2t);
  return {row, distribution, params.d2t, params.draft.vocabulary};
}

// Computes what the test of a row's draft needs, or finds that its q is not a distribution.
void Verification::test_draft(VerifiedRow& row, const RowStats* q_stats) const {
  if (!has_full_q(row.sequence)) row.q = q_of(row.sequence, row.j);
  if (row.q.row.data != nullptr) {
    // draft_step returns NaN for a row that has no distribution.
    const int32_t fault =
        q_stats != nullptr ? row_fault(q_stats->max, q_stats->inverse_temperature) : row_fault(row.q.distribution.lse);
    if (fault != 0) {
      row.flags |= fault << kDraftFlagShift;
      row.draft = -1;
      return;
    }
    if (q_stats != nullptr) row.q.distribution = q_stats->distribution();
  }
  row.log_p_x = log_probability(logit_at(row.p_row, row.draft), row.p.distribution());
  row.log_q_x = row.q.log_probability(row.draft);
  if (row.log_q_x == -INFINITY) row.flags |= kDraftZeroProbability;
}

float Verification::ratio_bound(int64_t b, int64_t j) const {
  int32_t flags = 0;
  if (draft_at(b, j, &flags) < 0) return 0.0f;
  const DraftDistribution q = q_of(b, j);
  // Without lse, or with penalties, q(x) is not known before its row is read.
  if (q.row.data != nullptr && (params.draft_lse == nullptr || params.sampling.has_table)) return INFINITY;
  return expf(-q.log_probability(params.draft_tokens[b * params.num_drafts_max + j]));
}

float Verification::uniform_at(int64_t b, int64_t j) const {
  const Noise n = noise(b, j);
  return uniform(philox(n.seed, 0, n.position, n.offset, kAccept).word[0]);
}

int64_t Verification::draw_target(const VerifiedRow& row) const {
  return draw(row.p_row, row.p, noise(row.sequence, row.j), kRecoverBlock, kRecoverToken);
}

int64_t Verification::draw_residual(const Residual& residual) const {
  return cpu::draw_residual(residual, noise(residual.row->sequence, residual.row->j));
}

int64_t Verification::draw_race(const VerifiedRow& row) const {
  const Noise n = noise(row.sequence, row.j);
  return draw_coupled(row.p_row, row.p, nullptr, {n.seed, n.position + n.offset, 0});
}

void Verification::keep(const VerifiedRow& row) {
  emit(row, row.draft);
  params.num_accepted[row.sequence] = static_cast<int32_t>(row.j + 1);
}

void Verification::finish(const VerifiedRow& row, int64_t token) {
  params.status[row.sequence] |= row.flags;
  if (token >= 0) emit(row, token);
}

void Verification::emit(const VerifiedRow& row, int64_t token) {
  const int64_t at = row.sequence * rows_ + row.j;
  params.tokens[at] = token;
  params.num_emitted[row.sequence] = static_cast<int32_t>(row.j + 1);
  if (params.log_probs == nullptr) return;
  params.log_probs[at] = row.greedy() ? 0.0f : log_probability(logit_at(row.p_row, token), row.p.distribution());
  params.raw_log_probs[at] = logit_at(row.p_row.raw(), token) - row.p.raw_lse;
}

Noise Verification::noise(int64_t b, int64_t j) const {
  return {static_cast<uint64_t>(params.seed[b]), static_cast<uint32_t>(params.position[b]), static_cast<uint32_t>(j)};
}

void speculative_step(const SpeculativeStepParams& params) {
  const int64_t slots = params.batch * (params.num_drafts_max + 1);
  std::fill_n(params.tokens, slots, int64_t{-1});
  std::fill_n(params.num_accepted, params.batch, 0);
  std::fill_n(params.num_emitted, params.batch, 0);
  std::fill_n(params.status, params.batch, 0);
  if (params.log_probs != nullptr) {
    std::fill_n(params.log_probs, slots, NAN);
    std::fill_n(params.raw_log_probs, slots, NAN);
  }
  for (int64_t first = 0; first < params.batch; first += kSequencesAtOnce) {
    Verification verification(params);
    std::vector<int64_t> greedy, sampled;
    for (int64_t b = first; b < std::min(first + kSequencesAtOnce, params.batch); ++b) {
      (params.rule == kRuleBlock && params.sampling.temperature[b] == 0.0f ? greedy : sampled).push_back(b);
    }
    switch (params.rule) {
      case kRuleToken:
        verify_token(verification, sampled);
        break;
      case kRuleBlock:
        verify_token(verification, greedy);
        verify_block(verification, sampled);
        break;
      case kRuleCoupled:
        verify_coupled(verification, sampled);
        break;
      default:
        return;  // rule_of (arguments.h) refuses others
    }
  }
}

}  // namespace specdec::cpu
