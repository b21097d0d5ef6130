// State-space models: S <- exp(dt A) S + dt x B^T; y = S C + D x.
//
// The states of a group's heads are below each other. A warp has some neighbouring lines: kAcross lanes share a line,
// of which each has kVectors times 4 neighbours, and the other lanes have other lines.
#pragma once

#include "../core/softmax.h"
#include "recurrence.h"

namespace specdec::cuda {

template <int kAcross, int kVectors>  // numbers <= 4 kAcross kVectors
struct SsdTile {
  static constexpr int kLines = kAcross < 8 ? kAcross : 8;  // of a thread
  static constexpr int kTileLines = kLines * (kWarp / kAcross);
  static constexpr int kEach = 4 * kVectors;             // numbers of a line
  static constexpr int kLanesOfLine = kAcross / kLines;  // that get its sums

  const SsdStepParams& params;
  float S[kLines][kEach];
  float* state;  // of the group
  int group, lines, first;
  int own,
      head;    // the line whose sums the lane gets; whatever the thread's lines have one of each is read by that lane
  float a, d;  // of its head: A times log2 e, without `by_number`; D

  SPECDEC_DEVICE SsdTile(const SsdStepParams& p, int64_t row, int g, int part) : params(p), group(g) {
    const int lane = simt::thread() % kWarp;
    lines = static_cast<int>(p.heads / p.groups * p.size);
    state = p.state + ((p.feed.first_row + row) * p.groups + group) * lines * p.numbers;
    first = part * kTileLines + lane / kAcross * kLines;
    own = first + lane % kAcross / kLanesOfLine;
    head = (group * lines + own) / static_cast<int>(p.size);
    a = p.by_number || own >= lines ? 0.0f : p.a[head] * kLog2e;
    d = p.d == nullptr || own >= lines ? 0.0f : p.d[head];
  }

  // The first of the numbers in a thread's vector.
  SPECDEC_DEVICE int number(int vector) const { return (vector * kAcross + simt::thread() % kAcross) * 4; }
  SPECDEC_DEVICE float* place(int i, int vector) const { return state + (first + i) * params.numbers + number(vector); }
  SPECDEC_DEVICE int count(int i, int vector) const {
    return first + i < lines ? static_cast<int>(params.numbers) - number(vector) : 0;
  }

  SPECDEC_DEVICE void load(bool from_nothing) {
    const bool whole = aligned(params.state, params.numbers);
#pragma unroll
    for (int i = 0; i < kLines; ++i) {
#pragma unroll
      for (int vector = 0; vector < kVectors; ++vector) {
        float four[4];
        read4(place(i, vector), from_nothing ? 0 : count(i, vector), whole, four);
#pragma unroll
        for (int j = 0; j < 4; ++j) S[i][4 * vector + j] = four[j];
      }
    }
  }

  SPECDEC_DEVICE void store() const {
    const bool whole = aligned(params.state, params.numbers);
#pragma unroll
    for (int i = 0; i < kLines; ++i) {
#pragma unroll
      for (int vector = 0; vector < kVectors; ++vector) {
        const float* from = S[i] + 4 * vector;
        const float four[4] = {from[0], from[1], from[2], from[3]};
        write4(place(i, vector), count(i, vector), whole, four);
      }
    }
  }

  SPECDEC_DEVICE void clear(int64_t fed) const { write(fed, 0.0f); }

