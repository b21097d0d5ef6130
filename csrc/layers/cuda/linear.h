// A linear layer for the few rows of a step of decoding, where reading the weights is all that takes time. The weights
// are the wide operand of the tensor cores' m16n8k16, and rows of x its narrow one: 1 to 8 rows cost the same. Every
// number is summed in an order that the number of inputs alone determines, so a row's result depends, to the last bit,
// on no other row, nor on how many there are or in which kernel. What a decoder layer has before and after its products
// can be computed on the way (Form), since a launch of its own would take longer than its few numbers do.
#pragma once

#include "../../common/formats.h"
#include "../../common/grid.h"
#include "operations.h"
#include "weights.h"

namespace specdec::cuda {

constexpr int kLinearWarps = 8;  // of a block, each of which has a part of the inputs
constexpr int kLinearThreads = kLinearWarps * kWarp;
constexpr int kOutputs = 16;  // of a block
constexpr int kRows = 8;      // of a tile
constexpr int kPart = 32;     // inputs that a warp multiplies by at a time, 8 a lane
constexpr int kAhead = 4;     // chunks of weights that are on their way to a warp, each of 16 bytes an output and lane
constexpr int kNumberBytes = 2;  // of bfloat16 and float16
constexpr int kLaneBytes = 16;   // of a row of x that a lane has of a part

SPECDEC_DEVICE int lesser(int a, int b) { return a < b ? a : b; }

// How many tiles of this size have so many places.
SPECDEC_HD int tiles_of(int places, int size) { return places / size + (places % size != 0); }

// What a kernel computes besides a product: whether x goes through RMSNorm first, whether half of the outputs gate the
// others, and whether results are added to something.
struct Alone {
  static constexpr bool kNorm = false, kGate = false, kBase = false;
};
struct Normed : Alone {
  static constexpr bool kNorm = true;
};
struct Gated : Normed {
  static constexpr bool kGate = true;
};
struct Added : Alone {
  static constexpr bool kBase = true;
};

template <class Format>
SPECDEC_DEVICE float rounded(float value) {
  return Format::logit(Format::nearest(value), 0);
}

// By a block: what RMSNorm multiplies a lane's row of each tile by. Each warp adds up the squares of its own inputs,
// the same ones that it multiplies later, so 8 rows cost what one does, and then finds them in a cache.
template <class Format, int kTiles, int kParts>
SPECDEC_DEVICE void find_scales(const LinearParams& params, const char* const (&inputs)[kTiles], int count,
                                float* of_warps, float (&scales)[kTiles]) {
  float squares[kTiles] = {};
#pragma unroll 2
  for (int chunk = 0; chunk < count; ++chunk) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        const char* place = inputs[tile] + chunk * (kParts * kPart * kNumberBytes) + part * kLaneBytes;
        const simt::Bytes16 x = simt::cached16(place);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const float value = Format::logit(x.word[i / 2], i % 2);
          squares[tile] = fmaf(value, value, squares[tile]);
        }
      }
    }
  }
  const int group = lane() / 4;
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    const float sum = simt::reduce<1, 2>(squares[tile], Sum());
    if (lane() % 4 == 0) simt::write(&of_warps[(warp() * kTiles + tile) * kRows + group], sum);
  }
  simt::sync_block();
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    float total = 0.0f;
#pragma unroll
    for (int each = 0; each < kLinearWarps; ++each) {
      total += simt::read(&of_warps[(each * kTiles + tile) * kRows + group]);
    }
    scales[tile] = simt::inverse_root(simt::quotient(total, static_cast<float>(params.inputs)) + params.epsilon);
  }
}

// Eight inputs of a row by RMSNorm, rounded where the operation rms_norm rounds them.
template <class Format>
SPECDEC_DEVICE simt::Bytes16 normed(const LinearParams& params, const simt::Bytes16& x, const simt::Bytes16& norm,
                                    float scale) {
  simt::Bytes16 result;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    uint32_t word = x.word[i];
    float value[2] = {Format::logit(word, 0) * scale, Format::logit(word, 1) * scale};
    if (params.round_first) {
      word = Format::nearest(value[0], value[1]);
      value[0] = Format::logit(word, 0), value[1] = Format::logit(word, 1);
    }
#pragma unroll
    for (int k = 0; k < 2; ++k) value[k] *= Format::logit(norm.word[i], k) + params.offset;
    result.word[i] = Format::nearest(value[0], value[1]);
  }
  return result;
}

