// Where a row of a recurrent layer stands when a forward feeds it tokens: what its state contains, which tokens it
// takes from its window first, and which of them are never rolled back any more.
#pragma once

#include "../core/hd.h"

namespace specdec {

constexpr int kMostTaps = 16;  // of a convolution

struct Feed {
  const int64_t* start;    // [rows] position of a row's first token
  const int64_t* commit;   // [rows] the tokens before this position stay for good; null: all that are fed
  const bool* valid;       // [rows, columns] which columns are tokens
  const int64_t* parents;  // [rows, columns] the column that each token follows, -1: those before start; null: a chain
  int64_t rows, columns;
  int64_t first_row;  // of the state's rows
  int64_t places;     // T, of a window: the inputs of the token at position x are at x % T
};

// Positions of one row: the state contains the tokens before `begin`; those from `begin` to `start` are in the window.
struct FedRow {
  int64_t begin, commit, start;
  bool from_nothing;
};

SPECDEC_HD FedRow fed_row(int64_t base, int64_t start, int64_t commit, int64_t places) {
  FedRow row;
  row.begin = start == 0 ? 0 : base;
  row.from_nothing = row.begin == 0;
  row.start = start;
  row.commit = commit < row.begin ? row.begin : commit;
  if (row.commit > start) row.commit = start;
  // A caller that keeps the contract never comes here: nothing may be read or repeated without bounds.
  if (row.begin < start - places) row.begin = start - places;
  return row;
}

}  // namespace specdec
