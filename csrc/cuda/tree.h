// A sequence in verify_tree: its memory, rows and nodes.
#pragma once

#include "../core/tree.h"
#include "verify.h"

namespace specdec::cuda {

// Fewer than other kernels have: so each has the registers that a pair of rows needs, beside what is known of a visit.
// With 8 warps it has 255; with 9 to 12, of which a scheduler has three, 168.
constexpr int kTreeThreads = 256;

// The places of the blocks of logits of the row that was read last, if they stay in shared memory: p's block and that
// of q beside it, so that the same warp has both.
struct PairSlots {
  char* slots;           // [warps, num_slots, bytes]; null: logits are read in place
  int num_slots, bytes;  // a slot ends with the arrivals of its two blocks
  int of_p;              // bytes of p's block

  static constexpr int kArrivals = kGranule;
  static_assert(kArrivals == 2 * sizeof(simt::Arrival));

  SPECDEC_DEVICE PairSlots at(char* base) const {
    return {num_slots == 0 ? nullptr : moved(slots, base), num_slots, bytes, of_p};
  }
  SPECDEC_DEVICE Kept kept(bool is_q) const {
    return {slots == nullptr ? nullptr : slots + (is_q ? of_p : 0), num_slots, bytes};
  }
  // By a warp: the slot of its `turn`-th block.
  SPECDEC_DEVICE Slot slot(int turn, bool is_q) const {
    char* place = slots + (simt::thread() / kWarp * num_slots + turn) * bytes;
    return {place + (is_q ? of_p : 0), reinterpret_cast<simt::Arrival*>(place + bytes - kArrivals) + is_q};
  }
};

// Reads and writes a struct of whole granules.
template <class T>
SPECDEC_DEVICE T read_all(const T* place) {
  Bytes16 granules[sizeof(T) / kGranule];
#pragma unroll
  for (size_t i = 0; i < sizeof(T) / kGranule; ++i)
    granules[i] = simt::read(reinterpret_cast<const Bytes16*>(place) + i);
  T value;
  memcpy(&value, granules, sizeof(T));
  return value;
}

template <class T>
SPECDEC_DEVICE void write_all(T* place, const T& value) {
  Bytes16 granules[sizeof(T) / kGranule];
  memcpy(granules, &value, sizeof(T));
#pragma unroll
  for (size_t i = 0; i < sizeof(T) / kGranule; ++i) simt::write(reinterpret_cast<Bytes16*>(place) + i, granules[i]);
}

// A row on the way from the root.
struct alignas(16) Visit {
  int32_t row;
  int32_t child;                  // the node from which on the row's children are still to be tested
  int32_t removed_from, removed;  // those of its children that were rejected: [removed_from, removed) of the list
  int32_t flags;                  // Status
  int32_t q_fault;                // what is wrong with q
  bool faulty;                    // p has no distribution
  Distribution p, q;              // q is that of the children, if there are candidates
  Siblings siblings;              // what p and q became after the children that were rejected
};

enum class Deed : int32_t { kRead, kWeigh, kFinish };

// What a sequence does next, at the row of the last visit.
struct alignas(16) Next {
  Deed deed;
  int32_t level;     // of the last visit
  int32_t reads_q;   // kRead: whether children may be tested
  int32_t near;      // the row that was read last
  int32_t residual;  // which of the two residuals is that of the row, if a child was rejected
  float scale;       // kWeigh: of the residual that is wanted
  int64_t token;     // kFinish: the one after the path, if it is known; else -1, and it is to be drawn
};

// The memory of one sequence.
struct TreeMemory {
  PairSlots slots;
  Blocks p, q;                    // of the row that was read last
  float *row_max, *lse, *cutoff;  // [2], of p and q
  float* residual;                // [2, blocks] masses
  float* left;                    // [blocks] masses of q without what was rejected
  Candidate* best;                // [warps of the cluster], rule `walk`
  Candidate* drawn;               // [warps]
  Visit* visits;                  // [depth + 1]
  int64_t* path;                  // [depth] the tokens down to the last visit
  int64_t* removed;               // [N] the tokens of the rejected children of all visits
  Next* next;                     // [1]
  SelectionMemory* selection;

  // An item is a block of p's logits and one of q's.
  static Items items(const VerifyTreeParams& params);
  static TreeMemory cut(Arena& arena, const VerifyTreeParams& params, const Items& items, const Cut& cut);

