// A short causal convolution over each channel, whose earlier inputs are in a ring by position.
#include <vector>

#include "../core/softmax.h"
#include "parallel.h"
#include "recurrence.h"
#include "recurrent.h"

namespace specdec::cpu {
namespace {

constexpr int64_t kChannels = 64;  // of a task

// Some channels of one row: all its tokens are computed before any is stored, since they may lie where earlier ones were.
SPECDEC_BODY void channels_of(const ConvWindowParams& p, int64_t row, int64_t first, int64_t count, float* weight) {
  const Feed& feed = p.feed;
  const bool* valid = feed.valid + row * feed.columns;
  float* window = p.window + (feed.first_row + row) * feed.places * p.channels + first;
  const float* x = p.x + row * feed.columns * p.channels + first;
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t tap = 0; tap < p.taps; ++tap) weight[tap * kChannels + i] = p.weight[(first + i) * p.taps + tap];
  }
  const float* inputs[kMostTaps];  // of the tokens before, null where there was none, and of the token itself
  const int64_t start = feed.start[row];
  for (int64_t tap = 0; tap < p.taps; ++tap) {
    const int64_t position = start - p.taps + tap;
    inputs[tap] = position < 0 ? nullptr : window + position % feed.places * p.channels;
  }
  for (int64_t column = 0; column < feed.columns; ++column) {
    if (!valid[column]) continue;
    std::copy(inputs + 1, inputs + p.taps, inputs);
    inputs[p.taps - 1] = x + column * p.channels;
    float y[kChannels] = {};
    for (int64_t tap = 0; tap < p.taps; ++tap) {
      if (inputs[tap] == nullptr) continue;
      for (int64_t i = 0; i < count; ++i) y[i] += inputs[tap][i] * weight[tap * kChannels + i];
    }
    if (p.bias) {
      for (int64_t i = 0; i < count; ++i) y[i] += p.bias[first + i];
    }
    if (p.silu) {
      for (int i = 0; i < kChannels; ++i) y[i] /= 1.0f + exp2_fast(std::min(-y[i] * kLog2e, 127.0f));
    }
    std::copy(y, y + count, p.y + (row * feed.columns + column) * p.channels + first);
  }
  int64_t position = start, left = count_valid(feed, row);
  for (int64_t column = 0; column < feed.columns; ++column) {
    if (!valid[column]) continue;
    if (left-- <= feed.places) {
      std::copy_n(x + column * p.channels, count, window + position % feed.places * p.channels);
    }
    ++position;
  }
}

// Tasks are parts of the channels, row by row.
template <int>
SPECDEC_BODY void conv_channels(const ConvWindowParams& p, int64_t begin, int64_t end) {
  const int64_t parts = (p.channels + kChannels - 1) / kChannels;
  std::vector<float> weight(kChannels * p.taps);
  for (int64_t task = begin; task < end; ++task) {
    const int64_t row = task / parts, first = task % parts * kChannels;
    const int64_t count = std::min(kChannels, p.channels - first);
    clear_others(p.feed, row, p.y + first, p.channels, count);
    if (count_valid(p.feed, row) > 0) channels_of(p, row, first, count, weight.data());
  }
}

SPECDEC_BY_INSTRUCTION_SET(conv_channels, ConvWindowParams)

}  // namespace

void conv_window(const ConvWindowParams& params) {
  const auto run = conv_channels_in_use();
  const int64_t parts = (params.channels + kChannels - 1) / kChannels;
  const int64_t work = kChannels * params.taps * params.feed.columns;
  parallel_for(params.feed.rows * parts, kGrainNumbers / std::max<int64_t>(work, 1) + 1,
               [&](int64_t begin, int64_t end) { run(params, begin, end); });
}

}  // namespace specdec::cpu