// activation(gate) * up, of rounded numbers, rounded where the operation gated rounds them.
template <class Format>
SPECDEC_DEVICE float gated(const LinearParams& params, float gate, float up) {
  // GELU's (1 + tanh(z)) / 2 is the logistic function of 2 z.
  const float z = params.gelu ? 1.5957691216057308f * (gate + 0.044715f * gate * gate * gate) : gate;
  return rounded<Format>(gate / (1.0f + simt::exp2_of(-1.4426950408889634f * z))) * up;
}

// The grid is all tiles of kTiles * 8 rows, for each 16 outputs: blocks that read the same weights run together. A
// block that gates has 8 outputs of each half of the weights.
template <class Format, int kTiles, class Form, template <class> class Stored>
SPECDEC_KERNEL(linear_kernel, kLinearThreads, (kTiles == 1 ? 3 : 2), LinearParams) {
  using Weights = Stored<Format>;
  constexpr int kChunk = Weights::kParts * kPart, kStep = kChunk * kNumberBytes;  // bytes of x
  constexpr int kOwn = Form::kGate ? kOutputs / 2 : kOutputs;                     // outputs of a block
  const int row_tiles = tiles_of(params.rows, kTiles * kRows);
  const int first_row = simt::block_x() % row_tiles * (kTiles * kRows);
  const int first_output = simt::block_x() / row_tiles * kOwn;
  const int next_half = Form::kGate ? params.outputs : 8;  // how far apart the outputs are of which a lane has a part
  const int group = lane() / 4, quarter = lane() % 4;
  const int chunks = params.inputs / kChunk, most = tiles_of(chunks, kLinearWarps), first = warp() * most;
  int count = lesser(chunks - first, most);  // of the warp; below 1: none

  // A product of m16n8k16 takes k = 2 quarter, 2 quarter + 1, 2 quarter + 8 and 2 quarter + 9 of a lane. Which inputs
  // these are is free if weights and x agree, so a lane has 8 neighbours of each part, for two products, and those of
  // the parts of a chunk beside each other. Beyond the last output, and the last row, the last one is read again.
  const int64_t begin = int64_t{first} * kStep + quarter * (Weights::kParts * kLaneBytes);
  const char* weights[2];
  float of_outputs[2];  // what sums are multiplied by
  const char* inputs[kTiles];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int last = (Form::kGate && half == 1 ? 2 : 1) * params.outputs - 1;
    const int64_t output = lesser(first_output + group + half * next_half, last);
    weights[half] = Weights::place(params.weight, output, params.inputs, first, quarter);
    of_outputs[half] = Weights::scale(params.weight, output, params.inputs);
  }
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    const int64_t row = lesser(first_row + tile * kRows + group, params.rows - 1);
    inputs[tile] = params.x + row * params.x_stride + begin;
  }

  simt::Bytes16 ahead[kAhead][2];
  float sums[kTiles][4] = {}, scales[kTiles];
  const char* norm = Form::kNorm ? params.norm + begin : nullptr;
  const auto load = [&](int slot, int chunks_on) {
#pragma unroll
    for (int half = 0; half < 2; ++half) ahead[slot][half] = simt::stream16(weights[half] + chunks_on * Weights::kStep);
  };
  const auto multiply = [&](int slot) {
#pragma unroll
    for (int part = 0; part < Weights::kParts; ++part) {
      const int place = slot * kStep + part * kLaneBytes;
      const simt::Bytes16 low = Weights::part(ahead[slot][0], part), high = Weights::part(ahead[slot][1], part);
      simt::Bytes16 factors;
      if constexpr (Form::kNorm) factors = simt::cached16(norm + place);
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        simt::Bytes16 x = simt::cached16(inputs[tile] + place);
        if constexpr (Form::kNorm) x = normed<Format>(params, x, factors, scales[tile]);
#pragma unroll
        for (int i = 0; i < 4; i += 2) {
          const uint32_t (&a)[4] = low.word, (&b)[4] = high.word;
          Format::multiply_add(sums[tile], {a[i], b[i], a[i + 1], b[i + 1]}, {x.word[i], x.word[i + 1]});
        }
      }
    }
  };
