// Exponential races within a block.
#pragma once

#include "block_noise.h"
#include "block_sums.h"

namespace specdec::cpu {

// n Exp(1) variates for the indices first, first + 1, ..., in whole lanes.
SPECDEC_BODY void exponentials(PhiloxWords philox_words, int64_t first, int64_t n, Noise noise, Stream stream,
                               float* e) {
  alignas(64) uint32_t words[kBlock];
  philox_words(first, n, noise, stream, words);
  for (int64_t i = 0; i < n; ++i) e[i] = exponential(uniform(words[i]));
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

SPECDEC_BODY int64_t draw_index_body(PhiloxWords philox_words, const float* weights, int64_t n, Noise noise,
                                     Stream stream) {
  alignas(64) float e[kBlock];
  Candidate best = {0.0f, -1};
  for (int64_t first = 0; first < n; first += kBlock) {
    const int64_t count = std::min<int64_t>(n - first, kBlock);
    exponentials(philox_words, first, (count + kLanes - 1) / kLanes * kLanes, noise, stream, e);
    const Candidate here = fastest(weights + first, e, count);
    if (here.score > best.score) best = {here.score, first + here.token};
  }
  return best.token;
}

// The token that wins the race among a block's weights; -1 if all are 0.
SPECDEC_BODY int64_t race_in_block(PhiloxWords philox_words, const float* weights, int64_t block, int64_t n,
                                   Noise noise, Stream stream) {
  alignas(64) float e[kBlock];
  exponentials(philox_words, block * kBlock, n, noise, stream, e);
  const Candidate best = fastest(weights, e, n);
  return best.token < 0 ? -1 : block * kBlock + best.token;
}

SPECDEC_BODY int64_t draw_body(PhiloxWords philox_words, Row row, int64_t block, float max, float inverse_temperature,
                               float cutoff, Noise noise, Stream stream, int64_t n) {
  alignas(64) float w[kBlock];
  weights_above(row, block, max, inverse_temperature, cutoff, w, n);
  return race_in_block(philox_words, w, block, n, noise, stream);
}

SPECDEC_BODY int64_t draw_residual_body(PhiloxWords philox_words, Row p_row, Distribution p, float w,
                                        const DraftDistribution& q, int64_t block, Noise noise, int64_t n) {
  alignas(64) float weights[kBlock];
  residual_weights(p_row, p, w, q, block, weights, n);
  return race_in_block(philox_words, weights, block, n, noise, kRecoverToken);
}

// The block's words, in whole lanes.
SPECDEC_BODY void words_of_race(PhiloxWords philox_words, const Race& race, int64_t block, int64_t size, int64_t n,
                                uint32_t* words) {
  if (race.ids == nullptr) return philox_words(block * kBlock, n, race.noise, race.stream, words);
  words_of_ids(philox_words, race.ids + block * kBlock, size, race.noise, race.stream, words);
  for (int64_t i = size; i < n; ++i) words[i] = UINT32_MAX;
}

SPECDEC_BODY int64_t arrivals_body(PhiloxWords philox_words, Row row, int64_t block, const Race& race, float block_max,
                                   float least, Candidate* out, int64_t n) {
  constexpr float kFew = 0x1p27f;  // one word of 32 is smaller
  const int64_t size = size_of(row, block);
  alignas(64) uint32_t words[kBlock];
  words_of_race(philox_words, race, block, size, n, words);
  int64_t count = 0;
  // A score is w / E, and E is at least u. So no token with a larger word can score `least`; there is room for
  // rounding.
  const float largest = weight(block_max, race.max, race.inverse_temperature) * 0x1.0001p32f / least;
  if (largest < kFew) {
    const uint32_t limit = static_cast<uint32_t>(largest);
    uint32_t smallest[kLanes];
    for (int lane = 0; lane < kLanes; ++lane) smallest[lane] = UINT32_MAX;
    for (int64_t i = 0; i < n; i += kLanes) {
      for (int lane = 0; lane < kLanes; ++lane) {
        smallest[lane] = words[i + lane] < smallest[lane] ? words[i + lane] : smallest[lane];
      }
    }
    for (int lane = 0; lane < kLanes; ++lane) {
      if (smallest[lane] > limit) continue;
      for (int64_t i = lane; i < size; i += kLanes) {
        if (words[i] > limit) continue;
        float x;
        load_range(row, block * kBlock + i, 1, &x);
        const float w = x >= race.cutoff ? weight(x, race.max, race.inverse_temperature) : 0.0f;
        const float score = w / exponential(uniform(words[i]));
        if (score > 0.0f && score >= least) out[count++] = {score, block * kBlock + i};
      }
    }
    return count;
  }
  alignas(64) float scores[kBlock];
  weights_above(row, block, race.max, race.inverse_temperature, race.cutoff, scores, n);
  for (int64_t i = 0; i < n; ++i) scores[i] /= exponential(uniform(words[i]));
  for (int64_t i = 0; i < size; ++i) {
    if (scores[i] > 0.0f && scores[i] >= least) out[count++] = {scores[i], block * kBlock + i};
  }
  return count;
}

}  // namespace specdec::cpu
