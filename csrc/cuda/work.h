// What the launches of an operation share: its parameters, and the memory in which one launch leaves its results for
// the next.
#pragma once

#include "draws.h"
#include "rows.h"

namespace specdec::cuda {

// A temperature T: log2(e) / T is the `scale` of exponents. At 0, which is greedy, all are 0.
struct Temperature {
  float value, inverse, scale;

  SPECDEC_HD explicit Temperature(float value)
      : value(value), inverse(value == 0.0f ? 0.0f : 1.0f / value), scale(inverse * kLog2e) {}
  SPECDEC_HD bool greedy() const { return value == 0.0f; }
};

// Of a whole row: its largest logit, what it keeps, and the sum of the weights of all relative to the largest.
struct alignas(16) RowStats {
  float max, lse, cutoff, sum;

  SPECDEC_HD int32_t fault(Temperature temperature) const { return row_fault(max, temperature.inverse); }
  SPECDEC_HD Distribution distribution(Temperature temperature) const { return {temperature.inverse, lse, cutoff}; }
};

// Cuts memory into pieces. At null, it counts how many bytes are needed.
class Arena {
 public:
  SPECDEC_HD explicit Arena(char* memory) : memory_(memory) {}
  template <class T, class Number>
  SPECDEC_HD T* take(Number n) {
    T* piece = reinterpret_cast<T*>(memory_);
    const Number size = (n * static_cast<Number>(sizeof(T)) + 15) / 16 * 16;
    memory_ += size, size_ += size;
    return piece;
  }
  SPECDEC_HD int64_t size() const { return size_; }

 private:
  char* memory_;
  int64_t size_ = 0;
};

// The pieces of the memory between launches. Every launch writes its own.
struct Scratch {
  Stats* stats;      // [B, rows, n], by measure; by select, sums of what filters keep
  float* parts;      // [B, rows, n, kParts] largest logits, by measure; null without filters
  Stats* raw;        // [B, K+1, n] of raw logits at temperature 1, by measure; null unless log-probabilities are wanted
  RowStats* rows;    // [B, rows], by select; null without filters
  float* masses;     // [B, K, n] of residuals, by sums; null but with rule `block`
  Candidate* races;  // [B, K+1, n] the winner of each block, by race; null but with rule `coupled`
  char* own;         // [B, kStepMemories, memory_size()] instead of shared memory, or null
};

// Whether all blocks begin at, and rows end with, a multiple of 16 bytes.
SPECDEC_HD bool aligned(const LogitRows& rows) {
  const uint64_t all = reinterpret_cast<uintptr_t>(rows.data) | static_cast<uint64_t>(rows.sequence_stride) |
                       static_cast<uint64_t>(rows.row_stride) |
                       static_cast<uint64_t>(rows.vocabulary * size_in_bytes(rows.dtype));
  return all % 16 == 0;
}

// What becomes of a sequence at a row where its kept drafts end.
enum State : int32_t {
  kDone = 0,     // nothing is left to do
  kDraw = 1,     // a token is to be drawn from p
  kRecover = 2,  // a token is to be drawn from max(0, w p - q)
};

// Of a row's draft: the logit under p, that under q or its log-probability, and the random number that tests it.
// `flags`: Status. `state`: of the sequence, if no more drafts are kept.
struct alignas(16) Examined {
  float p, q;
  float u;
  int16_t flags, state;

  SPECDEC_DEVICE bool possible() const { return state == kRecover && q > -INFINITY; }
};

// The memory of a block that decides a sequence, or sums its residuals. It is shared memory, but where a step has
// thousands of drafts.
struct StepMemory {
  Slots* slots;
  RowStats* rows;        // [2 K + 1] of the target and of the draft
  Examined* examined;    // [K+1]
  float* ratio;          // [K] p / q of the drafts, 0 where a draft is not possible
  float* total;          // [K] masses of residuals
  int64_t* favourite;    // [K+1] the tokens that the target picks (greedy, and rule `coupled`)
  float *score, *noise;  // [n], the scores padded to fours
  int32_t* order;        // [n] blocks of logits, in the order in which they are visited

