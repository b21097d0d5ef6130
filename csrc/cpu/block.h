// Vectorised work on one block of a row, compiled for several instruction sets.
#pragma once

#include <cstdint>

#include "../core/distribution.h"
#include "../core/params.h"
#include "../core/random.h"

namespace specdec::cpu {

// A logit that replaces a raw one, because of a penalty, a bias or a ban.
struct Patch {
  int64_t token;
  float logit;
};

// A row of V raw logits, dense, of which those of tokens that are not allowed count as -inf; and the patches that
// replace some of them, in ascending order of tokens.
struct Row {
  const void* data;
  Dtype dtype;
  int64_t size;  // V
  AllowedTokens allowed = {};
  const Patch* patches = nullptr;
  int64_t num_patches = 0;

  int64_t num_blocks() const { return (size + kBlock - 1) / kBlock; }
  Row raw() const { return {data, dtype, size}; }
};

// What determines a draw's random numbers, besides stream and index.
struct Noise {
  uint64_t seed;
  uint32_t position;
  uint32_t offset;
};

// q of one row: either logits over the whole vocabulary, or ascending entries for some tokens, with q = 0 for all
// others. Entries are the tokens of a reduced vocabulary, or a one-hot draft.
struct DraftDistribution {
  Row row;                    // logits; its data is null for a one-hot draft
  Distribution distribution;  // of the row
  const int64_t* ids;         // tokens of the entries; null: every token of the row is an entry
  int64_t num_entries;        // length of ids

  float log_probability(int64_t token) const;
  float logit(int64_t token) const;       // of a row; -inf for tokens that it lacks
  int64_t entry_of(int64_t token) const;  // -1: none
  // The entries [begin, end) whose tokens lie in the block.
  void entries(int64_t block, int64_t* begin, int64_t* end) const;
};

constexpr int kLanes = 32;  // partial sums and maxima of a block: lane i has the logits i, i + 32, ...

// A thread is worth its cost from about 16 blocks on, some 3 µs of work.
constexpr int64_t kGrainBlocks = 16;

// A range of logits, cut into bins in descending order: bin 0 has the largest logits. Bins are of equal width either in
// the logits or in their keys (ordered_key).
struct Bins {
  static constexpr int kMost = 256;
  // A histogram is kept in several copies, since neighbours often share a bin and additions to one place are serial.
  static constexpr int kCopies = 4;
  int count;        // number of bins
  float low, high;  // the range, closed
  bool linear;
  float scale;        // if linear: bins per unit of (high - logit) / 2
  uint32_t high_key;  // else: the key of `high`, and
  int shift;          // 2^shift keys in a bin
  bool weigh;         // a logit counts as its weight relative to `max`, else as 1
  float max, inverse_temperature;
};

// The logits among which a cutoff is expected; closed, and empty unless it is set.
struct Bracket {
  float low = INFINITY, high = -INFINITY;
};

// A block, split by a bracket.
struct Split {
  static constexpr int kMost = 256;
  float above;    // the sum of the weights of the logits > high, relative to the block's largest logit
  int32_t count;  // of the logits within the bracket; with more than kMost, some are missing
  float logits[kMost + 4 * kLanes];  // these, and -inf up to whole lanes; not set if low == high
};

constexpr int kSampled = 64;  // logits of each block that are a sample of the row

// Bins of a sample, in descending order.
struct SampleBins {
  static constexpr int kCount = 1024;
  float max;    // the largest logit of the sample
  float scale;  // bins per unit
};

struct Candidate {
  float score;    // the largest wins; 0: no candidate
  int64_t token;  // or -1
};

// A race over the single tokens of a row, in one level. The weights are those of `sum_above`.
struct Race {
  float max, inverse_temperature, cutoff;
  const int64_t* ids;  // the target's ids of the row's tokens, which determine their noise, or null if these are the
                       // target's
  Noise noise;
  Stream stream;
};

struct BlockKernels {
  // The largest logit of a block, NaN if any is NaN. Stores every lane's largest in `lanes`, unless that is null.
  float (*max)(Row row, int64_t block, float* lanes);
  // The same with the sum of weights relative to the largest logit.
  BlockStats (*stats)(Row row, int64_t block, float inverse_temperature, float* lanes);
  // The same without `lanes`, and `above`, the sum of the weights of the logits > mark.
  BlockStats (*mark)(Row row, int64_t block, float inverse_temperature, float mark, float* above);
  // The same as `stats`, and splits the block by the bracket.
  BlockStats (*split)(Row row, int64_t block, float inverse_temperature, float* lanes, Bracket bracket, Split* split);
  // Copies the kSampled logits of a whole block that are in the sample of its row.
  void (*sample)(Row row, int64_t block, float* x);
  // Adds a sample of n logits, in whole lanes, to counts[SampleBins::kCount][Bins::kCopies].
  void (*tally)(const float* x, int64_t n, const SampleBins& bins, int32_t* counts);
  // The smallest and the largest logit of a sample's bins first, ..., last.
  Bracket (*sample_range)(const float* x, int64_t n, const SampleBins& bins, int32_t first, int32_t last);
  // The sum of weights relative to `max` over the logits >= cutoff.
  float (*sum_above)(Row row, int64_t block, float max, float inverse_temperature, float cutoff);
  // Adds the block's logits to sums[count + 1][kCopies]; the last bin is for logits out of the range.
  void (*histogram)(Row row, int64_t block, const float* lanes, const Bins& bins, double* sums);
  // Widens [low, high] to include the block's finite logits of bin `bin`, or of all bins if it is negative.
  void (*range)(Row row, int64_t block, const Bins& bins, int bin, float* low, float* high);
  // Sum over the block of max(0, w p - q).
  float (*residual_sum)(Row p_row, Distribution p, float w, const DraftDistribution& q, int64_t block);
  // Draws a token of the block by the weights of `sum_above`; -1 if all are 0.
  int64_t (*draw)(Row row, int64_t block, float max, float inverse_temperature, float cutoff, Noise noise,
                  Stream stream);
  // Draws a token of the block by the weights max(0, w p - q).
  int64_t (*draw_residual)(Row p_row, Distribution p, float w, const DraftDistribution& q, int64_t block, Noise noise);
  // The block's tokens that score at least `least` in a race, in `out`[kBlock]; returns how many. `block_max`: the
  // block's largest logit.
  int64_t (*arrivals)(Row row, int64_t block, const Race& race, float block_max, float least, Candidate* out);
  // Draws an index in [0, n) by the given weights; -1 if all are 0. This is the first level of every draw.
  int64_t (*draw_index)(const float* weights, int64_t n, Noise noise, Stream stream);
  // The lowest token of the block whose logit equals `value`.
  int64_t (*find)(Row row, int64_t block, float value);
  // Copies the block as float32, patched. Returns the number of its logits.
  int64_t (*copy)(Row row, int64_t block, float* out);
};

// The kernels of the instruction set in use.
const BlockKernels& block_kernels();

// One logit as float32.
float logit_at(Row row, int64_t token);

}  // namespace specdec::cpu
