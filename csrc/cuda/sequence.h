// A sequence in a step: its memory, rows and drafts.
#pragma once

#include <optional>

#include "select.h"
#include "statistics.h"

namespace specdec::cuda {

// The state of a sequence at a row where its kept drafts end.
enum State : int32_t {
  kDone = 0,     // nothing is left to do
  kDraw = 1,     // a token is to be drawn from p
  kRecover = 2,  // a token is to be drawn from max(0, w p - q)
};

// What the test of a row's draft needs.
struct Examined {
  float log_p, log_q;  // of the draft, if state is kRecover. `look` stores its logits here until lse is known
  float u;             // the random number that tests it
  int16_t flags;       // Status
  int16_t state;       // of the sequence, if no more drafts are kept

  SPECDEC_HD bool possible() const { return state == kRecover && log_q > -INFINITY; }
  SPECDEC_HD bool kept() const { return possible() && accept(u, log_p, log_q); }
};

// The memory of one sequence. Its rows are the target's K+1, then the draft's rows if they are weighed.
struct StepMemory {
  Ring ring;
  float *max, *mass;              // [rows, blocks]
  float *raw_max, *raw_sum;       // [K+1, blocks], of raw logits at temperature 1; null if not wanted
  float *row_max, *lse, *cutoff;  // [rows]
  Examined* examined;             // [K+1]
  float* residual;                // [1 or K, blocks] masses; K rows with rule `block`
  float* total;                   // [1 or K] sums of these
  int64_t* favourite;             // [K+1] the tokens that the target picks (greedy, and rule `coupled`)
  Candidate* best;                // [K+1, warps of the cluster], rule `coupled`
  Candidate* drawn;               // [warps]
  SelectionMemory* selection;
  int n;  // blocks in a row

  // The items that a sequence has, and the memory that it needs.
  static Items items(const SpeculativeStepParams& params);
  static StepMemory cut(Arena& arena, const SpeculativeStepParams& params, const Items& items, const Cut& cut);
  // What is left to read when the rows are measured: a residual's two rows, or with rule `coupled` all of the target's.
  static Items deciding(const SpeculativeStepParams& params, const Items& items);
  Statistics statistics() const { return Statistics::of(max, mass, row_max); }
  // The rows to measure, if that takes neither masks, bias and penalties nor raw logits.
  static std::optional<StatisticsParams> to_measure(const SpeculativeStepParams& params);

