// A linear layer for the few rows of a step of decoding, where reading the weights is all that takes time. The weights
// are the wide operand of the tensor cores' m16n8k16, and rows of x its narrow one: 1 to 8 rows cost the same. Every
// number is summed in an order that the number of inputs alone determines, so a row's result depends, to the last bit,
// on no other row, nor on how many there are or in which kernel.
#pragma once

#include "blocks.h"
#include "grid.h"
#include "operations.h"

namespace specdec::cuda {

constexpr int kLinearWarps = 8;  // of a block, each of which has a part of the inputs
constexpr int kLinearThreads = kLinearWarps * kWarp;
constexpr int kOutputs = 16;     // of a block
constexpr int kRows = 8;         // of a tile
constexpr int kChunk = 32;       // inputs that a warp takes at a time: of each of 16 outputs, 16 bytes a lane
constexpr int kAhead = 4;        // chunks of weights that are on their way to a warp
constexpr int kNumberBytes = 2;  // of bfloat16 and float16
constexpr int kChunkBytes = kChunk * kNumberBytes;

SPECDEC_DEVICE int lesser(int a, int b) { return a < b ? a : b; }

// How many tiles of this size have so many places.
SPECDEC_HD int tiles_of(int places, int size) { return places / size + (places % size != 0); }

// The grid is all tiles of kTiles * 8 rows, for each 16 outputs: blocks that read the same weights run together.
template <class Format, int kTiles>
SPECDEC_KERNEL(linear_kernel, kLinearThreads, (kTiles == 1 ? 3 : 2), LinearParams) {
  const int row_tiles = tiles_of(params.rows, kTiles * kRows);
  const int first_row = simt::block_x() % row_tiles * (kTiles * kRows);
  const int first_output = simt::block_x() / row_tiles * kOutputs;
  const int group = lane() / 4, quarter = lane() % 4;
  const int chunks = params.inputs / kChunk, most = tiles_of(chunks, kLinearWarps), first = warp() * most;
  int count = lesser(chunks - first, most);  // of the warp; below 1: none

  // A product of m16n8k16 takes k = 2 quarter, 2 quarter + 1, 2 quarter + 8 and 2 quarter + 9 of a lane. Which inputs
  // these are is free if weights and x agree, so a lane has 8 neighbours of each chunk, for two products. Beyond the
  // last output, and the last row, the last one is read again.
  const int64_t begin = int64_t{first} * kChunkBytes + quarter * sizeof(simt::Bytes16);
  const char* weights[2];
  const char* inputs[kTiles];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int64_t output = lesser(first_output + group + 8 * half, params.outputs - 1);
    weights[half] = params.weight + output * params.inputs * kNumberBytes + begin;
  }
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    const int64_t row = lesser(first_row + tile * kRows + group, params.rows - 1);
    inputs[tile] = params.x + row * params.x_stride + begin;
  }

  simt::Bytes16 ahead[kAhead][2];
  float sums[kTiles][4] = {};
  const auto load = [&](int slot, int chunks_on) {
#pragma unroll
    for (int half = 0; half < 2; ++half) ahead[slot][half] = simt::stream16(weights[half] + chunks_on * kChunkBytes);
  };
  const auto multiply = [&](int slot) {
    const uint32_t (&low)[4] = ahead[slot][0].word, (&high)[4] = ahead[slot][1].word;
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const simt::Bytes16 x = simt::cached16(inputs[tile] + slot * kChunkBytes);
#pragma unroll
      for (int i = 0; i < 4; i += 2) {
        Format::multiply_add(sums[tile], {low[i], high[i], low[i + 1], high[i + 1]}, {x.word[i], x.word[i + 1]});
      }
    }
  };
#pragma unroll
  for (int slot = 0; slot < kAhead; ++slot) {
    if (slot < count) load(slot, slot);
  }
#pragma unroll 1
  for (; count >= kAhead; count -= kAhead) {
#pragma unroll
    for (int slot = 0; slot < kAhead; ++slot) {
      multiply(slot);
      if (kAhead + slot < count) load(slot, kAhead + slot);
    }
    for (const char*& each : weights) each += kAhead * kChunkBytes;
    for (const char*& each : inputs) each += kAhead * kChunkBytes;
  }
#pragma unroll
  for (int slot = 0; slot < kAhead; ++slot) {
    if (slot < count) multiply(slot);
  }

  Four* of_warps = reinterpret_cast<Four*>(simt::shared_memory());  // [warps, tiles, lanes]
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    const float (&sum)[4] = sums[tile];
    simt::write(&of_warps[(warp() * kTiles + tile) * kWarp + lane()], Four{{sum[0], sum[1], sum[2], sum[3]}});
  }
  simt::sync_block();
  if (warp() >= kTiles) return;
  float total[4] = {};  // of output group + 8 (e / 2) and row 2 quarter + e % 2
#pragma unroll
  for (int part = 0; part < kLinearWarps; ++part) {
    const Four sum = simt::read(&of_warps[(part * kTiles + warp()) * kWarp + lane()]);
#pragma unroll
    for (int e = 0; e < 4; ++e) total[e] += sum.of[e];
  }
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const int row = first_row + warp() * kRows + 2 * quarter + e % 2, output = first_output + group + e / 2 * 8;
    if (row >= params.rows || output >= params.outputs) continue;
    if (params.bias != nullptr) total[e] += Format::logit(Format::bits(params.bias, output), 0);
    reinterpret_cast<uint16_t*>(params.y)[int64_t{row} * params.outputs + output] = Format::nearest(total[e]);
  }
}

template <class Launch>
void run_linear(const LinearParams& params, const Launch& launch) {
  if (params.rows == 0 || params.outputs == 0) return;
  const auto of = [&](auto* kernel, int tiles) {
    const int64_t blocks = int64_t{tiles_of(params.rows, tiles * kRows)} * tiles_of(params.outputs, kOutputs);
    launch(kernel, params, Grid{blocks, 1, 1, kLinearThreads, kLinearThreads * tiles * int64_t{sizeof(Four)}, false});
  };
  const bool few = params.rows <= kRows;
  if (params.dtype == Dtype::kBFloat16) {
    few ? of(linear_kernel<BFloat16, 1>, 1) : of(linear_kernel<BFloat16, 2>, 2);
  } else {
    few ? of(linear_kernel<Float16, 1>, 1) : of(linear_kernel<Float16, 2>, 2);
  }
}

}  // namespace specdec::cuda
