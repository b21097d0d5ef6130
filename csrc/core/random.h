// Counter-based random numbers, without state: Philox4x32-10 (Salmon et al., SC 2011).
// The key is the sequence's seed, the counter (index / 4, position of the step's first token, offset in the step,
// stream).
#pragma once

#include "hd.h"

namespace specdec {

// The last word of the counter. No two kinds of decision share noise: a recovery drawn with the draft's noise would
// favour what the draft favoured.
enum Stream : uint32_t {
  kDraftBlock = 0,
  kDraftToken = 1,
  kAccept = 2,
  kRecoverBlock = 3,
  kRecoverToken = 4,
  kRace = 5,  // rule `coupled`, where draft and target share it on purpose; its offset is always 0
};

struct Words {
  uint32_t word[4];
};

constexpr uint32_t kPhiloxMultiplier0 = 0xD2511F53u, kPhiloxMultiplier1 = 0xCD9E8D57u;
constexpr uint32_t kPhiloxKey0 = 0x9E3779B9u, kPhiloxKey1 = 0xBB67AE85u;  // added to the key after each round

SPECDEC_HD Words philox(uint64_t seed, uint32_t index_div_4, uint32_t position, uint32_t offset, uint32_t stream) {
  uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
  uint32_t c0 = index_div_4, c1 = position, c2 = offset, c3 = stream;
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = uint64_t{kPhiloxMultiplier0} * c0;
    const uint64_t product1 = uint64_t{kPhiloxMultiplier1} * c2;
    c0 = static_cast<uint32_t>(product1 >> 32) ^ c1 ^ k0;
    c2 = static_cast<uint32_t>(product0 >> 32) ^ c3 ^ k1;
    c1 = static_cast<uint32_t>(product1);
    c3 = static_cast<uint32_t>(product0);
    k0 += kPhiloxKey0;
    k1 += kPhiloxKey1;
  }
  return {{c0, c1, c2, c3}};
}

// u in the open interval (0, 1). Small u keep their resolution: down to 2^-33, not 2^-24.
SPECDEC_HD float uniform(uint32_t bits) {
  const float u = (static_cast<float>(bits) + 0.5f) * 0x1p-32f;
  return u < 1.0f - 0x1p-24f ? u : 1.0f - 0x1p-24f;
}

// -log1p(-u): an Exp(1) variate. 1 - u is split into 2^k (1 + f), f in [-1/4, 1/2), with f exact, so that small
// results, which are the winners of a race, have full relative precision. Relative error below 3e-7.
SPECDEC_HD float exponential(float u) {
  const int32_t k = static_cast<int32_t>(as_bits(1.0f - u) - as_bits(0.75f)) >> 23;
  const float scale = as_float(as_bits(1.0f) - (static_cast<uint32_t>(k) << 23));  // 2^-k
  const float f = (scale - 1.0f) - u * scale;
  float r = -0.045074712f;
  r = r * f + 0.1046302f;
  r = r * f - 0.13161199f;
  r = r * f + 0.14478397f;
  r = r * f - 0.16647312f;
  r = r * f + 0.19990861f;
  r = r * f - 0.25000095f;
  r = r * f + 0.3333345f;
  r = r * f - 0.5f;
  const float log1p_f = r * f * f + f;
  return -(static_cast<float>(k) * 0.69314718f + log1p_f);
}

}  // namespace specdec