  SPECDEC_DEVICE TreeMemory at(char* base) const {
    return {slots.at(base),
            {moved(p.max, base), moved(p.mass, base), p.n},
            {moved(q.max, base), moved(q.mass, base), q.n},
            moved(row_max, base),
            moved(lse, base),
            moved(cutoff, base),
            moved(residual, base),
            moved(left, base),
            moved(best, base),
            moved(drawn, base),
            moved(visits, base),
            moved(path, base),
            moved(removed, base),
            moved(next, base),
            moved(selection, base)};
  }
};

inline Items TreeMemory::items(const VerifyTreeParams& params) {
  const LogitRows &target = params.target, &draft = params.draft;
  const bool has_q = draft.data != nullptr;
  const int of_p = block_bytes(target), of_q = has_q ? block_bytes(draft) : 0;
  const int of_p_blocks = blocks_of(params.vocabulary), of_q_blocks = has_q ? blocks_of(draft.vocabulary) : 0;
  const int own_copy = own_copy_of(params.sampling, params.d2t != nullptr,
                                   aligned(target) && (!has_q || aligned(draft)), of_p > of_q ? of_p : of_q);
  Items items = {of_p_blocks > of_q_blocks ? of_p_blocks : of_q_blocks, of_p + of_q + PairSlots::kArrivals, own_copy};
  items.warps = kTreeThreads / kWarp;
  return items;
}

inline TreeMemory TreeMemory::cut(Arena& arena, const VerifyTreeParams& params, const Items& items, const Cut& cut) {
  const bool stay = int64_t{cut.num_slots} * cut.all_warps >= items.most;
  const int n = blocks_of(params.vocabulary),
            of_q = params.draft.data == nullptr ? 0 : blocks_of(params.draft.vocabulary);
  TreeMemory memory = {};
  if (stay) {
    const int64_t slots = int64_t{cut.num_slots} * cut.warps;
    memory.slots = {arena.take<char>(slots * items.bytes), cut.num_slots, items.bytes, block_bytes(params.target)};
  }
  memory.p = {arena.take<float>(n), arena.take<float>(n), n};
  memory.q = {arena.take<float>(of_q), arena.take<float>(of_q), of_q};
  memory.row_max = arena.take<float>(2), memory.lse = arena.take<float>(2), memory.cutoff = arena.take<float>(2);
  if (params.rule != kTreeWalk) memory.residual = arena.take<float>(2 * n), memory.left = arena.take<float>(n);
  memory.best = arena.take<Candidate>(cut.all_warps), memory.drawn = arena.take<Candidate>(cut.warps);
  memory.visits = arena.take<Visit>(params.depth + 1), memory.path = arena.take<int64_t>(params.depth);
  if (params.rule != kTreeWalk) memory.removed = arena.take<int64_t>(params.nodes);
  memory.next = arena.take<Next>(1);
  if (params.sampling.filters != nullptr) memory.selection = arena.take<SelectionMemory>(1);
  return memory;
}

using TreeWork = Work<VerifyTreeParams, TreeMemory>;

// What every thread of a cluster knows of its sequence. It is little, since registers are scarce.
struct TreeSequence {
  const TreeWork& work;
  const VerifyTreeParams& params;
  TreeMemory memory;
  int b;
  float inverse_temperature;

  SPECDEC_DEVICE bool greedy() const { return inverse_temperature == 0.0f; }
  // Whether the path follows the tokens that the target picks.
  SPECDEC_DEVICE bool walks() const { return greedy() || params.rule == kTreeWalk; }
  SPECDEC_DEVICE bool joint() const { return params.rule == kTreeBlock; }
  SPECDEC_DEVICE bool filtered() const { return !greedy() && filters_of(params.sampling, b).any(); }
  // How many nodes count.
  SPECDEC_DEVICE int nodes() const {
    const int64_t asked = params.num_nodes == nullptr ? params.nodes : params.num_nodes[b];
    return static_cast<int>(asked < params.nodes ? asked : params.nodes);
  }
  SPECDEC_DEVICE int64_t token(int64_t node) const { return params.node_tokens[int64_t{b} * params.nodes + node]; }
  SPECDEC_DEVICE int64_t parent(int64_t node) const { return params.parents[int64_t{b} * params.nodes + node]; }
  SPECDEC_DEVICE Noise noise(int64_t offset) const {
    return {static_cast<uint64_t>(params.seed[b]), static_cast<uint32_t>(params.position[b]),
            static_cast<uint32_t>(offset)};
  }
  // The number that tests a node.
  SPECDEC_DEVICE float uniform_of(int64_t node) const {
    const Noise its = noise(node);
    return uniform(philox(its.seed, 0, its.position, its.offset, kAccept).word[0]);
  }
  // Row `row`, which is that of the visit at `level`. `near`: it is the row that was read last, and may be read where
  // it is kept, also by other blocks.
  SPECDEC_DEVICE Row logits(bool is_q, int row, int level, bool near) const {
    const LogitRows& rows = is_q ? params.draft : params.target;
    return {rows.row(b, row),
            rows.dtype,
            rows.vocabulary,
            is_q ? params.d2t : nullptr,
            &params.sampling,
            b,
            params.position[b],
            memory.path,
            level,
            near ? memory.slots.kept(is_q) : Kept{nullptr, 0, 0},
            0,
            work.place_for_copy()};
  }
};

// The row of the last visit, which is read.
struct Reading {
  int row, level, reads_q;
};

SPECDEC_DEVICE Reading reading_of(const TreeSequence& s) {
  const int level = simt::read(&s.memory.next->level);
  return {simt::read(&s.memory.visits[level].row), level, simt::read(&s.memory.next->reads_q)};
}

SPECDEC_DEVICE TreeSequence tree_of(const TreeWork& work, int64_t b) {
  const float temperature = work.params.sampling.temperature[b];
  return {work, work.params, work.memory(b), static_cast<int>(b), temperature == 0.0f ? 0.0f : 1.0f / temperature};
}

}  // namespace specdec::cuda
