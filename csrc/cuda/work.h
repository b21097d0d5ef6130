// What the launches of an operation share: its parameters, and the memory in which one launch leaves its results for
// the next.
#pragma once

#include "draws.h"
#include "rows.h"

namespace specdec::cuda {

// Of a whole row: its largest logit, what it keeps, and the sum of the weights of all relative to the largest.
struct alignas(16) RowStats {
  float max, lse, cutoff, sum;
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
  Stats* stats;      // [B, blocks of all rows], by measure; by select, sums of what filters keep
  float* parts;      // [B, blocks of all rows, kParts] largest logits, by measure; null without filters
  Stats* raw;        // [B, K+1, n] of raw logits at temperature 1, by measure; null unless log-probabilities are wanted
  RowStats* rows;    // [B, rows], by select; null without filters
  float* masses;     // [B, K, n] of residuals, by sums; null but with rule `block`
  Candidate* races;  // [B, K+1, n] the winner of each block, by race; null but with rule `coupled`
  char* own;         // [B, kStepMemories, memory_size()] instead of shared memory, or null

  // What a sequence has: rows, of which K+1 can be emitted from, and blocks, n in each of these.
  static Scratch cut(Arena& arena, int64_t batch, int64_t rows, int64_t emitting, int64_t blocks, int64_t n,
                     bool filters, bool log_probs, bool sums, bool races) {
    Scratch scratch = {};
    scratch.stats = arena.take<Stats>(batch * blocks);
    if (filters) scratch.parts = arena.take<float>(batch * blocks * kParts);
    if (log_probs) scratch.raw = arena.take<Stats>(batch * emitting * n);
    if (filters) scratch.rows = arena.take<RowStats>(batch * rows);
    if (sums) scratch.masses = arena.take<float>(batch * (emitting - 1) * n);
    if (races) scratch.races = arena.take<Candidate>(batch * emitting * n);
    return scratch;
  }
};

// Whether all blocks begin at, and rows end with, a multiple of 16 bytes.
SPECDEC_HD bool aligned(const LogitRows& rows) {
  const uint64_t all = reinterpret_cast<uintptr_t>(rows.data) | static_cast<uint64_t>(rows.sequence_stride) |
                       static_cast<uint64_t>(rows.row_stride) |
                       static_cast<uint64_t>(rows.vocabulary * size_in_bytes(rows.dtype));
  return all % 16 == 0;
}

struct Filters {
  float top_k, top_p, min_p;

  SPECDEC_HD bool any() const { return top_k > 0.0f || top_p < 1.0f || min_p > 0.0f; }
};

SPECDEC_DEVICE Filters filters_of(const SamplingArguments& sampling, int64_t b) {
  if (sampling.filters == nullptr) return {0.0f, 1.0f, 0.0f};
  return {sampling.filters[3 * b], sampling.filters[3 * b + 1], sampling.filters[3 * b + 2]};
}

// The argument of the kernels of draft_step. Its one row is row 0.
struct DraftWork {
  DraftStepParams params;
  Scratch scratch;
  int64_t first;  // sequence of the launch
  int n;          // blocks of a row

  static DraftWork of(const DraftStepParams& params) { return {params, {}, 0, blocks_of(params.vocabulary)}; }
  Scratch cut(Arena& arena) const {
    return Scratch::cut(arena, params.batch, 1, 1, n, n, params.sampling.filters != nullptr, false, false,
                        params.coupled);
  }
  SPECDEC_HD bool adjusts() const { return params.sampling.has_table || params.allowed.words != nullptr; }
  // Whether kernels for plain rows can do it.
  bool plain() const { return !adjusts(); }
  SPECDEC_HD LogitRows logits() const { return {params.logits, params.dtype, params.row_stride, 0, params.vocabulary}; }
  SPECDEC_HD Dtype dtype() const { return params.dtype; }
  SPECDEC_HD bool whole_vectors() const { return aligned(logits()); }
  SPECDEC_HD int rows() const { return 1; }
  SPECDEC_HD int emitting() const { return 1; }
  SPECDEC_HD int blocks(int) const { return n; }
  SPECDEC_HD int64_t place(int64_t b, int) const { return b * n; }
  SPECDEC_DEVICE bool used(int64_t, int) const { return true; }
  SPECDEC_DEVICE Row row(int64_t b, int) const {
    const bool counted = params.drafts != nullptr;
    return {params.logits + b * params.row_stride,
            params.dtype,
            params.vocabulary,
            params.d2t,
            &params.sampling,
            b,
            params.position[b],
            counted ? params.drafts + b * params.offset : nullptr,
            counted ? params.offset : 0,
            params.allowed.row(b, params.d2t)};
  }
  SPECDEC_DEVICE Noise noise(int64_t b, int) const {
    return {static_cast<uint64_t>(params.seed[b]), static_cast<uint32_t>(params.position[b]),
            static_cast<uint32_t>(params.offset)};
  }
};

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

SPECDEC_HD bool weighs_drafts(const SpeculativeStepParams& params) {
  return params.draft.data != nullptr && params.draft_lse == nullptr && params.rule != kRuleCoupled;
}

// The same of speculative_step. Rows 0 .. K are the target's; those after them the draft's, if they are weighed, that
// is, if their statistics were not handed over.
struct StepWork {
  SpeculativeStepParams params;
  Scratch scratch;
  int64_t first;
  int n, draft_n;  // blocks of a row of the target, and of the draft