  SPECDEC_HD static StepMemory cut(Arena& arena, int k, int n) {
    return {arena.take<Slots>(1),  arena.take<RowStats>(2 * k + 1), arena.take<Examined>(k + 1), arena.take<float>(k),
            arena.take<float>(k),  arena.take<int64_t>(k + 1),      arena.take<float>(n + 3),    arena.take<float>(n),
            arena.take<int32_t>(n)};
  }
};

constexpr int64_t kMostShared = 40 << 10;
// Blocks of a sequence that have such memory at the same time.
constexpr int kSumsBlocks = 16, kStepMemories = kSumsBlocks + 1;

// The argument of all kernels, of both operations: the one row that draft_step draws from is the target's row 0 of a
// step without drafts, but after some. Rows 0 .. K are the target's; those after them the draft's, if they are weighed,
// that is, if their statistics were not handed over.
struct Work {
  SpeculativeStepParams params;
  int64_t offset = 0;   // of row 0 in its step
  int64_t drafted = 0;  // how many of the step's drafts that are before row 0 count for penalties
  float *log_q = nullptr, *cutoff = nullptr, *lse = nullptr;  // [B], outputs of draft_step
  const int64_t* ids = nullptr;                               // the target's ids of the vocabulary of draft_step
  uint32_t first = 0;                                         // sequence of the launch
  int n = blocks_of(params.vocabulary), draft_n = blocks_of(params.draft.vocabulary);         // blocks of a row
  uint32_t rows = params.num_drafts_max + 1 + (weighs_drafts() ? params.num_drafts_max : 0);  // of a sequence
  Scratch scratch = {};

  static Work of(const DraftStepParams& draft) {
    SpeculativeStepParams params = {};
    params.target = {draft.logits, draft.dtype, draft.row_stride, 0, draft.vocabulary};
    params.draft_tokens = draft.drafts, params.sampling = draft.sampling, params.allowed = draft.allowed;
    params.seed = draft.seed, params.position = draft.position;
    params.batch = draft.batch, params.vocabulary = draft.vocabulary;
    params.rule = draft.coupled ? kRuleCoupled : kRuleToken;
    params.tokens = draft.tokens, params.status = draft.status;
    Work work = {params};
    work.offset = draft.offset, work.drafted = draft.drafts == nullptr ? 0 : draft.offset;
    work.log_q = draft.log_q, work.cutoff = draft.cutoff, work.lse = draft.lse;
    work.ids = draft.d2t;
    return work;
  }
  Scratch cut(Arena& arena) const {
    const int64_t blocks = params.batch * rows * n, of_target = params.batch * emitting() * n;
    Scratch its = {};
    its.stats = arena.take<Stats>(blocks);
    if (params.sampling.filters != nullptr) {
      its.parts = arena.take<float>(blocks * kParts);
      its.rows = arena.take<RowStats>(params.batch * rows);
    }
    if (params.log_probs != nullptr) its.raw = arena.take<Stats>(of_target);
    if (params.rule == kRuleBlock) its.masses = arena.take<float>(params.batch * k() * n);
    if (params.rule == kRuleCoupled) its.races = arena.take<Candidate>(of_target);
    if (memory_size() > kMostShared) its.own = arena.take<char>(params.batch * kStepMemories * memory_size());
    return its;
  }
  SPECDEC_HD int64_t memory_size() const {
    Arena arena(nullptr);
    StepMemory::cut(arena, k(), n);
    return arena.size();
  }

  // Whether kernels for plain rows can measure them, and do the rest.
  bool measured_plainly() const { return !adjusts() && params.log_probs == nullptr && !(weighs_drafts() && other_q()); }
  bool plain() const {
    const bool reads_q = params.rule != kRuleCoupled && params.draft.data != nullptr;
    return !adjusts() && params.log_probs == nullptr && !(reads_q && other_q()) && memory_size() <= kMostShared;
  }
  bool adjusts() const { return params.sampling.has_table || params.allowed.words != nullptr; }
  bool other_q() const { return params.draft.dtype != params.target.dtype || params.d2t != nullptr; }
  bool whole_vectors() const {
    return aligned(params.target) && (params.draft.data == nullptr || aligned(params.draft));
  }

