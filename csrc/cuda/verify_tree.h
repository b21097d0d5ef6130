// verify_tree in one launch: a cluster of blocks takes a sequence, and goes along its tree row by row. All its blocks
// measure a row when the path gets there and weigh a residual when a child is rejected; each of them then decides for
// itself what comes next. Rows that no path gets to are not read.
#pragma once

#include "tree_rows.h"

namespace specdec::cuda {

// By the threads of a block: the token after the path.
SPECDEC_DEVICE int64_t token_after_path(const TreeSequence& s, const Place& place, const Visit& visit,
                                        const Next& next) {
  if (s.walks() || visit.faulty) return next.token;
  const TreeMemory& memory = s.memory;
  const Noise noise = s.noise(visit.row);
  const int n = memory.p.n;
  if (visit.removed == visit.removed_from) {  // the row was read last, since nothing below it was rejected
    const int block = static_cast<int>(race_among(memory.p.mass, n, noise, kRecoverBlock));
    return draw(s.logits(false, visit.row, next.level, false), memory.p, block, s.inverse_temperature, visit.p.cutoff,
                noise, kRecoverToken, memory.drawn, place);
  }
  const int block = static_cast<int>(race_among(memory.residual + next.residual * n, n, noise, kRecoverBlock));
  return draw_by(block, noise, kRecoverToken, memory.drawn, place, [&](Part part, float (&weights)[kEach]) {
    sibling_weights(s, false, visit.siblings.scale, block, part, nullptr, weights);
  });
}

// By a warp: writes the outputs of a sequence.
SPECDEC_DEVICE void write_path(const TreeSequence& s, int accepted, int64_t token) {
  const int64_t columns = s.params.depth + 1;
  int32_t status = 0;
  for (int64_t i = simt::thread() % kWarp; i < columns; i += kWarp) {
    int64_t node = -1, its = i == accepted ? token : -1;
    if (i < accepted) node = simt::read(&s.memory.visits[i + 1].row) - 1, its = s.token(node);
    if (i <= accepted) status |= simt::read(&s.memory.visits[i].flags);
    s.params.path[s.b * columns + i] = node;
    s.params.tokens[s.b * columns + i] = its;
  }
  status = simt::reduce(status, [](int32_t a, int32_t b) { return a | b; });
  if (simt::thread() % kWarp != 0) return;
  s.params.num_accepted[s.b] = accepted;
  s.params.num_emitted[s.b] = accepted + (token >= 0);
  s.params.status[s.b] = status;
}

SPECDEC_KERNEL(verify_tree_kernel, kMostThreads < kTreeThreads ? kMostThreads : kTreeThreads, TreeWork) {
  simt::arrive_only();
  const Place place = Place::here();
  const TreeSequence s = tree_of(params, simt::cluster());
  const TreeMemory& memory = s.memory;
  if (place.lane0()) init_arrivals(memory.slots);
  if (place.warp == 0) enter(s, 0, 0, 0, 0, 1.0f);
  simt::sync_block();
  uint32_t rounds = 0;
#pragma unroll 1
  while (simt::read(&memory.next->deed) != Deed::kFinish) {
    const bool reads = simt::read(&memory.next->deed) == Deed::kRead;
    if (reads && place.lane0()) begin_copies(s, place);
    simt::wait_cluster();  // all blocks run, and have read what is now replaced in their memory
    if (reads) {
      measure_visit(s, place, rounds);
      rounds ^= reading_of(s).reads_q ? 3u : 1u;
    } else {
      weigh_siblings(s, place);
    }
    simt::sync_cluster();
    int64_t picked = -1;
    if (reads) {
      merge_visit(s, place);
      if (s.walks() && row_fault(simt::read(&memory.row_max[0])) == 0) picked = picked_token(s, place);
    }
    simt::sync_block();  // all warps have read what is going to be decided anew
    if (place.warp == 0) {
      reads ? conclude_visit(s, picked) : conclude_residual(s);
    }
    simt::sync_block();
    simt::arrive_cluster();
  }
  if (!place.first) return;
  const Next next = read_all(memory.next);
  const int64_t token = token_after_path(s, place, read_all(&memory.visits[next.level]), next);
  if (place.warp == 0) write_path(s, next.level, token);
}

}  // namespace specdec::cuda
