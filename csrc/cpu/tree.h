// A sequence's tree, and how far its verification has come.
#pragma once

#include <algorithm>
#include <deque>

#include "../core/tree.h"
#include "verification.h"

namespace specdec::cpu {

// The children of every row of a sequence, in order: nodes that count, whose parents come before them.
class Tree {
 public:
  Tree(const VerifyTreeParams& params, int64_t b) : first_(params.nodes + 1, -1), next_(params.nodes, -1) {
    std::vector<int64_t> level(params.nodes + 1, -1), last(params.nodes + 1, -1);  // of rows; -1: in no tree
    level[0] = 0;
    const int64_t n = params.num_nodes == nullptr ? params.nodes : std::min(params.num_nodes[b], params.nodes);
    for (int64_t node = 0; node < n; ++node) {
      const int64_t parent = params.parents[b * params.nodes + node], row = parent + 1;
      if (parent < -1 || parent >= node || level[row] < 0 || level[row] >= params.depth) continue;
      level[node + 1] = level[row] + 1;
      (last[row] < 0 ? first_[row] : next_[last[row]]) = node;
      last[row] = node;
    }
  }

  int64_t first_child(int64_t row) const { return first_[row]; }
  int64_t next_sibling(int64_t node) const { return next_[node]; }

 private:
  std::vector<int64_t> first_, next_;
};

// A row on the way from the root.
struct Place {
  VerifiedRow read;                    // j is the row; q is that of its children
  RowStats q = {};                     // the same, if there are candidates
  Siblings siblings = {};              // what p and q became after the children that were rejected
  std::vector<int64_t> rejected = {};  // their tokens
  std::vector<Patch> rest = {};        // sets their logits to -inf, among the other patches of q's row
  Residual residual = {};              // what p became, once a child was rejected
  Residual next = {};                  // what it will be if the present one is
  int64_t child = -1;                  // whose turn it is; -1: no one's
};

struct Sequence {
  enum Want { kRow, kResidual, kNothing };
  int64_t b;
  Tree tree;
  bool walks;
  Want want = kRow;
  int64_t row = 0;  // that is to be entered, with the
  float h = 1.0f;   // joint ratio
  std::deque<Place> places = {};
};

}  // namespace specdec::cpu