  static StepWork of(const SpeculativeStepParams& params) {
    return {params, {}, 0, blocks_of(params.vocabulary), blocks_of(params.draft.vocabulary)};
  }
  Scratch cut(Arena& arena) const {
    Scratch scratch =
        Scratch::cut(arena, params.batch, rows(), emitting(), place(1, 0), n, params.sampling.filters != nullptr,
                     params.log_probs != nullptr, params.rule == kRuleBlock, params.rule == kRuleCoupled);
    if (memory_size() > kMostShared) scratch.own = arena.take<char>(params.batch * kStepMemories * memory_size());
    return scratch;
  }
  SPECDEC_HD int64_t memory_size() const {
    Arena arena(nullptr);
    StepMemory::cut(arena, k(), n);
    return arena.size();
  }
  SPECDEC_HD bool adjusts() const { return params.sampling.has_table || params.allowed.words != nullptr; }
  // Whether kernels for plain rows can do it.
  bool plain() const {
    const bool other_q = params.rule != kRuleCoupled && params.draft.data != nullptr &&
                         (params.draft.dtype != params.target.dtype || params.d2t != nullptr);
    return !adjusts() && !other_q && params.log_probs == nullptr && memory_size() <= kMostShared;
  }
  SPECDEC_HD Dtype dtype() const { return params.target.dtype; }
  SPECDEC_HD bool whole_vectors() const {
    return aligned(params.target) && (params.draft.data == nullptr || aligned(params.draft));
  }
  SPECDEC_HD int k() const { return static_cast<int>(params.num_drafts_max); }
  SPECDEC_HD int emitting() const { return k() + 1; }
  SPECDEC_HD int rows() const { return k() + 1 + (weighs_drafts(params) ? k() : 0); }
  SPECDEC_HD int blocks(int i) const { return i <= k() ? n : draft_n; }
  // Of the statistics of row i's first block.
  SPECDEC_HD int64_t place(int64_t b, int i) const {
    const int64_t of_target = int64_t{k() + 1} * n, of_drafts = int64_t{rows() - k() - 1} * draft_n;
    return b * (of_target + of_drafts) + (i <= k() ? int64_t{i} * n : of_target + int64_t{i - k() - 1} * draft_n);
  }
  // How many of the drafts count.
  SPECDEC_DEVICE int limit(int64_t b) const {
    if (params.num_drafts == nullptr) return k();
    const int64_t asked = params.num_drafts[b];
    return asked < 0 ? 0 : asked > k() ? k() : static_cast<int>(asked);
  }
  // Whether drafts lead to a row of the target; whether q is needed of a row of the draft. Greedy sequences treat
  // drafts as one-hot.
  SPECDEC_DEVICE bool used(int64_t b, int i) const {
    if (i == 0) return true;
    const int last = limit(b);
    return i <= k() ? i <= last : i - k() - 1 < last && params.sampling.temperature[b] != 0.0f;
  }
  SPECDEC_DEVICE Row row_of(const LogitRows& rows, const int64_t* d2t, int64_t b, int j, int64_t mask) const {
    return {rows.row(b, j),
            rows.dtype,
            rows.vocabulary,
            d2t,
            &params.sampling,
            b,
            params.position[b],
            drafts(b),
            j,
            params.allowed.row(mask, d2t)};
  }
  SPECDEC_DEVICE Row target_row(int64_t b, int j) const {
    return row_of(params.target, nullptr, b, j, params.mask_of_target(b, j));
  }
  SPECDEC_DEVICE Row draft_row(int64_t b, int j) const {
    return row_of(params.draft, params.d2t, b, j, params.mask_of_draft(b, j));
  }
  SPECDEC_DEVICE Row row(int64_t b, int i) const { return i <= k() ? target_row(b, i) : draft_row(b, i - k() - 1); }
  SPECDEC_DEVICE const int64_t* drafts(int64_t b) const { return params.draft_tokens + b * params.num_drafts_max; }
  SPECDEC_DEVICE Noise noise(int64_t b, int j) const {
    return {static_cast<uint64_t>(params.seed[b]), static_cast<uint32_t>(params.position[b]), static_cast<uint32_t>(j)};
  }
};

// By a warp: the statistics of a row from those of its blocks, in an order that depends on their number alone.
// `scale`: log2(e) / temperature.
SPECDEC_DEVICE RowStats merged(const Stats* stats, int n, float inverse_temperature, float scale) {
  constexpr int kAtOnce = 5;  // loads before the first of them is used
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
  return {max, max * inverse_temperature + logf(sum), -INFINITY, sum};
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
