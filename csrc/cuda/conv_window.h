// A short causal convolution over each channel, whose earlier inputs are in a ring by position.
//
// A thread has one channel of one row, with the last inputs in registers. It stores an input after it has computed with
// it, and nothing that is still needed lies there: a ring has at least as many places as a token has inputs.
#pragma once

#include "../core/softmax.h"
#include "recurrence.h"

namespace specdec::cuda {

template <int kTaps>  // at least as many as there are
SPECDEC_KERNEL(conv_window_kernel, kScanThreads, ConvWindowParams) {
  const ConvWindowParams& p = params;
  const Feed& feed = p.feed;
  const int parts = static_cast<int>((p.channels + simt::num_threads() - 1) / simt::num_threads());
  const int taps = static_cast<int>(p.taps), columns = static_cast<int>(feed.columns);
  const int64_t row = simt::cluster() / parts, channel = simt::cluster() % parts * simt::num_threads() + simt::thread();
  if (channel >= p.channels) return;
  const bool* valid = feed.valid + row * columns;
  const int64_t start = feed.start[row], ring = (feed.first_row + row) * feed.places, fed = row * columns;
  // The input of the token in a column; those below 0 are of the positions before `start`.
  const auto input = [&](int64_t column) {
    if (column >= 0) return number_at(p.x, (fed + column) * p.channels + channel);
    const int64_t position = start + column;
    return position < 0 ? 0.0f : number_at(p.window, (ring + position % feed.places) * p.channels + channel);
  };
  float weights[kTaps], inputs[kTaps];  // the last one's are the token's own
#pragma unroll
  for (int i = 0; i < kTaps; ++i) {
    const int back = kTaps - 1 - i;
    weights[i] = back < taps ? number_at(p.weight, channel * taps + taps - 1 - back) : 0.0f;
    inputs[i] = back > 0 && back < taps ? input(-back) : 0.0f;
  }
  const float bias = p.bias.data != nullptr ? number_at(p.bias, channel) : 0.0f;
  const int places = static_cast<int>(feed.places);
  int place = static_cast<int>(start % places);
  uint32_t next = columns > 0 ? read_bits(p.x, fed * p.channels + channel) : 0;
  for (int column = 0; column < columns; ++column) {
    const int64_t at = (fed + column) * p.channels + channel;
    const uint32_t own = next;
    if (column + 1 < columns) next = read_bits(p.x, at + p.channels);
    const int64_t here = (ring + place) * p.channels + channel;
    if (feed.parents != nullptr || valid[column]) place = place + 1 == places ? 0 : place + 1;
    if (!valid[column]) {
      write_bits(p.y, at, 0);
      continue;
    }
    if (feed.parents != nullptr) {
      int64_t before = column;
#pragma unroll
      for (int i = kTaps - 2; i >= 0; --i) {
        before = before >= 0 ? parent_of(feed, row, static_cast<int>(before)) : before - 1;
        if (kTaps - 1 - i < taps) inputs[i] = input(before);
      }
    }
    inputs[kTaps - 1] = widen(p.x.dtype, own);
    float y = 0.0f;
#pragma unroll
    for (int i = 0; i < kTaps; ++i) y = fmaf(inputs[i], weights[i], y);
    y += bias;
    if (p.silu) y /= 1.0f + simt::exp2_of(-y * kLog2e);
    write_bits(p.y, at, narrow(p.x.dtype, y));
    write_bits(p.window, here, own);
#pragma unroll
    for (int i = 0; i + 1 < kTaps; ++i) inputs[i] = inputs[i + 1];
  }
}

inline auto kernel_of(const ConvWindowParams& p) {
  return p.taps <= 4 ? &conv_window_kernel<4> : &conv_window_kernel<kMostTaps>;
}

}  // namespace specdec::cuda
