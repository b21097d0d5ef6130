// Vectorised work on one block of a row, compiled for several instruction sets; the best that this machine has is
// chosen when the first operation runs.
#pragma once

#include <cstdint>

#include "../core/distribution.h"
#include "../core/params.h"
#include "../core/random.h"

namespace specdec::cpu {

// A logit that a penalty, a bias or a ban replaces.
struct Patch {
  int64_t token;
  float logit;
};

// A row of V logits: raw ones, dense, and what replaces some of them, in ascending order of tokens.
struct Row {
  const void* data;
  Dtype dtype;
  int64_t size;  // V
  const Patch* patches = nullptr;
  int64_t num_patches = 0;

  int64_t num_blocks() const { return (size + kBlock - 1) / kBlock; }
  Row raw() const { return {data, dtype, size}; }
};

// Where a draw's random numbers come from.
struct Noise {
  uint64_t seed;
  uint32_t position;
  uint32_t offset;
};

// q of one row: logits over the whole vocabulary, or entries for some tokens, ascending, and 0 elsewhere: a one-hot
// draft, a compact q, or the logits of a reduced vocabulary.
struct DraftDistribution {
  Row row;                    // data null: none
  Distribution distribution;  // of the row
  const int64_t* ids;         // the entries' tokens; null: the row has one for each
  const float* log_q;         // of the entries; null: the row has their logits
  int64_t num_entries;        // of ids

  float log_probability(int64_t token) const;
  // The entries [begin, end) that lie in the block.
  void entries(int64_t block, int64_t* begin, int64_t* end) const;
};

constexpr int kLanes = 32;  // partial sums and maxima of a block: lane i has the logits i, i + 32, ...

// A range of logits, cut into bins that order them: bin 0 has the largest. Either linear in the logits, or in their
// keys.
struct Bins {
  static constexpr int kMost = 256;
  // Of a histogram: neighbours often share a bin, and additions to one place wait for each other.
  static constexpr int kCopies = 4;
  int count;        // of bins
  float low, high;  // the range, closed
  bool linear;
  float scale;        // linear: bins a unit of half the distance from `high`
  uint32_t high_key;  // else: keys from this one down,
  int shift;          // 2^shift to a bin
  bool weigh;         // an element counts as its weight relative to `max`, else as 1
  float max, inverse_temperature;
};

struct Candidate {
  float score;    // largest wins; 0: none
  int64_t token;  // or -1
};

struct BlockKernels {
  const char* instruction_set;
  // The largest logit (NaN if any is) of a block; and of every lane, unless `lanes` is null.
  float (*max)(Row row, int64_t block, float* lanes);
  // The largest logit and the sum of weights relative to it; and the lanes' largest.
  BlockStats (*stats)(Row row, int64_t block, float inverse_temperature, float* lanes);
  // The same sum, relative to `max`, over logits >= cutoff.
  float (*sum_above)(Row row, int64_t block, float max, float inverse_temperature, float cutoff);
  // Adds the block's logits to sums[count + 1][kCopies]; the last bin is for those out of the range.
  void (*histogram)(Row row, int64_t block, const float* lanes, const Bins& bins, double* sums);
  // Widens [low, high] to the block's finite logits in bin `bin`, or in any if it is negative.
  void (*range)(Row row, int64_t block, const Bins& bins, int bin, float* low, float* high);
  // Sum over the block of max(0, w p - q).
  float (*residual_sum)(Row p, Distribution p_distribution, float w, const DraftDistribution& q, int64_t block);
  // Draws a token of the block, weights as in `sum_above`. -1 if all weights are 0.
  int64_t (*draw)(Row row, int64_t block, float max, float inverse_temperature, float cutoff, Noise noise,
                  Stream stream);
  // Draws a token of the block, weights max(0, w p - q).
  int64_t (*draw_residual)(Row p, Distribution p_distribution, float w, const DraftDistribution& q, int64_t block,
                           Noise noise);
  // The block's best token in the flat race of kRace; `ids`: the tokens whose noise the row's entries have, or null.
  Candidate (*race)(Row row, int64_t block, float max, float inverse_temperature, float cutoff, const int64_t* ids,
                    Noise noise);
  // Draws an index in [0, n) with the given weights; -1 if all are 0. The first level of every draw.
  int64_t (*draw_index)(const float* weights, int64_t n, Noise noise, Stream stream);
  // The lowest token of the block whose logit equals `value`.
  int64_t (*find)(Row row, int64_t block, float value);
  // The block as float32, patched. Returns how many logits there are.
  int64_t (*copy)(Row row, int64_t block, float* out);
};

const BlockKernels& block_kernels();

// One logit as float32.
float logit_at(Row row, int64_t token);

}  // namespace specdec::cpu