  // Takes the token at this place of the windows, or of what is fed, which is read.
  SPECDEC_DEVICE void take(int64_t at, bool of_window) {
    const SsdStepParams& p = params;
    const int64_t of_line = (at * p.groups + group) * lines + own, of_group = (at * p.groups + group) * p.numbers;
    const uint32_t bits_x = read_bits(of_window ? p.window_x : p.x, of_line, own < lines);
    const uint32_t bits_dt = read_bits(of_window ? p.window_dt : p.dt, at * p.heads + head, own < lines);
    uint32_t bits_b[kVectors][4], bits_c[kVectors][4];
#pragma unroll
    for (int vector = 0; vector < kVectors; ++vector) {
      const int count = static_cast<int>(p.numbers) - number(vector);
      read_bits(of_window ? p.window_b : p.b, of_group + number(vector), 1, count, bits_b[vector]);
      read_bits(p.c, of_group + number(vector), 1, of_window ? 0 : count, bits_c[vector]);
    }

    // From here on nothing is left to the compiler to contract: a token's result must not depend on what is around it.
    float b[kVectors][4], c[kVectors][4], sums[kLines] = {};
#pragma unroll
    for (int vector = 0; vector < kVectors; ++vector) {
      widen(p.b.dtype, bits_b[vector], b[vector]);
      widen(p.c.dtype, bits_c[vector], c[vector]);
    }
    const float x = widen(p.x.dtype, bits_x), dt = widen(p.dt.dtype, bits_dt), added = dt * x;
    const float decay = p.by_number ? dt : simt::exp2_of(dt * a);
#pragma unroll
    for (int i = 0; i < kLines; ++i) {
      const int lane = simt::thread() % kWarp / kAcross * kAcross + i * kLanesOfLine;
      const float of_own = simt::shuffle(decay, lane), u = simt::shuffle(added, lane);
      float kept[kVectors][4];
      if (p.by_number) {  // A is read for each token, since it would take as many registers as the state
        const float* of_head = p.a + simt::shuffle(head, lane) * p.numbers;
#pragma unroll
        for (int vector = 0; vector < kVectors; ++vector) {
          read4(of_head + number(vector), count(i, vector), aligned(p.a, p.numbers), kept[vector]);
#pragma unroll
          for (int j = 0; j < 4; ++j) kept[vector][j] = simt::exp2_of(of_own * (kept[vector][j] * kLog2e));
        }
      }
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        S[i][j] = fmaf(S[i][j], p.by_number ? kept[j / 4][j % 4] : of_own, u * b[j / 4][j % 4]);
        sums[i] = fmaf(S[i][j], c[j / 4][j % 4], sums[i]);
      }
    }
    sum_over_lanes<kLines, kAcross / 2, 1>(sums);
    if (!of_window) write(at, p.d != nullptr ? fmaf(x, d, sums[0]) : sums[0]);
  }

 private:
  SPECDEC_DEVICE void write(int64_t fed, float out) const {
    if (simt::thread() % kLanesOfLine == 0 && own < lines) {
      params.out[(fed * params.groups + group) * lines + own] = out;
    }
  }
};

template <int kAcross, int kVectors>
SPECDEC_HD int parts_of(const SsdStepParams& p) {
  constexpr int kTileLines = SsdTile<kAcross, kVectors>::kTileLines;
  return static_cast<int>((p.heads / p.groups * p.size + kTileLines - 1) / kTileLines);
}

template <int kAcross, int kVectors>
SPECDEC_KERNEL(ssd_step_kernel, (kVectors == 1 ? kBoundOfSmallTiles : kBoundOfLargeTiles), SsdStepParams) {
  scan<SsdTile<kAcross, kVectors>>(params, static_cast<int>(params.groups), parts_of<kAcross, kVectors>(params));
}

template <int kAcross, int kVectors>
auto scan_with(const SsdStepParams& p) {
  return Scan{&ssd_step_kernel<kAcross, kVectors>, p.groups, parts_of<kAcross, kVectors>(p)};
}

inline auto scan_of(const SsdStepParams& p) {
  return p.numbers <= 16    ? scan_with<4, 1>(p)
         : p.numbers <= 64  ? scan_with<16, 1>(p)
         : p.numbers <= 128 ? scan_with<32, 1>(p)
                            : scan_with<32, 2>(p);
}

inline StoreParams stored_by(const SsdStepParams& p) {
  const auto input = StoreParams::input;
  return {{input(p.x, p.window_x, p.heads * p.size), input(p.dt, p.window_dt, p.heads),
           input(p.b, p.window_b, p.groups * p.numbers)},
          3,
          p.base,
          p.feed,
          p.keep};
}

}  // namespace specdec::cuda
