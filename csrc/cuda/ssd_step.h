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
  static constexpr int kEach = 4 * kVectors;  // of a line

  struct Inputs {
    uint32_t x[kLines], dt[kLines], b[kEach], c[kEach];
  };

  const SsdStepParams& params;
  float S[kLines][kEach];
  float a[kLines];  // of the lines' heads, times log2 e, without `by_number`
  float* state;     // of the group
  int group, first, own, lines, in_head;
  float d;  // of the line whose sums the lane gets, `own`

  SPECDEC_DEVICE SsdTile(const SsdStepParams& p, int64_t row, int g, int part) : params(p), group(g) {
    const int lane = simt::thread() % kWarp;
    in_head = static_cast<int>(p.size), lines = static_cast<int>(p.heads / p.groups) * in_head;
    state = p.state + ((p.feed.first_row + row) * p.groups + group) * lines * p.numbers;
    first = part * kTileLines + lane / kAcross * kLines;
    own = first + lane % kAcross / (kAcross / kLines);
#pragma unroll
    for (int i = 0; i < kLines; ++i) a[i] = p.by_number || first + i >= lines ? 0.0f : p.a[head(first + i)] * kLog2e;
    d = p.d == nullptr || own >= lines ? 0.0f : p.d[head(own)];
  }

  SPECDEC_DEVICE int head(int line) const { return (group * lines + line) / in_head; }
  // The first of the numbers in a thread's vector.
  SPECDEC_DEVICE int number(int vector) const { return (vector * kAcross + simt::thread() % kAcross) * 4; }
  SPECDEC_DEVICE float* place(int i, int vector) const { return state + (first + i) * params.numbers + number(vector); }
  SPECDEC_DEVICE int64_t count(int i, int vector) const {
    return first + i < lines ? params.numbers - number(vector) : 0;
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

  SPECDEC_DEVICE void read_ahead(int64_t at, bool of_window, Inputs* inputs) const {
    const SsdStepParams& p = params;
    const int64_t of_lines = (at * p.groups + group) * lines, of_group = (at * p.groups + group) * p.numbers;
    const auto of_line = [&](int i) { return first + i < lines ? of_lines + first + i : -1; };
    const auto of_head = [&](int i) { return first + i < lines ? at * p.heads + head(first + i) : -1; };
    const auto of_number = [&](int i) {
      const int n = number(i / 4) + i % 4;
      return n < p.numbers ? of_group + n : -1;
    };
    read_bits(of_window ? p.window_x : p.x, of_line, inputs->x);
    read_bits(of_window ? p.window_dt : p.dt, of_head, inputs->dt);
    read_bits(of_window ? p.window_b : p.b, of_number, inputs->b);
    read_bits(p.c, [&](int i) { return of_window ? -1 : of_number(i); }, inputs->c);
  }

  // Nothing is left to the compiler to contract, so a token's result does not depend on where this is inlined.
  SPECDEC_DEVICE void take(const Inputs& inputs, int64_t fed) {
    const SsdStepParams& p = params;
    float x[kLines], dt[kLines], b[kEach], c[kEach], sums[kLines] = {};
    widen(p.x.dtype, inputs.x, x);
    widen(p.dt.dtype, inputs.dt, dt);
    widen(p.b.dtype, inputs.b, b);
    widen(p.c.dtype, inputs.c, c);
#pragma unroll
    for (int i = 0; i < kLines; ++i) {
      const float added = dt[i] * x[i], decay = simt::exp2_of(dt[i] * a[i]);
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        const float kept = p.by_number ? decay_of(i, j, dt[i]) : decay;
        S[i][j] = fmaf(S[i][j], kept, added * b[j]);
        sums[i] = fmaf(S[i][j], c[j], sums[i]);
      }
    }
    sum_over_lanes<kLines, kAcross / 2, 1>(sums);
    if (fed < 0) return;
    const int64_t at = (fed * p.groups + group) * lines + own;
    write(fed, p.d == nullptr ? sums[0] : fmaf(number_at(p.x, own < lines ? at : -1), d, sums[0]));
  }

 private:
  // The decay of one number of a line's state. A is read again for each token, since its numbers would take as many
  // registers as the state.
  SPECDEC_DEVICE float decay_of(int i, int j, float dt) const {
    const int n = number(j / 4) + j % 4;
    if (first + i >= lines || n >= params.numbers) return 0.0f;
    return simt::exp2_of(dt * (params.a[head(first + i) * params.numbers + n] * kLog2e));
  }

  SPECDEC_DEVICE void write(int64_t fed, float out) const {
    if (simt::thread() % (kAcross / kLines) == 0 && own < lines) {
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
SPECDEC_KERNEL(ssd_step_kernel, kScanThreads, SsdStepParams) {
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
