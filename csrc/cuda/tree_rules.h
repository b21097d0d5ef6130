// The rules of trees, by one warp of each thread block, which all decide the same: which of a row's children is tested
// next, and what follows from it. core/tree.h has the mathematics, and cpu/verify_tree.cpp the same decisions.
#pragma once

#include "tree.h"

namespace specdec::cuda {

// The first of the nodes from `from` on that is a child of a row at `level` and holds `token`, or any token if that is
// -1; -1 if there is none. Flags ids out of range among the children before it.
SPECDEC_DEVICE int find_child(const TreeSequence& s, int row, int level, int from, int64_t token, int32_t* flags) {
  if (level >= s.params.depth) return -1;
  const int nodes = s.nodes();
#pragma unroll 1
  for (int first = from; first < nodes; first += kWarp) {
    const int node = first + simt::thread() % kWarp;
    const bool is_child = node < nodes && s.parent(node) == row - 1;
    const int64_t x = is_child ? s.token(node) : -1;
    const bool in_range = x >= 0 && x < s.params.vocabulary;
    const uint32_t found = simt::ballot(in_range && (token < 0 || x == token));
    const uint32_t before = found == 0 ? ~0u : (found & (0u - found)) - 1;
    if ((simt::ballot(x != -1 && !in_range) & before) != 0) *flags |= kDraftOutOfRange;
    if (found != 0) return first + static_cast<int>(simt::count_bits(before));
  }
  return -1;
}

SPECDEC_DEVICE bool has_candidates(const TreeSequence& s, int row, int level) {
  int32_t flags = 0;
  return find_child(s, row, level, row, -1, &flags) >= 0;
}

// Whether a child that holds x was rejected.
SPECDEC_DEVICE bool is_removed(const TreeSequence& s, int from, int to, int64_t x) {
  for (int i = from; i < to; ++i) {
    if (simt::read(&s.memory.removed[i]) == x) return true;
  }
  return false;
}

// The logit of the target's token x in a row.
SPECDEC_DEVICE float logit_of(const Row& row, int64_t x) {
  int64_t index = x;
  if (row.d2t != nullptr) {
    index = find(row.d2t, row.size, x);
    if (row.d2t[index] != x) return -INFINITY;
  }
  return adjusted(row, x, raw_logit(row, index));
}

// The joint ratio of the path to a child that holds x.
SPECDEC_DEVICE float ratio_of(const TreeSequence& s, Visit* visit, int level, int64_t x) {
  float log_q = -INFINITY;
  if (!is_removed(s, visit->removed_from, visit->removed, x)) {
    log_q = log_probability(logit_of(s.logits(true, visit->row, level, false), x), visit->q);
  }
  if (log_q == -INFINITY) {
    visit->flags |= kDraftZeroProbability;
    return 0.0f;
  }
  return child_ratio(visit->siblings, log_probability(logit_of(s.logits(false, visit->row, level, false), x), visit->p),
                     log_q);
}

SPECDEC_DEVICE Visit load(const TreeSequence& s, int level) {
  const Visit visit = read_all(&s.memory.visits[level]);
  simt::sync_warp();  // all lanes have read what is going to be replaced
  return visit;
}

SPECDEC_DEVICE void store(const TreeSequence& s, const Visit& visit, const Next& next) {
  if (simt::thread() % kWarp == 0) {
    write_all(&s.memory.visits[next.level], visit);
    write_all(s.memory.next, next);
  }
  simt::sync_warp();
}

// Goes on to a row with this joint ratio.
SPECDEC_DEVICE void enter(const TreeSequence& s, int row, int level, int removed, int residual, float h) {
  Visit visit = {};
  visit.row = visit.child = row;
  visit.removed_from = visit.removed = removed;
  visit.siblings.h = h;
  if (level > 0 && simt::thread() % kWarp == 0) simt::write(&s.memory.path[level - 1], s.token(row - 1));
  store(s, visit, {Deed::kRead, level, !s.walks() && has_candidates(s, row, level), row, residual, 0.0f, -1});
}

// The same to a child of the last visit.
SPECDEC_DEVICE void enter_child(const TreeSequence& s, const Visit& visit, const Next& now, int child, float h) {
  if (simt::thread() % kWarp == 0) write_all(&s.memory.visits[now.level], visit);
  enter(s, child + 1, now.level + 1, visit.removed, now.residual, h);
}

// Rejects the present child of the visit at `level`, for which its residual must be known.
SPECDEC_DEVICE void want_residual(const TreeSequence& s, const Visit& visit, const Next& now, int level) {
  if (simt::thread() % kWarp == 0) simt::write(&s.memory.removed[visit.removed], s.token(visit.child));
  store(s, visit, {Deed::kWeigh, level, 0, now.near, now.residual, next_scale(visit.siblings), -1});
}

SPECDEC_DEVICE void finish(const TreeSequence& s, const Visit& visit, const Next& now, int64_t token) {
  store(s, visit, {Deed::kFinish, now.level, 0, now.near, now.residual, 0.0f, token});
}

// Rule `walk`: goes on to the child that holds what the target picks.
SPECDEC_DEVICE void follow(const TreeSequence& s, Visit visit, const Next& now, int64_t picked) {
  int child = -1;
  if (!visit.faulty) child = find_child(s, visit.row, now.level, visit.row, picked, &visit.flags);
  child < 0 ? finish(s, visit, now, picked) : enter_child(s, visit, now, child, 1.0f);
}

// Rules `token` and `block`: tests the children of the row, and if all are rejected, the row's own node.
SPECDEC_DEVICE void test(const TreeSequence& s, Visit visit, const Next& now) {
#pragma unroll 1
  while (!visit.faulty) {
    visit.child = find_child(s, visit.row, now.level, visit.child, -1, &visit.flags);
    if (visit.child < 0) break;
    if (visit.q_fault != 0) {
      visit.flags |= visit.q_fault;
      break;
    }
    if (visit.siblings.h == 0.0f) break;  // neither the node nor anything below it can be kept any more
    const float ratio = ratio_of(s, &visit, now.level, s.token(visit.child));
    // A node without candidates below it is kept iff u < h, which needs no more than this.
    const bool below = s.joint() && ratio > 0.0f && has_candidates(s, visit.child + 1, now.level + 1);
    if (below || s.uniform_of(visit.child) < ratio) {
      return enter_child(s, visit, now, visit.child, s.joint() && ratio < 1.0f ? ratio : 1.0f);
    }
    if (visit.siblings.left > 0.0f) return want_residual(s, visit, now, now.level);
    ++visit.child;  // there is nothing to subtract
  }
  if (now.level > 0 && s.joint() && !(s.uniform_of(visit.row - 1) < visit.siblings.h)) {
    return want_residual(s, load(s, now.level - 1), now, now.level - 1);
  }
  finish(s, visit, now, -1);
}

// The row of the last visit has been read.
SPECDEC_DEVICE void conclude_visit(const TreeSequence& s, int64_t picked) {
  const TreeMemory& memory = s.memory;
  const Next now = read_all(memory.next);
  Visit visit = load(s, now.level);
  visit.flags = row_fault(simt::read(&memory.row_max[0]));
  visit.faulty = visit.flags != 0;
  if (s.walks()) return follow(s, visit, now, visit.faulty ? -1 : picked);
  visit.p = {s.inverse_temperature, simt::read(&memory.lse[0]), simt::read(&memory.cutoff[0])};
  if (now.reads_q) {
    visit.q_fault = row_fault(simt::read(&memory.row_max[1])) << kDraftFlagShift;
    visit.q = {s.inverse_temperature, simt::read(&memory.lse[1]), simt::read(&memory.cutoff[1])};
  }
  test(s, visit, now);
}

// The present child is rejected, and the residual has been weighed.
SPECDEC_DEVICE void conclude_residual(const TreeSequence& s) {
  const TreeMemory& memory = s.memory;
  Next now = read_all(memory.next);
  Visit visit = load(s, now.level);
  const float mass = total(memory.residual + (1 - now.residual) * memory.p.n, memory.p.n);
  if (mass == 0.0f && visit.siblings.h == 1.0f) {
    // p and q are equal up to rounding: the child is accepted after all, unless p(x) = 0.
    if (ratio_of(s, &visit, now.level, s.token(visit.child)) > 0.0f) {
      return enter_child(s, visit, now, visit.child, 1.0f);
    }
  } else {
    const float left = total(memory.left, memory.p.n);
    ++visit.removed;
    visit.siblings = after_rejection(visit.siblings, now.scale, mass, left, s.joint());
    now.residual = 1 - now.residual;
  }
  ++visit.child;
  test(s, visit, now);
}

}  // namespace specdec::cuda