  SPECDEC_DEVICE StepMemory at(char* base) const {
    return {ring.at(base),         moved(max, base),      moved(mass, base),      moved(raw_max, base),
            moved(raw_sum, base),  moved(row_max, base),  moved(lse, base),       moved(cutoff, base),
            moved(examined, base), moved(residual, base), moved(total, base),     moved(favourite, base),
            moved(best, base),     moved(drawn, base),    moved(selection, base), n};
  }
};

SPECDEC_HD bool weighs_drafts(const SpeculativeStepParams& params) {
  return params.draft.data != nullptr && params.draft_lse == nullptr && params.rule != kRuleCoupled;
}

// Whether the ring brings the rows of residuals, the target's and the draft's in pairs.
SPECDEC_HD bool copies_residuals(const SpeculativeStepParams& params, const Ring& ring) {
  return ring.num_slots >= 2 && !ring.stay && params.d2t == nullptr && params.draft.data != nullptr;
}

inline Items StepMemory::items(const SpeculativeStepParams& params) {
  const LogitRows &target = params.target, &draft = params.draft;
  const int of_target = block_bytes(target), of_draft = draft.data == nullptr ? 0 : block_bytes(draft);
  const int bytes = of_target > of_draft ? of_target : of_draft;
  const int64_t blocks = (params.num_drafts_max + 1) * blocks_of(params.vocabulary);
  const bool others = draft.data == nullptr || params.d2t != nullptr || params.allowed.words != nullptr;
  const int own_copy =
      own_copy_of(params.sampling, others, aligned(target) && (draft.data == nullptr || aligned(draft)), bytes);
  if (!weighs_drafts(params)) return {blocks, bytes, own_copy};
  return {blocks + params.num_drafts_max * blocks_of(draft.vocabulary), bytes, own_copy};
}

inline StepMemory StepMemory::cut(Arena& arena, const SpeculativeStepParams& params, const Items& items,
                                  const Cut& cut) {
  const int64_t k = params.num_drafts_max, rows = k + 1 + (weighs_drafts(params) ? k : 0);
  StepMemory memory = {};
  memory.ring = ring_of(arena, items, cut);
  const int64_t n = memory.n = blocks_of(params.vocabulary);
  memory.max = arena.take<float>(rows * n), memory.mass = arena.take<float>(rows * n);
  if (params.log_probs != nullptr) {
    memory.raw_max = arena.take<float>((k + 1) * n), memory.raw_sum = arena.take<float>((k + 1) * n);
  }
  memory.row_max = arena.take<float>(rows), memory.lse = arena.take<float>(rows);
  memory.cutoff = arena.take<float>(rows);
  memory.examined = arena.take<Examined>(k + 1);
  const int64_t residuals = params.rule == kRuleBlock ? k : params.rule == kRuleToken ? 1 : 0;
  memory.residual = arena.take<float>(residuals * n), memory.total = arena.take<float>(residuals);
  memory.favourite = arena.take<int64_t>(k + 1);
  if (params.rule == kRuleCoupled) memory.best = arena.take<Candidate>((k + 1) * cut.all_warps);
  memory.drawn = arena.take<Candidate>(cut.warps);
  if (params.sampling.filters != nullptr) memory.selection = arena.take<SelectionMemory>(1);
  return memory;
}

inline Items StepMemory::deciding(const SpeculativeStepParams& params, const Items& items) {
  Items left = items;
  const int64_t k = params.num_drafts_max;
  const int64_t rows = params.rule == kRuleCoupled ? k + 1 : params.rule == kRuleBlock ? 2 * k : k > 0 ? 2 : 0;
  left.most = rows * blocks_of(params.vocabulary);
  return left;
}

inline std::optional<StatisticsParams> StepMemory::to_measure(const SpeculativeStepParams& params) {
  const SamplingArguments& sampling = params.sampling;
  const bool weighs = weighs_drafts(params);
  if (sampling.has_table || params.allowed.words != nullptr || params.log_probs != nullptr) return {};
  if (weighs && params.d2t != nullptr) return {};
  const int k = static_cast<int>(params.num_drafts_max);
  return StatisticsParams{
      params.target,        params.draft,     params.batch, k + 1, weighs ? k : 0, blocks_of(params.vocabulary),
      sampling.temperature, params.num_drafts};
}

using StepWork = Work<SpeculativeStepParams, StepMemory>;

// What every thread of a cluster knows of its sequence.
struct Sequence {
  const SpeculativeStepParams& params;
  StepMemory memory;
  char* own_copy;  // as in Row
  int64_t b;
  bool measures;  // whether this launch measures the rows
  int limit;      // how many of its drafts count
  float temperature, inverse_temperature;

