// The last launch of speculative_step: a block of threads takes a sequence. It finds out how many drafts are kept,
// draws the token after them, and writes the outputs.
//
// A token that is recovered comes from the residual max(0, w p - q), first from one of its blocks of logits. A block's
// mass there is at most w times that in p, which is known. So blocks are visited in the order in which they lead the
// race by these bounds, until none can win any more: five of 126 on average, and the winner is that of the race over
// all.
#pragma once

#include "race.h"
#include "sequence.h"

namespace specdec::cuda {

// At most. Kernels for any rows need more registers.
template <class Rows>
constexpr int kDecideThreads = Rows::kAny ? 256 : 448;  // two of 448 have 72 registers

struct Emitted {
  int accepted;
  int64_t token;  // the one after them, or -1
  int32_t status;
};

// By the threads of a block: the blocks of row j race by their masses in w p. Leaves their noise and scores in memory,
// and returns the best of this thread's.
template <class Rows>
SPECDEC_DEVICE Candidate race_of_blocks(const Sequence<Rows>& s, int j, float w) {
  const RowStats p = s.row(j);
  const float unit = w * s.probability_in_p(p.max, p);
  Candidate best = 0;
#pragma unroll 1
  for (int block = simt::thread(); block < s.work.n; block += simt::num_threads()) {
    const float mass = unit * mass_of(simt::fresh(&s.stats(j)[block]), p.max, s.temperature.scale);
    const float noise = exponential_of(static_cast<uint32_t>(block), s.noise(j), kRecoverBlock);
    const float score = simt::quotient(mass, noise);
    simt::write(&s.memory.noise[block], noise);
    simt::write(&s.memory.score[block], score);
    best = Better()(best, candidate(score, static_cast<uint32_t>(block)));
  }
  return best;
}

// By the threads of a block: the block of logits that wins the race of the residual of row j; -1 if it has no mass,
// which all blocks were visited for. Ends with a barrier.
template <class Rows>
SPECDEC_DEVICE int best_residual(const Sequence<Rows>& s, int j, float w) {
  const int n = s.work.n, warp = cuda::warp(), warps = num_warps();
  if (simt::thread() < (-n & 3)) simt::write(&s.memory.score[n + simt::thread()], -1.0f);
  simt::sync_block();  // all scores are there
  for_ranks<2>(s.memory.score, n, [&](int block, uint32_t rank) { simt::write(&s.memory.order[rank], block); });
  simt::sync_block();
  const RowStats p = s.row(j);
  const float rounding = 1.00001f + 1e-6f * (fabsf(p.lse) + fabsf(p.max * s.temperature.inverse));
  Candidate best = 0;
  int turn = 0;
#pragma unroll 1
  for (int first = 0; first < n; first += warps, turn ^= 1) {
    Candidate mine = 0;
    if (first + warp < n) {
      const int block = simt::read(&s.memory.order[first + warp]);
      const float mass = s.residual_mass(j, w, block);
      mine = candidate(simt::quotient(mass, simt::read(&s.memory.noise[block])), static_cast<uint32_t>(block));
    }
    best = Better()(best, best_of_block(mine, s.memory.slots, turn));
    if (first + warps >= n) break;
    const float bound = simt::read(&s.memory.score[simt::read(&s.memory.order[first + warps])]);
    if (score_of(best) >= bound * rounding) break;
  }
  simt::sync_block();
  return static_cast<int>(index_of(best));
}

// By the threads of a block: draws a token of this block of row j, from the residual or from p.
template <class Rows>
SPECDEC_DEVICE int64_t draw_in_block(const Sequence<Rows>& s, int j, float w, int block, bool in_residual) {
  return race_in_block(block, s.noise(j), kRecoverToken, s.memory.slots, 0,
                       [&](int64_t token) { return s.token_weight(j, w, in_residual, token); });
}

// Rule `block`, by the threads of a block: how many drafts are kept, and their joint ratio. Ends with a barrier.
template <class Rows>
SPECDEC_DEVICE int longest_kept(const Sequence<Rows>& s, float* joint) {
  const int sure = s.surely_kept(), warp = cuda::warp(), warps = num_warps();
  s.for_doubtful(sure, [&](int j, float, float) {
    if (s.examined(j).state != kRecover || j % warps != warp) return;
    float sum = 0.0f;
    for (int i = lane(); i < s.work.n; i += kWarp) {
      sum += simt::fresh(&s.work.masses(s.b, j)[i]);
    }
    sum = simt::reduce(sum, Sum());
    if (lane() == 0) simt::write(&s.memory.total[j], sum);
  });
  simt::sync_block();
  int kept = sure;
  *joint = 1.0f;
  s.for_doubtful(sure, [&](int j, float w, float u) {
    const bool drafted = s.examined(j).state == kRecover;
    const float keep = drafted ? keep_probability(w, simt::read(&s.memory.total[j])) : w;
    if (u < keep) kept = j, *joint = w;
  });
  return kept;
}

// Rule `token`, by a warp: the first row from j on whose draft is not accepted, or that has none.
template <class Rows>
SPECDEC_DEVICE int first_rejected(const Sequence<Rows>& s, int j) {
#pragma unroll 1
  for (;; j += kWarp) {
    const int mine = j + lane();
    const bool accepted = mine < s.limit && s.examined(mine).u < simt::read(&s.memory.ratio[mine]);
    if (const uint32_t others = simt::ballot(!accepted); others != 0) return j + simt::lowest_bit(others);
  }
}

// Rules `token` and `block`, by the threads of a block.
template <class Rows, int kRule>
SPECDEC_DEVICE Emitted decide_by_ratios(const Sequence<Rows>& s) {
  Emitted end = {0, -1, 0};
  float w = 1.0f;
  if (kRule == kRuleBlock) end.accepted = longest_kept(s, &w);
#pragma unroll 1
  while (true) {
    if (kRule == kRuleToken) end.accepted = first_rejected(s, end.accepted);
    const Examined here = s.examined(end.accepted);
    end.status = kRule == kRuleToken ? end.status | here.flags : here.flags;
    if (here.state == kDone) return end;
    const Candidate best = race_of_blocks(s, end.accepted, w);
    int block = -1;
    if (here.state == kRecover) {
      block = best_residual(s, end.accepted, w);
      if (block < 0 && possible(here.p)) {
        // A residual without mass: p and q are equal up to rounding. The draft is accepted, unless p(x) = 0.
        w = kRule == kRuleBlock && here.possible() ? s.joint(w, end.accepted) : 1.0f;
        ++end.accepted;
        continue;
      }
    }
    const bool recovers = block >= 0;
    if (!recovers) block = static_cast<int>(index_of(best_of_block(best, s.memory.slots, 1)));
    end.token = draw_in_block(s, end.accepted, w, block, recovers);
    return end;
  }
}

// Greedy sequences, and rule `coupled`: drafts are compared with the tokens that the target picks.
template <class Rows, int kRule>
SPECDEC_DEVICE Emitted decide_by_favourites(const Sequence<Rows>& s) {
#pragma unroll 1
  for (int j = warp(); j <= s.limit; j += num_warps()) {
    if (s.row(j).fault(s.temperature) != 0) continue;
    int64_t token;
    if (kRule == kRuleCoupled && !s.greedy()) {
      token = winner_of(s.work.races(s.b, j), s.work.n);
    } else {
      token = argmax<Rows>(s.target_row(j), s.stats(j), s.work.n, s.row(j).max);
    }
    if (lane() == 0) simt::write(&s.memory.favourite[j], token);
  }
  simt::sync_block();
  Emitted end = {0, -1, 0};
#pragma unroll 1
  while (true) {
    const int32_t fault = s.row(end.accepted).fault(s.temperature);
    int32_t flags = 0;
    const int64_t x = s.draft(end.accepted, &flags);
    end.status |= fault != 0 ? fault : flags;
    end.token = fault != 0 ? -1 : simt::read(&s.memory.favourite[end.accepted]);
    if (end.token < 0 || x != end.token) return end;
    ++end.accepted;
  }
}

// By a warp: writes the log-probabilities of the token that row i emitted; NaN if it emitted none (-1).
template <class Rows>
SPECDEC_DEVICE void write_log_probs(const Sequence<Rows>& s, int i, int64_t token) {
  float log_p = NAN, raw_log_p = NAN;
  if (token >= 0) {
    const Row row = s.target_row(i);
    raw_log_p = Rows::raw_logit(row, token) - merged(s.work.raw(s.b, i), s.work.n, Temperature(1)).lse;
    log_p = s.greedy() ? 0.0f : log_probability(Rows::logit(row, token), s.row(i).distribution(s.temperature));
  }
  if (lane() != 0) return;
  const int64_t at = int64_t{s.b} * s.work.emitting() + i;
  s.params().log_probs[at] = log_p;
  s.params().raw_log_probs[at] = raw_log_p;
}

// By the threads of a block: writes the outputs of a sequence.
template <class Rows>
SPECDEC_DEVICE void write_step(const Sequence<Rows>& s, const Emitted& end) {
  const SpeculativeStepParams& params = s.params();
  const int rows = s.work.emitting();
  const auto emitted = [&](int i) {
    return i < end.accepted ? s.work.drafts(s.b)[i] : i == end.accepted ? end.token : int64_t{-1};
  };
#pragma unroll 1
  for (int i = simt::thread(); i < rows; i += simt::num_threads()) params.tokens[int64_t{s.b} * rows + i] = emitted(i);
  if (simt::thread() == 0) {
    params.num_accepted[s.b] = end.accepted;
    params.num_emitted[s.b] = end.accepted + (end.token >= 0);
    params.status[s.b] = end.status;
  }
  if constexpr (Rows::kAny) {
    const int first = params.log_probs == nullptr ? rows : warp();
#pragma unroll 1
    for (int i = first; i < rows; i += num_warps()) write_log_probs(s, i, emitted(i));
  }
}

// Grid: one, sequences.
template <class Rows, int kRule>
SPECDEC_KERNEL(decide_kernel, kDecideThreads<Rows>, (Rows::kSmall ? 2 : 1), Work) {
  const Sequence<Rows> s(params, params.first + simt::block_y(), kSumsBlocks);
  const bool by_ratios = kRule != kRuleCoupled && !s.greedy();
  if (by_ratios) s.look_at_drafts();
  simt::wait_for_launch_before();
  s.merge_rows(s.limit + 1, by_ratios);
  if constexpr (kRule != kRuleCoupled) {
    if (by_ratios) return write_step(s, decide_by_ratios<Rows, kRule>(s));
  }
  write_step(s, decide_by_favourites<Rows, kRule>(s));
}

}  // namespace specdec::cuda
