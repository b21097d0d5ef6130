// Reads blocks of logits that begin or end anywhere. Loads and bulk copies move granules, which are 16 aligned bytes; a
// block whose first logit is not the first of its granule is moved with that granule, and shifted while it is loaded.
#pragma once

#include "kept.h"

namespace specdec::cuda {

using simt::Bytes16;

constexpr int kGranule = sizeof(Bytes16);

// The granules of a block of logits, in device memory.
struct Granules {
  const char* first;  // of the block's first logit. What lies before that logit is in the same allocation
  int shift;          // bytes before that logit
  int whole;          // bytes of the granules that end within the row. Nothing behind the row is read
  int rest;           // bytes of the row in the next granule, if that has logits of the block

  // `left`: bytes from the first logit to the end of the row.
  SPECDEC_DEVICE static Granules of(const char* data, int64_t left, int block_bytes) {
    const int shift = static_cast<int>(reinterpret_cast<uintptr_t>(data) % kGranule);
    const int wanted = shift == 0 ? block_bytes : block_bytes + kGranule;
    const int there = left + shift < wanted ? static_cast<int>(left) + shift : wanted;
    return {data - shift, shift, there / kGranule * kGranule, there % kGranule};
  }
};

// The bytes of two granules from low's byte `shift` on, an even number.
SPECDEC_DEVICE Bytes16 shifted(const Bytes16& low, const Bytes16& high, int shift) {
  uint32_t word[8] = {low.word[0],  low.word[1],  low.word[2],  low.word[3],
                      high.word[0], high.word[1], high.word[2], high.word[3]};
  // An array with a variable index would lie in memory.
#pragma unroll
  for (int k = 0; k < 6; ++k) word[k] = (shift & 8) != 0 ? word[k + 2] : word[k];
#pragma unroll
  for (int k = 0; k < 5; ++k) word[k] = (shift & 4) != 0 ? word[k + 1] : word[k];
  Bytes16 bytes;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    bytes.word[k] = static_cast<uint32_t>((uint64_t{word[k + 1]} << 32 | word[k]) >> 8 * (shift & 2));
  }
  return bytes;
}

// A block as if it began with a granule, padded with -inf to a whole block.
struct Shifted {
  const char* data;  // where the whole granules are, in device memory or copied
  int shift, whole;  // as in Granules
  Bytes16 last;      // the next granule, of which the row has only a part
  uint32_t padding;

  // By a warp. `copied`: where the granules were copied to, or an address in the first.
  SPECDEC_DEVICE static Shifted of(const Granules& granules, const char* copied, uint32_t padding) {
    const int lane = simt::thread() % kWarp;
    const uint16_t* rest = reinterpret_cast<const uint16_t*>(granules.first + granules.whole);
    const uint32_t half = 2 * lane < granules.rest ? rest[lane] : padding >> lane % 2 * 16 & 0xffffu;
    const uint32_t word = half | simt::shuffle(half, lane ^ 1) << 16;  // in even lanes
    const Bytes16 last = {
        {simt::shuffle(word, 0), simt::shuffle(word, 2), simt::shuffle(word, 4), simt::shuffle(word, 6)}};
    return {copied - reinterpret_cast<uintptr_t>(copied) % kGranule, granules.shift, granules.whole, last, padding};
  }

  // The 16 bytes of the block from its byte `at` on.
  SPECDEC_DEVICE Bytes16 bytes(int at) const { return shifted(granule(at), granule(at + kGranule), shift); }
  // The same where all granules of the block are whole.
  SPECDEC_DEVICE Bytes16 bytes_of_whole(int at) const {
    return shifted(simt::load16(data + at), simt::load16(data + at + kGranule), shift);
  }

 private:
  SPECDEC_DEVICE Bytes16 granule(int at) const {
    if (at < whole) return simt::load16(data + at);
    return at == whole ? last : Bytes16{{padding, padding, padding, padding}};
  }
};

}  // namespace specdec::cuda