  SPECDEC_DEVICE bool greedy() const { return temperature == 0.0f; }
  // Whether drafts are compared with what the target picks.
  SPECDEC_DEVICE bool favours() const { return greedy() || params.rule == kRuleCoupled; }
  // Whether logits count otherwise than they are given.
  SPECDEC_DEVICE bool adjusts() const { return params.sampling.has_table || params.allowed.words != nullptr; }
  SPECDEC_DEVICE const int64_t* drafts() const { return params.draft_tokens + b * params.num_drafts_max; }
  // Items are the blocks of target rows 0 .. limit, then those of draft rows that are weighed.
  SPECDEC_DEVICE int target_items() const { return (limit + 1) * memory.n; }
  SPECDEC_DEVICE int items() const { return target_items() + draft_rows() * blocks_of(params.draft.vocabulary); }
  // The number of draft rows that are weighed; greedy sequences treat drafts as one-hot.
  SPECDEC_DEVICE int draft_rows() const { return weighs_drafts(params) && !greedy() ? limit : 0; }
  SPECDEC_DEVICE Row target_row(int64_t j) const {
    return {params.target.row(b, j),
            params.target.dtype,
            params.vocabulary,
            nullptr,
            &params.sampling,
            b,
            params.position[b],
            drafts(),
            j,
            memory.ring.kept(),
            static_cast<int>(j) * memory.n,
            own_copy,
            &params.allowed,
            static_cast<int>(params.mask_of_target(b, j))};
  }
  SPECDEC_DEVICE Row draft_row(int64_t j) const {
    const bool weighed = weighs_drafts(params);
    return {params.draft.row(b, j),
            params.draft.dtype,
            params.draft.vocabulary,
            params.d2t,
            &params.sampling,
            b,
            params.position[b],
            drafts(),
            j,
            weighed ? memory.ring.kept() : Kept{nullptr, 0, 0},
            target_items() + static_cast<int>(j) * blocks_of(params.draft.vocabulary),
            own_copy,
            &params.allowed,
            static_cast<int>(params.mask_of_draft(b, j))};
  }
  SPECDEC_DEVICE Row row_of_item(int item) const {
    const int of_drafts = item - target_items();
    return of_drafts < 0 ? target_row(item / memory.n) : draft_row(of_drafts / blocks_of(params.draft.vocabulary));
  }
  SPECDEC_DEVICE Measured measured() const {
    const auto rows_of = [&](const LogitRows& rows) {
      return Rows{rows.row(b, 0), rows.row_stride, rows.vocabulary, rows.dtype};
    };
    return {rows_of(params.target), rows_of(params.draft), target_items(), items()};
  }
  // Row i in the numbering of StepMemory.
  SPECDEC_DEVICE Row row(int64_t i) const {
    return i <= params.num_drafts_max ? target_row(i) : draft_row(i - params.num_drafts_max - 1);
  }
  SPECDEC_DEVICE Blocks blocks(int64_t i) const {
    const int64_t of_drafts = i - (params.num_drafts_max + 1);
    const int n = of_drafts < 0 ? memory.n : blocks_of(params.draft.vocabulary);
    const int64_t at = of_drafts < 0 ? i * n : (params.num_drafts_max + 1) * memory.n + of_drafts * n;
    return {memory.max + at, memory.mass + at, n};
  }
  SPECDEC_DEVICE Distribution p_of(int64_t i) const {
    return {inverse_temperature, simt::read(&memory.lse[i]), simt::read(&memory.cutoff[i])};
  }
  SPECDEC_DEVICE Noise noise(int64_t j) const {
    return {static_cast<uint64_t>(params.seed[b]), static_cast<uint32_t>(params.position[b]), static_cast<uint32_t>(j)};
  }
  // The draft of row j, or -1.
  SPECDEC_DEVICE int64_t draft(int64_t j, int32_t* flags) const {
    const int64_t x = j < limit ? drafts()[j] : -1;
    if (x >= 0 && x < params.vocabulary) return x;
    if (x != -1) *flags |= kDraftOutOfRange;
    return -1;
  }
  // Whether q is given by logits; else drafts are one-hot.
  SPECDEC_DEVICE bool has_q() const { return params.draft.data != nullptr; }
  // Whether q is given by logits for all tokens of the target's vocabulary.
  SPECDEC_DEVICE bool same_vocabulary() const { return has_q() && params.d2t == nullptr; }
  // q of draft row j, given by logits. An lse of NaN means that draft_step found no distribution.
  SPECDEC_DEVICE Distribution q_of(int64_t j) const {
    if (params.draft_lse == nullptr) return p_of(params.num_drafts_max + 1 + j);
    const int64_t at = b * params.num_drafts_max + j;
    return {inverse_temperature, params.draft_lse[at], params.draft_cutoff[at]};
  }
  // The logit in draft row j of the target's token `id`; -inf if the draft's vocabulary lacks it.
  SPECDEC_DEVICE float draft_logit(int64_t j, int64_t id) const {
    const Row row = draft_row(j);
    int64_t index = id;
    if (params.d2t != nullptr) {
      index = find(params.d2t, row.size, id);
      if (params.d2t[index] != id) return -INFINITY;
    }
    return adjusted(row, id, masked_logit(row, index));
  }
};

}  // namespace specdec::cuda
