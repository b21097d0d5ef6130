// The launch of speculative_step that decides: a cluster of blocks takes a sequence, and measures its rows if no launch
// before did (statistics.h). All its blocks weigh rows and residuals, and each of them then decides for itself how far
// drafts are kept. The one that keeps the logits of the next token draws it.
#pragma once

#include "walk.h"

namespace specdec::cuda {

// Computes the statistics of all items. If the ring brings them, their copies have begun.
SPECDEC_DEVICE void measure_rows(const Sequence& s, const Place& place) {
  const Measured measured = s.measured();
  const StepMemory& memory = s.memory;
  const int all_rows = static_cast<int>(s.params.num_drafts_max) + 1;
  const Results results = {memory.max,
                           memory.mass,
                           s.params.log_probs != nullptr,
                           memory.raw_max,
                           memory.raw_sum,
                           measured.target_items,
                           all_rows * memory.n - measured.target_items};
  measure(measured, memory.ring, place, results, s.adjusts(), s.inverse_temperature,
          [&](int item) { return s.row_of_item(item); });
}

// Calls function(index in StepMemory) for every `step`-th of the rows that were measured, from `first` on.
template <class Function>
SPECDEC_DEVICE void for_rows(const Sequence& s, int first, int step, const Function& function) {
  const int64_t k = s.params.num_drafts_max;
  const int rows = s.limit + 1 + s.draft_rows();
  for (int number = first; number < rows; number += step) {
    function(number <= s.limit ? number : k + 1 + (number - s.limit - 1));
  }
}

SPECDEC_DEVICE float lse_of(const Sequence& s, int64_t i, float max) {
  return max * s.inverse_temperature + logf(total(s.blocks(i).mass, s.blocks(i).n));
}

// By a warp: computes a row's largest logit and, if it is not `filtered`, its masses, cutoff and lse.
SPECDEC_DEVICE void merge_row(const Sequence& s, const Place& place, int64_t i, bool filtered) {
  const Blocks blocks = s.blocks(i);
  const float max = max_of_blocks(blocks);
  if (!s.greedy() && !filtered) merge(blocks, max, s.inverse_temperature);
  simt::sync_warp();
  const float lse = s.greedy() || filtered ? max : lse_of(s, i, max);
  if (place.lane0()) {
    simt::write(&s.memory.row_max[i], max);
    if (!filtered) simt::write(&s.memory.lse[i], lse), simt::write(&s.memory.cutoff[i], -INFINITY);
  }
}

// Computes the rows' largest logits, masses, cutoffs and lse, in every block of the cluster.
SPECDEC_DEVICE void merge_rows(const Sequence& s, const Place& place) {
  const bool filtered = filters_of(s.params.sampling, s.b).any() && !s.greedy();
  for_rows(s, place.warp, place.warps, [&](int64_t i) { merge_row(s, place, i, filtered); });
  simt::sync_block();
  if (!filtered) return;
  // The filters of each row are the work of one block, which writes the results to the others.
  for_rows(s, simt::block_in_cluster(), simt::blocks_in_cluster(), [&](int64_t i) {
    const Row row = s.row(i);
    const Blocks blocks = s.blocks(i);
    const float max = simt::read(&s.memory.row_max[i]);
    if (row_fault(max) != 0) return;
    if (place.warp == 0) merge(blocks, max, s.inverse_temperature);
    simt::sync_block();
    Selection selection = {row, blocks, max, s.inverse_temperature, s.memory.selection};
    const float sum = total(blocks.mass, blocks.n);
    const float cutoff = cutoffs_of(selection, 0, s.temperature, sum).kept;
    simt::sync_block();
    keep_above(row, blocks, max, s.inverse_temperature, cutoff);
    simt::sync_block();
    const float lse = lse_of(s, i, max);
    simt::sync_block();
    for (int block = place.warp; block < blocks.n; block += place.warps) {
      const float mass = simt::read(&blocks.mass[block]);
      simt::sync_warp();
      publish(&blocks.mass[block], mass);
    }
    if (place.warp == 0) publish(&s.memory.lse[i], lse), publish(&s.memory.cutoff[i], cutoff);
    simt::sync_block();
  });
  simt::sync_cluster();
}

// Greedy decoding, and rule `coupled`: finds the token that the target picks at every row, in block 0's memory.
SPECDEC_DEVICE void find_favourites(const Sequence& s, const Place& place) {
  const StepMemory& memory = s.memory;
  if (!s.greedy()) {
    for (int64_t j = 0; j <= s.limit; ++j) {
      const float max = simt::read(&memory.row_max[j]);
      if (row_fault(max) != 0) continue;
      Noise noise = s.noise(j);
      noise = {noise.seed, noise.position + noise.offset, 0};
      const Candidate mine =
          race_of_row(s.target_row(j), s.blocks(j), max, s.inverse_temperature, s.p_of(j).cutoff, noise, place);
      if (place.lane0()) write_to_first(&memory.best[j * place.all_warps + place.my_warp], mine);
    }
    simt::sync_cluster();
  }
  if (!place.first) return;
  for (int64_t j = place.warp; j <= s.limit; j += place.warps) {
    const float max = simt::read(&memory.row_max[j]);
    if (row_fault(max) != 0) continue;
    int64_t token;
    if (s.greedy()) {
      token = argmax(s.target_row(j), block_of_max(s.blocks(j), max), max);
    } else {
      token = index_of(best_of(&memory.best[j * place.all_warps], place.all_warps));
    }
    if (place.lane0()) simt::write(&memory.favourite[j], token);
  }
  simt::sync_block();
}

struct Emitted {
  int64_t accepted;
  int64_t token;  // the one after them, or -1
  int32_t status;
};

// Whether the draft after the accepted ones is the token that the target picks, which then is accepted, too.
SPECDEC_DEVICE bool is_favourite(const Sequence& s, Emitted* end) {
  const int32_t fault = row_fault(simt::read(&s.memory.row_max[end->accepted]));
  int32_t flags = 0;
  const int64_t x = s.draft(end->accepted, &flags);
  end->status |= fault != 0 ? fault : flags;
  end->token = fault != 0 ? -1 : simt::read(&s.memory.favourite[end->accepted]);
  if (end->token < 0 || x != end->token) return false;
  ++end->accepted;
  return true;
}

SPECDEC_DEVICE Emitted walk_favourites(const Sequence& s) {
  Emitted end = {0, -1, 0};
  while (is_favourite(s, &end)) {
  }
  return end;
}

// By a warp: writes the log-probabilities of the token that row i emitted; NaN if it emitted none (-1).
SPECDEC_DEVICE void write_log_probs(const Sequence& s, int64_t i, int64_t token) {
  float log_p = NAN, raw_log_p = NAN;
  if (token >= 0) {
    const Row row = s.target_row(i);
    const int64_t at = i * s.memory.n;
    const Blocks raw = {s.memory.raw_max + at, s.memory.raw_sum + at, s.memory.n};
    const float max = max_of_blocks(raw);
    float sum = 0.0f;
    for (int block = simt::thread() % kWarp; block < raw.n; block += kWarp) {
      sum += simt::read(&raw.mass[block]) * weight_of(simt::read(&raw.max[block]), max, 1.0f);
    }
    const float of_token = raw_logit(row, token);
    raw_log_p = of_token - (max + logf(simt::reduce(sum, Sum())));
    log_p = s.greedy() ? 0.0f : log_probability(adjusted(row, token, of_token), s.p_of(i));
  }
  if (simt::thread() % kWarp != 0) return;
  s.params.log_probs[s.b * (s.params.num_drafts_max + 1) + i] = log_p;
  s.params.raw_log_probs[s.b * (s.params.num_drafts_max + 1) + i] = raw_log_p;
}

// By a warp of the cluster: writes the outputs of a sequence.
SPECDEC_DEVICE void write_step(const Sequence& s, const Emitted& end) {
  const int64_t rows = s.params.num_drafts_max + 1;
  for (int64_t i = simt::thread() % kWarp; i < rows; i += kWarp) {
    s.params.tokens[s.b * rows + i] = i < end.accepted ? s.drafts()[i] : i == end.accepted ? end.token : -1;
  }
  if (simt::thread() % kWarp == 0) {
    s.params.num_accepted[s.b] = static_cast<int32_t>(end.accepted);
    s.params.num_emitted[s.b] = static_cast<int32_t>(end.accepted + (end.token >= 0));
    s.params.status[s.b] = end.status;
  }
  if (s.params.log_probs == nullptr) return;
  for (int64_t i = 0; i < rows; ++i) {
    write_log_probs(s, i, i < end.accepted ? s.drafts()[i] : i == end.accepted ? end.token : -1);
  }
}

SPECDEC_DEVICE Sequence sequence_of(const StepWork& work, int64_t b) {
  const SpeculativeStepParams& params = work.params;
  const int64_t k = params.num_drafts_max, asked = params.num_drafts == nullptr ? k : params.num_drafts[b];
  const float temperature = params.sampling.temperature[b];
  return {params,
          work.memory(b),
          work.place_for_copy(),
          b,
          work.measures(),
          static_cast<int>(asked < 0   ? 0
                           : asked > k ? k
                                       : asked),
          temperature,
          temperature == 0.0f ? 0.0f : 1.0f / temperature};
}

// The first of the two kernels of a split launch.
SPECDEC_KERNEL(speculative_measure_kernel, kMostThreads, StepWork) {
  measure_rows(sequence_of(params, simt::cluster() / params.blocks), Place::measuring(params.blocks));
}

// By the threads of a block, which divide the rows among them: looks at the drafts of all rows.
SPECDEC_DEVICE void look_at_drafts(const Sequence& s) {
  if (s.favours()) return;
  for (int64_t j = simt::thread(); j <= s.limit; j += simt::num_threads()) {
    simt::write(&s.memory.examined[j], look(s, j));
  }
}

SPECDEC_DEVICE void decide_step(const Sequence& s, const Place& place) {
  merge_rows(s, place);
  Emitted emitted;
  if (s.favours()) {
    find_favourites(s, place);
    if (!place.first || place.warp != 0) return;
    emitted = walk_favourites(s);
  } else {
    for (int64_t j = simt::thread(); j <= s.limit; j += simt::num_threads()) {
      simt::write(&s.memory.examined[j], examine(s, j, simt::read(&s.memory.examined[j])));
    }
    simt::sync_block();
    const Outcome end = s.params.rule == kRuleBlock ? walk_jointly(s, place) : walk(s, place);
    const int block = block_of_end(s, end);
    if (!s.target_row(end.j).drawn_here(block)) return;
    emitted = {end.j, draw_end(s, end, block, place), end.status};
    if (place.warp != 0) return;
  }
  write_step(s, emitted);
}

SPECDEC_KERNEL(speculative_step_kernel, kMostThreads, StepWork) {
  if (params.measures()) simt::arrive_only();
  const Place place = Place::here();
  const Sequence s = sequence_of(params, simt::cluster());
  s.measures ? begin_copies(s.memory.ring, s.measured(), place) : s.memory.ring.begin();
  look_at_drafts(s);  // meanwhile, logits are being copied, or measured by the launch before
  prefetch_few_drafts(s, place);
  if (s.measures) {
    simt::wait_cluster();  // now all blocks run, and may write to each other's memory
    measure_rows(s, place);
  } else if (params.measured != nullptr) {
    simt::wait_for_launch_before();
    params.load_statistics(s.b, s.memory.max);
  }
  simt::sync_cluster();
  decide_step(s, place);
  if (!s.memory.ring.stay || !s.greedy()) return;
  simt::arrive_only();                     // block 0 has read what others keep,
  if (!place.first) simt::wait_cluster();  // whose shared memory ends with them
}

}  // namespace specdec::cuda
