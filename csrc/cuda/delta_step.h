// The gated delta rule: S <- exp(g) S; S <- S + k (beta (v - k^T S))^T; o = S^T q / sqrt(dk).
//
// A warp has 8 neighbouring columns of a head's state: a thread 4 of them, in every 16th line. A token takes one pass
// over the decayed state, which gives its products with both k and q, since S^T q = (decayed S)^T q + (k^T q) u; and
// one that adds k u^T. Neither k nor q is divided by its length: the sums are.
#pragma once

#include "../core/softmax.h"
#include "recurrence.h"

namespace specdec::cuda {

constexpr int kDeltaColumns = 8;  // of a tile

template <int kLines>  // of a thread; dk <= 16 kLines
struct DeltaTile {
  const DeltaStepParams& params;
  float S[kLines][4];
  float* place;  // of the thread's first number
  float scale;   // of what is read
  int head, key_head;
  int line, lines;  // the thread's first line, and how many it has, 16 apart
  int columns;      // that it has and that exist, neighbours
  int column;       // whose sums the lane gets

  SPECDEC_DEVICE DeltaTile(const DeltaStepParams& p, int64_t row, int group, int part) : params(p), head(group) {
    const int lane = simt::thread() % kWarp, dk = static_cast<int>(p.dk), first = part * kDeltaColumns + lane % 2 * 4;
    key_head = head / static_cast<int>(p.heads / p.key_heads);
    scale = 1.0f / sqrtf(static_cast<float>(p.dk));
    line = lane / 2;
    lines = (dk - line + 15) / 16;
    columns = static_cast<int>(p.dv) - first;
    column = first + lane / 4 % 4;
    place = p.state + (((p.feed.first_row + row) * p.heads + head) * p.dk + line) * p.dv + first;
  }

  SPECDEC_DEVICE void load(bool from_nothing) {
    const bool whole = aligned(params.state, params.dv);
    const int64_t step = 16 * params.dv;
#pragma unroll
    for (int i = 0; i < kLines; ++i) read4(place + i * step, i < lines && !from_nothing ? columns : 0, whole, S[i]);
  }

  SPECDEC_DEVICE void store() const {
    const bool whole = aligned(params.state, params.dv);
    const int64_t step = 16 * params.dv;
#pragma unroll
    for (int i = 0; i < kLines; ++i) write4(place + i * step, i < lines ? columns : 0, whole, S[i]);
  }

  SPECDEC_DEVICE void clear(int64_t fed) const { write(fed, 0.0f); }

  // Takes the token at this place of the windows, or of what is fed, which is read.
  SPECDEC_DEVICE void take(int64_t at, bool of_window) {
    const DeltaStepParams& p = params;
    const int lane = simt::thread() % kWarp;
    const int64_t of_head = at * p.heads + head, of_key = (at * p.key_heads + key_head) * p.dk + line;
    const Numbers of_g = of_window ? p.window_g : p.g;
    uint32_t bits_k[kLines], bits_q[kLines], bits_g[kLines];
    read_bits(of_window ? p.window_k : p.k, of_key, 16, lines, bits_k);
    read_bits(p.q, of_key, 16, of_window ? 0 : lines, bits_q);
    if (p.by_channel) {
      read_bits(of_g, of_head * p.dk + line, 16, lines, bits_g);
    } else {
      bits_g[0] = read_bits(of_g, of_head);
    }
    const uint32_t bits_v = read_bits(of_window ? p.window_v : p.v, of_head * p.dv + column, column < p.dv);
    const uint32_t bits_beta = read_bits(of_window ? p.window_beta : p.beta, of_head);

    // From here on nothing is left to the compiler to contract: a token's result must not depend on what is around it.
    float k[kLines], q[kLines], decay[kLines];
    widen(p.k.dtype, bits_k, k);
    widen(p.q.dtype, bits_q, q);
    if (p.by_channel) {
      widen(p.g.dtype, bits_g, decay);
#pragma unroll
      for (int i = 0; i < kLines; ++i) decay[i] = simt::exp2_of(decay[i] * kLog2e);
    } else {
      const float all = simt::exp2_of(widen(p.g.dtype, bits_g[0]) * kLog2e);
#pragma unroll
      for (int i = 0; i < kLines; ++i) decay[i] = all;
    }
    float dots[4] = {};  // k k, q q and k q, which lanes 0, 8 and 16 get
    float sums[8] = {};  // of k and S in the thread's columns, then of q and S
#pragma unroll
    for (int i = 0; i < kLines; ++i) {
      dots[0] = fmaf(k[i], k[i], dots[0]), dots[1] = fmaf(q[i], q[i], dots[1]), dots[2] = fmaf(k[i], q[i], dots[2]);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        S[i][j] *= decay[i];
        sums[j] = fmaf(S[i][j], k[i], sums[j]);
        sums[4 + j] = fmaf(S[i][j], q[i], sums[4 + j]);
      }
    }
    sum_over_lanes<4, 16, 2>(dots);
    const float over_length = p.normalize ? simt::inverse_sqrt(dots[0] + 1e-6f) : 1.0f, kq = simt::shuffle(dots[0], 16);
    const float scale_k = simt::shuffle(over_length, 0), scale_q = simt::shuffle(over_length, 8);
    sum_over_lanes<8, 16, 2>(sums);  // lanes 0 to 15 get those of k
    const float v = widen(p.v.dtype, bits_v), beta = widen(p.beta.dtype, bits_beta);
    const float added = scale_k * (beta * fmaf(-scale_k, sums[0], v));
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float u = simt::shuffle(added, lane % 2 + 4 * j);
#pragma unroll
      for (int i = 0; i < kLines; ++i) S[i][j] = fmaf(k[i], u, S[i][j]);
    }
    const float own = simt::shuffle(added, lane % 16);
    if (!of_window) write(at, fmaf(kq, own, sums[0]) * (scale_q * scale));
  }

 private:
  // What is read in the lane's column. Lanes 16 to 31 have the sums of q, two lanes the same.
  SPECDEC_DEVICE void write(int64_t fed, float out) const {
    const int lane = simt::thread() % kWarp;
    if (lane >= 16 && lane / 2 % 2 == 0 && column < params.dv) {
      params.out[(fed * params.heads + head) * params.dv + column] = out;
    }
  }
};

SPECDEC_HD int parts_of(const DeltaStepParams& p) {
  return static_cast<int>((p.dv + kDeltaColumns - 1) / kDeltaColumns);
}

template <int kLines>
SPECDEC_KERNEL(delta_step_kernel, (kLines <= 8 ? kBoundOfSmallTiles : kBoundOfLargeTiles), DeltaStepParams) {
  scan<DeltaTile<kLines>>(params, static_cast<int>(params.heads), parts_of(params));
}

inline auto scan_of(const DeltaStepParams& p) {
  return Scan{p.dk <= 128 ? &delta_step_kernel<8> : &delta_step_kernel<16>, p.heads, parts_of(p)};
}

inline StoreParams stored_by(const DeltaStepParams& p) {
  const auto input = StoreParams::input;
  return {{input(p.k, p.window_k, p.key_heads * p.dk), input(p.v, p.window_v, p.heads * p.dv),
           input(p.g, p.window_g, p.heads * (p.by_channel ? p.dk : 1)), input(p.beta, p.window_beta, p.heads)},
          4,
          p.base,
          p.feed,
          p.keep};
}

}  // namespace specdec::cuda
