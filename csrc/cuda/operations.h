// The operations on an NVIDIA GPU: on the current device and the given stream. Throw std::runtime_error.
#pragma once

#include <functional>

#include "../core/params.h"

namespace specdec::cuda {

// Device memory of so many bytes, that stays until what is on the stream now has run.
using Allocate = std::function<char*(int64_t bytes)>;

void draft_step(const DraftStepParams& params, void* stream, const Allocate& allocate);
void speculative_step(const SpeculativeStepParams& params, void* stream, const Allocate& allocate);

}  // namespace specdec::cuda
