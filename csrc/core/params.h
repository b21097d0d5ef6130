// The operations' parameters: plain structs of raw pointers to memory of the device on which the kernels run. B
// sequences, K drafts, V tokens. Vectors and matrices are dense.
#pragma once

#include "accept.h"
#include "dtype.h"

namespace specdec {

// Logits of B sequences with N rows each. A row is dense.
struct LogitRows {
  const char* data;  // [B, N, V]; null: none
  Dtype dtype;
  int64_t sequence_stride, row_stride;  // bytes
  int64_t vocabulary;                   // V

  SPECDEC_HD const char* row(int64_t b, int64_t j) const { return data + b * sequence_stride + j * row_stride; }
};

// The tokens of a row that may follow: bit v % 32 of word v / 32 is that of the target's token v.
struct AllowedTokens {
  const int32_t* words = nullptr;  // null: all may
  int64_t num_words = 0;
  const int64_t* ids = nullptr;  // the target's ids of a reduced vocabulary, of whose tokens `has` is asked, or null

  SPECDEC_HD bool has(int64_t token) const {
    if (words == nullptr) return true;
    const int64_t id = ids == nullptr ? token : ids[token];
    return id / 32 < num_words && words[id / 32] >> (id % 32) & 1;
  }
};

// The same of many rows.
struct AllowedRows {
  const int32_t* words = nullptr;  // [rows, num_words]; null: all tokens may follow
  int64_t num_words = 0;

  SPECDEC_HD AllowedTokens row(int64_t r, const int64_t* ids) const {
    if (words == nullptr || r < 0) return {};
    return {words + r * num_words, num_words, ids};
  }
};

// The sampling parameters of every sequence. A null pointer means that these parameters are off, or the list is empty.
struct SamplingArguments {
  bool has_table;                // a table may have no entries
  const float* temperature;      // [B]
  const float* filters;          // [B, 3] top_k, top_p, min_p
  const float* penalties;        // [B, 3] repetition, presence, frequency
  const int64_t* table_ids;      // [B, N] ascending
  const float* table_bias;       // [B, N]
  const bool* table_in_prompt;   // [B, N]
  const int32_t* table_count;    // [B, N]
  const int64_t* ends;           // [B, E] tokens that are banned before ...
  const int64_t* first_end;      // [B] ... this absolute position
  int64_t table_size, num_ends;  // N, E
};

struct DraftStepParams {
  // inputs
  const char* logits;  // [B, V], rows dense; V: of the draft's vocabulary
  Dtype dtype;
  int64_t row_stride;  // bytes from one row to the next
  int64_t batch, vocabulary;
  SamplingArguments sampling;
  const int64_t* drafts;    // [B, offset] or null
  const int64_t* d2t;       // [V] target ids, ascending, or null
  AllowedRows allowed;      // [B]
  const int64_t* seed;      // [B]
  const int64_t* position;  // [B]
  int64_t offset;
  bool coupled;
  // outputs, every slot written
  int64_t* tokens;  // [B]
  float* log_q;     // [B]
  float* cutoff;    // [B]
  float* lse;       // [B]
  int32_t* status;  // [B]
};

struct SpeculativeStepParams {
  // inputs
  LogitRows target;                       // [B, K+1, V]
  const int64_t* draft_tokens;            // [B, K]
  LogitRows draft;                        // q [B, K, V], or with d2t [B, K, its length]; null: drafts are one-hot
  const float *draft_cutoff, *draft_lse;  // [B, K], or null: to be computed
  const int64_t* d2t;                     // target ids of the draft's vocabulary, ascending, or null
  const int64_t* num_drafts;              // [B], clamped to [0, K], or null: K
  SamplingArguments sampling;
  AllowedRows allowed;                        // [B, K+1]
  int64_t masked_drafts;                      // so many of these rows hold for q, too
  const int64_t* seed;                        // [B]
  const int64_t* position;                    // [B]
  int64_t batch, num_drafts_max, vocabulary;  // B, K, V
  Rule rule;
  // outputs, every slot written
  int64_t* tokens;        // [B, K+1]
  int32_t* num_accepted;  // [B]
  int32_t* status;        // [B]
  int32_t* num_emitted;   // [B]
  float* log_probs;       // [B, K+1], or null
  float* raw_log_probs;   // [B, K+1], null where log_probs is

  // The row of `allowed` that masks row j of p, and the one that masks that of q; -1: none.
  SPECDEC_HD int64_t mask_of_target(int64_t b, int64_t j) const { return b * (num_drafts_max + 1) + j; }
  SPECDEC_HD int64_t mask_of_draft(int64_t b, int64_t j) const { return j < masked_drafts ? mask_of_target(b, j) : -1; }
};

// Trees have N nodes, and so N + 1 rows: that of the root, and one for each node.
struct DraftChildrenParams {
  // inputs
  const char* logits;  // [B, V], rows dense; V: of the draft's vocabulary
  Dtype dtype;
  int64_t row_stride;  // bytes from one row to the next
  int64_t batch, vocabulary;
  SamplingArguments sampling;
  const int64_t* drafts;  // [B, depth] the path to the row, or null
  int64_t depth;
  const int64_t* d2t;       // [V] target ids, ascending, or null
  const int64_t* seed;      // [B]
  const int64_t* position;  // [B]
  const int64_t* offset;    // [B]
  int64_t width;
  bool sampled;
  // outputs, every slot written
  int64_t* tokens;  // [B, width]
  float* log_q;     // [B, width]
  float* cutoff;    // [B]
  float* lse;       // [B]
  int32_t* status;  // [B]
};

struct VerifyTreeParams {
  // inputs
  LogitRows target;            // [B, N+1, V]
  const int64_t* node_tokens;  // [B, N]
  const int64_t* parents;      // [B, N]
  LogitRows draft;             // [B, N+1, V], or with d2t [B, N+1, its length]; null with rule `walk`
  const int64_t* d2t;          // target ids of the draft's vocabulary, ascending, or null
  const int64_t* num_nodes;    // [B], clamped to [0, N], or null: N
  SamplingArguments sampling;
  const int64_t* seed;                      // [B]
  const int64_t* position;                  // [B]
  int64_t batch, nodes, vocabulary, depth;  // B, N, V, D
  TreeRule rule;
  // outputs, every slot written
  int64_t* path;          // [B, D+1]
  int64_t* tokens;        // [B, D+1]
  int32_t* num_accepted;  // [B]
  int32_t* num_emitted;   // [B]
  int32_t* status;        // [B]
};

}  // namespace specdec