  SPECDEC_HD bool weighs_drafts() const {
    return params.draft.data != nullptr && params.draft_lse == nullptr && params.rule != kRuleCoupled;
  }
  SPECDEC_HD int k() const { return static_cast<int>(params.num_drafts_max); }
  SPECDEC_HD int emitting() const { return k() + 1; }
  SPECDEC_HD int blocks(int i) const { return i <= k() ? n : draft_n; }
  // The place of row i of sequence b among all rows, and that of its block among all blocks, of which each row has n.
  SPECDEC_HD uint64_t place(uint32_t b, uint32_t i) const { return uint64_t{b} * rows + i; }
  SPECDEC_HD uint64_t place(uint32_t b, uint32_t i, uint32_t block) const {
    return place(b, i) * static_cast<uint32_t>(n) + block;
  }
  SPECDEC_DEVICE Stats* stats(uint32_t b, int i) const { return scratch.stats + place(b, i, 0); }
  SPECDEC_DEVICE Stats* raw(uint32_t b, int j) const { return scratch.raw + (uint64_t{b} * emitting() + j) * n; }
  SPECDEC_DEVICE float* masses(uint32_t b, int j) const { return scratch.masses + (uint64_t{b} * k() + j) * n; }
  SPECDEC_DEVICE Candidate* races(uint32_t b, int j) const {
    return scratch.races + (uint64_t{b} * emitting() + j) * n;
  }
  SPECDEC_DEVICE Temperature temperature(uint32_t b) const { return Temperature(params.sampling.temperature[b]); }
  // How many of the drafts count.
  SPECDEC_DEVICE int limit(uint32_t b) const {
    if (params.num_drafts == nullptr) return k();
    const int64_t asked = params.num_drafts[b];
    return asked < 0 ? 0 : asked > k() ? k() : static_cast<int>(asked);
  }
  // Whether drafts lead to a row of the target; whether q is needed of a row of the draft. Greedy sequences treat
  // drafts as one-hot.
  SPECDEC_DEVICE bool used(uint32_t b, int i) const {
    if (i == 0) return true;
    const int last = limit(b);
    return i <= k() ? i <= last : i - k() - 1 < last && params.sampling.temperature[b] != 0.0f;
  }
  SPECDEC_DEVICE Row row_of(const LogitRows& rows, const int64_t* d2t, uint32_t b, uint32_t j, int64_t mask) const {
    return {rows.row(b, j),     rows.dtype,
            rows.vocabulary,    d2t,
            &params.sampling,   b,
            params.position[b], drafts(b),
            j + drafted,        params.allowed.row(mask, d2t)};
  }
  SPECDEC_DEVICE Row target_row(uint32_t b, int j) const {
    return row_of(params.target, ids, b, j, params.mask_of_target(b, j));
  }
  SPECDEC_DEVICE Row draft_row(uint32_t b, int j) const {
    return row_of(params.draft, params.d2t, b, j, params.mask_of_draft(b, j));
  }
  SPECDEC_DEVICE Row row(uint32_t b, int i) const { return i <= k() ? target_row(b, i) : draft_row(b, i - k() - 1); }
  SPECDEC_DEVICE const int64_t* drafts(uint32_t b) const {
    return params.draft_tokens + b * (params.num_drafts_max + drafted);
  }
  SPECDEC_DEVICE Noise noise(uint32_t b, int j) const {
    return {static_cast<uint64_t>(params.seed[b]), static_cast<uint32_t>(params.position[b]),
            static_cast<uint32_t>(offset + j)};
  }
};

// By a warp: the statistics of a row from those of its blocks, in an order that depends on their number alone.
SPECDEC_DEVICE RowStats merged(const Stats* stats, int n, Temperature temperature) {
  constexpr int kAtOnce = 5;  // loads before the first of them is used
  const float scale = temperature.scale;
  float max = -INFINITY, sum = 0.0f;
#pragma unroll 1
  for (int first = lane(); first < n; first += kAtOnce * kWarp) {
    Stats blocks[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int block = first + i * kWarp;
      blocks[i] = block < n ? simt::fresh(&stats[block]) : Stats{-INFINITY, 0.0f};
    }
    const float before = max;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) max = simt::larger(max, blocks[i].max);
    const float reference = max == -INFINITY ? 0.0f : max;
    sum *= weight_of(before, reference, scale);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) sum += mass_of(blocks[i], reference, scale);
  }
  const float of_lane = max;
  max = simt::reduce(max, Larger());
  sum = simt::reduce(sum * weight_of(of_lane, max == -INFINITY ? 0.0f : max, scale), Sum());
  return {max, lse_of(max, temperature.inverse, sum), -INFINITY, sum};
}

// By a warp, when all is measured: the statistics of row i.
SPECDEC_DEVICE RowStats row_stats(const Work& work, uint32_t b, int i, Temperature temperature) {
  if (work.scratch.rows != nullptr) return simt::fresh(&work.scratch.rows[work.place(b, i)]);
  return merged(work.stats(b, i), work.blocks(i), temperature);
}

// By a warp: the token with the row's largest logit, the lowest id of a tie.
template <class Rows>
SPECDEC_DEVICE int64_t argmax(const Row& row, const Stats* stats, int n, float max) {
  const int64_t begin = int64_t{block_of_max(stats, n, max)} * kBlock;
  Candidate first = 0;
#pragma unroll 2
  for (int i = lane(); i < kBlock; i += kWarp) {
    const bool found = begin + i < row.size && Rows::logit(row, begin + i) == max;
    if (found) first = Better()(first, candidate(1.0f, static_cast<uint32_t>(i)));
  }
  return begin + index_of(best_of_warp(first));
}

}  // namespace specdec::cuda
