// Rule `coupled` only, before deciding: every token races with the noise of its id and absolute position, which draft
// and target share. A block of threads takes a block of logits. It is bound by random numbers, one for each token.
#pragma once

#include "work.h"

namespace specdec::cuda {

constexpr int kRaceThreads = 256;

// No token of less weight, relative to the row's largest, can win: E is at least 2^-33, and that of the row's largest
// at most 16.7.
constexpr float kLeastWeight = 0x1p-33f / 17.0f;

// Grid: blocks of a row, sequences, rows.
template <class Rows>
SPECDEC_KERNEL(race_kernel, kRaceThreads, 4, Work) {
  simt::start_next_launch();
  const int block = simt::block_x(), j = simt::block_z();
  const uint32_t b = params.first + simt::block_y();
  const Temperature temperature = params.temperature(b);
  const Row row = params.row(b, j);
  simt::wait_for_launch_before();
  if (!params.used(b, j) || temperature.greedy()) return;
  const Scratch& scratch = params.scratch;
  const Stats* stats = params.stats(b, j);
  float max = -INFINITY, cutoff = -INFINITY;
  if (scratch.rows != nullptr) {
    const RowStats found = simt::fresh(&scratch.rows[params.place(b, j)]);
    max = found.max, cutoff = found.cutoff;
  } else {
    for (int i = lane(); i < params.n; i += kWarp) max = simt::larger(max, simt::fresh(&stats[i]).max);
    max = simt::reduce(max, Larger());
  }
  const Noise step = params.noise(b, j), noise = {step.seed, step.position + step.offset, 0};
  const float scale = temperature.scale, of_block = simt::fresh(&stats[block]).max;
  Candidate best = 0;
  // Nothing is drawn from a row with a fault, whose `max` makes this false or a weight NaN.
  if (of_block >= cutoff && weight_of(of_block, max, scale) >= kLeastWeight) {
#pragma unroll 1
    for (int place = 4 * simt::thread(); place < kBlock; place += 4 * simt::num_threads()) {
      const int64_t first = int64_t{block} * kBlock + place;
      float weights[4], largest = 0.0f;
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        const float logit = first + k < row.size ? Rows::logit(row, first + k) : -INFINITY;
        weights[k] = logit >= cutoff ? weight_of(logit, max, scale) : 0.0f;
        largest = weights[k] > largest ? weights[k] : largest;
      }
      if (largest < kLeastWeight) continue;
      if (row.d2t == nullptr) {
        best = Better()(best, race_of_four(weights, static_cast<uint32_t>(first), noise, kRace));
        continue;
      }
#pragma unroll 1
      for (int k = 0; k < 4; ++k) {  // each of the target's ids needs its own call of Philox
        if (first + k >= row.size) break;
        const float weight = k < 2 ? (k == 0 ? weights[0] : weights[1]) : (k == 2 ? weights[2] : weights[3]);
        const float noise_of_id = exponential_of(static_cast<uint32_t>(row.d2t[first + k]), noise, kRace);
        best = Better()(best, candidate(simt::quotient(weight, noise_of_id), static_cast<uint32_t>(first + k)));
      }
    }
  }
  best = best_of_block(best, reinterpret_cast<Slots*>(simt::shared_memory()), 0);
  if (simt::thread() == 0) simt::write(&params.races(b, j)[block], best);
}

// By a warp: the winner of a row's race.
SPECDEC_DEVICE int64_t winner_of(const Candidate* races, int n) {
  Candidate best = 0;
  for (int i = lane(); i < n; i += kWarp) best = Better()(best, simt::fresh(&races[i]));
  return index_of(best_of_warp(best));
}

}  // namespace specdec::cuda
