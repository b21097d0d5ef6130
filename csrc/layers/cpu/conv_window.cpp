// A short causal convolution over each channel, whose earlier inputs are in a ring by position.
#include "../../common/parallel.h"
#include "../../core/softmax.h"
#include "recurrence.h"
#include "recurrent.h"

namespace specdec::cpu {
namespace {

constexpr int64_t kChannels = 64;  // of a task

// The memory of a thread.
struct Scratch {
  std::vector<float> weight;         // [taps, kChannels]
  std::vector<const float*> inputs;  // [tokens + 1, taps] of each token, after those before start; null: there is none
};

// Some channels of one row.
SPECDEC_BODY void channels_of(const ConvWindowParams& p, int64_t row, int64_t first, const Steps& steps,
                              Scratch* scratch) {
  const int64_t count = std::min(kChannels, p.channels - first), start = p.feed.start[row];
  scratch->weight.resize(kChannels * p.taps);
  scratch->inputs.resize((steps.all.size() + 1) * p.taps);
  float* weight = scratch->weight.data();
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t tap = 0; tap < p.taps; ++tap) weight[tap * kChannels + i] = p.weight[(first + i) * p.taps + tap];
  }
  const float** inputs = scratch->inputs.data();
  const float* window = p.window + (p.feed.first_row + row) * p.feed.places * p.channels + first;
  for (int64_t tap = 0; tap < p.taps; ++tap) {
    const int64_t position = start - p.taps + tap;
    inputs[tap] = position < 0 ? nullptr : window + position % p.feed.places * p.channels;
  }
  for (size_t t = 0; t < steps.all.size(); ++t) {
    const Step& step = steps.all[t];
    const float **above = inputs + (step.parent + 1) * p.taps, **own = inputs + (t + 1) * p.taps;
    std::copy(above + 1, above + p.taps, own);
    own[p.taps - 1] = p.x + step.at * p.channels + first;
    float y[kChannels] = {};
    for (int64_t tap = 0; tap < p.taps; ++tap) {
      if (own[tap] == nullptr) continue;
      for (int64_t i = 0; i < count; ++i) y[i] += own[tap][i] * weight[tap * kChannels + i];
    }
    if (p.bias) {
      for (int64_t i = 0; i < count; ++i) y[i] += p.bias[first + i];
    }
    if (p.silu) {
      for (int i = 0; i < kChannels; ++i) y[i] /= 1.0f + exp2_fast(std::min(-y[i] * kLog2e, 127.0f));
    }
    std::copy(y, y + count, p.y + step.at * p.channels + first);
  }
}

// Tasks are parts of the channels, row by row.
template <int>
SPECDEC_BODY void conv_channels(const ConvWindowParams& p, int64_t begin, int64_t end) {
  Scratch scratch;
  const auto body = [&](int64_t row, int64_t part, const Steps& steps)
                        __attribute__((always_inline)) { channels_of(p, row, part * kChannels, steps, &scratch); };
  each_part(p.feed, nullptr, false, (p.channels + kChannels - 1) / kChannels, begin, end, body);
}

SPECDEC_BY_INSTRUCTION_SET(conv_channels, ConvWindowParams)

}  // namespace

void conv_window(const ConvWindowParams& params) {
  const auto run = conv_channels_in_use();
  const int64_t parts = (params.channels + kChannels - 1) / kChannels;
  const int64_t work = kChannels * params.taps * params.feed.columns;
  clear_others(params.feed, params.y, params.channels);
  parallel_for(params.feed.rows * parts, kGrainNumbers / std::max<int64_t>(work, 1) + 1,
               [&](int64_t begin, int64_t end) { run(params, begin, end); });
  store(params.feed, params.x, params.window, params.channels);  // where inputs were that all channels' tasks have read
}

}  // namespace specdec::cpu