#pragma unroll
  for (int slot = 0; slot < kAhead; ++slot) {
    if (slot < count) load(slot, slot);
  }
  Four* of_warps = reinterpret_cast<Four*>(simt::shared_memory());  // [warps, tiles, lanes]
  // The first weights are on their way meanwhile. What is written later lies elsewhere, so that no barrier is needed.
  if constexpr (Form::kNorm) {
    float* squares = reinterpret_cast<float*>(of_warps + kLinearThreads * kTiles);
    find_scales<Format, kTiles, Weights::kParts>(params, inputs, count, squares, scales);
  }
#pragma unroll 1
  for (; count >= kAhead; count -= kAhead) {
#pragma unroll
    for (int slot = 0; slot < kAhead; ++slot) {
      multiply(slot);
      if (kAhead + slot < count) load(slot, kAhead + slot);
    }
    for (const char*& each : weights) each += kAhead * Weights::kStep;
    for (const char*& each : inputs) each += kAhead * kStep;
    if constexpr (Form::kNorm) norm += kAhead * kStep;
  }
#pragma unroll
  for (int slot = 0; slot < kAhead; ++slot) {
    if (slot < count) multiply(slot);
  }

#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    const float (&sum)[4] = sums[tile];
    simt::write(&of_warps[(warp() * kTiles + tile) * kWarp + lane()], Four{{sum[0], sum[1], sum[2], sum[3]}});
  }
  simt::sync_block();
  if (warp() >= kTiles) return;
  float total[4] = {};  // of output group + next_half (e / 2) and row 2 quarter + e % 2
#pragma unroll
  for (int part = 0; part < kLinearWarps; ++part) {
    const Four sum = simt::read(&of_warps[(part * kTiles + warp()) * kWarp + lane()]);
#pragma unroll
    for (int e = 0; e < 4; ++e) total[e] += sum.of[e];
  }
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const int row = first_row + warp() * kRows + 2 * quarter + e % 2, output = first_output + group + e / 2 * next_half;
    const bool inside = Form::kGate ? first_output + group < params.outputs : output < params.outputs;
    if (row >= params.rows || !inside) continue;
    if constexpr (Weights::kHasScales) total[e] *= of_outputs[e / 2];
    if (params.bias != nullptr) total[e] += Format::logit(Format::bits(params.bias, output), 0);
    const int64_t place = int64_t{row} * params.outputs + output;
    if constexpr (Form::kBase) {
      total[e] = rounded<Format>(total[e]) + Format::logit(Format::bits(params.base, place), 0);
    }
    if constexpr (Form::kGate) {
      total[e] = rounded<Format>(total[e]);
      if (e < 2) continue;  // a gate waits for what it is of
      total[e] = gated<Format>(params, total[e - 2], total[e]);
    }
    reinterpret_cast<uint16_t*>(params.y)[place - (Form::kGate ? next_half : 0)] = Format::nearest(total[e]);
  }
}

template <class Launch>
void run_linear(const LinearParams& params, const Launch& launch) {
  if (params.rows == 0 || params.outputs == 0) return;
  const auto of = [&](auto* kernel, int tiles, auto form) {
    const int own = form.kGate ? kOutputs / 2 : kOutputs;
    const int64_t blocks = int64_t{tiles_of(params.rows, tiles * kRows)} * tiles_of(params.outputs, own);
    const int64_t shared = kLinearThreads * int64_t{sizeof(Four)} + (form.kNorm ? kLinearWarps * kRows * 4 : 0);
    launch(kernel, params, Grid{blocks, 1, 1, kLinearThreads, tiles * shared, false});
  };
  const bool few = params.rows <= kRows;
  const auto in = [&](auto format, auto form) {
    using Format = decltype(format);
    using Form = decltype(form);
    if (params.int8) {
      few ? of(linear_kernel<Format, 1, Form, Int8Weights>, 1, form)
          : of(linear_kernel<Format, 2, Form, Int8Weights>, 2, form);
    } else {
      few ? of(linear_kernel<Format, 1, Form, FloatWeights>, 1, form)
          : of(linear_kernel<Format, 2, Form, FloatWeights>, 2, form);
    }
  };
  const auto as = [&](auto form) { params.dtype == Dtype::kBFloat16 ? in(BFloat16(), form) : in(Float16(), form); };
  if (params.base != nullptr) {
    as(Added());
  } else if (params.norm == nullptr) {
    as(Alone());
  } else {
    params.gated ? as(Gated()) : as(Normed());
  }
}

}  // namespace specdec::cuda
