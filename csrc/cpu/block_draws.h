// Exponential races within a block.
#pragma once

#include "block_sums.h"

namespace specdec::cpu {

// n Exp(1) variates for the indices first, first + 1, ... Word i of Philox call c belongs to index 4 c + i. `first` is
// a multiple of 4, n <= kBlock.
SPECDEC_BODY void exponentials(int64_t first, int64_t n, Noise noise, Stream stream, float* e) {
  const int64_t calls = (n + 3) / 4;
  alignas(64) uint32_t bits[4][kBlock / 4];
  for (int64_t call = 0; call < calls; ++call) {
    const Words words =
        philox(noise.seed, static_cast<uint32_t>(first / 4 + call), noise.position, noise.offset, stream);
    for (int i = 0; i < 4; ++i) bits[i][call] = words.word[i];
  }
  for (int i = 0; i < 4; ++i) {
    for (int64_t call = 0; call < calls; ++call) e[4 * call + i] = exponential(uniform(bits[i][call]));
  }
}

// The smallest E / w, found as the largest w / E; the lowest index of a tie. Overwrites e.
SPECDEC_BODY Candidate fastest(const float* weights, float* e, int64_t n) {
  for (int64_t i = 0; i < n; ++i) e[i] = weights[i] / e[i];
  Candidate best = {0.0f, -1};
  for (int64_t i = 0; i < n; ++i) {
    if (e[i] > best.score) best = {e[i], i};
  }
  return best;
}

SPECDEC_BODY int64_t draw_index_body(const float* weights, int64_t n, Noise noise, Stream stream) {
  alignas(64) float e[kBlock];
  Candidate best = {0.0f, -1};
  for (int64_t first = 0; first < n; first += kBlock) {
    const int64_t count = std::min<int64_t>(n - first, kBlock);
    exponentials(first, count, noise, stream, e);
    const Candidate here = fastest(weights + first, e, count);
    if (here.score > best.score) best = {here.score, first + here.token};
  }
  return best.token;
}

// The token that wins the race among a block's weights; -1 if all are 0.
SPECDEC_BODY int64_t race_in_block(const float* weights, int64_t block, int64_t n, Noise noise, Stream stream) {
  alignas(64) float e[kBlock];
  exponentials(block * kBlock, n, noise, stream, e);
  const Candidate best = fastest(weights, e, n);
  return best.token < 0 ? -1 : block * kBlock + best.token;
}

SPECDEC_BODY int64_t draw_body(Row row, int64_t block, float max, float inverse_temperature, float cutoff, Noise noise,
                               Stream stream, int64_t n) {
  alignas(64) float w[kBlock];
  weights_above(row, block, max, inverse_temperature, cutoff, w, n);
  return race_in_block(w, block, n, noise, stream);
}

SPECDEC_BODY int64_t draw_residual_body(Row p_row, Distribution p, float w, const DraftDistribution& q, int64_t block,
                                        Noise noise, int64_t n) {
  alignas(64) float weights[kBlock];
  residual_weights(p_row, p, w, q, block, weights, n);
  return race_in_block(weights, block, n, noise, kRecoverToken);
}

SPECDEC_BODY Candidate race_body(Row row, int64_t block, float max, float inverse_temperature, float cutoff,
                                 const int64_t* ids, Noise noise, int64_t n) {
  alignas(64) float w[kBlock], e[kBlock];
  weights_above(row, block, max, inverse_temperature, cutoff, w, n);
  if (ids == nullptr) {
    exponentials(block * kBlock, n, noise, kRace, e);
  } else {
    for (int64_t i = 0; i < n; ++i) e[i] = 1.0f;
    for (int64_t i = 0; i < size_of(row, block); ++i) {
      const int64_t token = ids[block * kBlock + i];
      const Words words = philox(noise.seed, static_cast<uint32_t>(token / 4), noise.position, noise.offset, kRace);
      e[i] = exponential(uniform(words.word[token % 4]));
    }
  }
  const Candidate best = fastest(w, e, n);
  return {best.score, best.token < 0 ? -1 : block * kBlock + best.token};
}

SPECDEC_BODY int64_t arrivals_body(Row row, int64_t block, float max, float inverse_temperature, float cutoff,
                                   Noise noise, float least, Candidate* out, int64_t n) {
  alignas(64) float w[kBlock], e[kBlock];
  weights_above(row, block, max, inverse_temperature, cutoff, w, n);
  exponentials(block * kBlock, n, noise, kDraftToken, e);
  for (int64_t i = 0; i < n; ++i) e[i] = w[i] / e[i];
  int64_t count = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (e[i] > least) out[count++] = {e[i], block * kBlock + i};
  }
  return count;
}

}  // namespace specdec::cpu
