// The operations on the current NVIDIA GPU and the given stream. They throw std::runtime_error.
#pragma once

#include <functional>

#include "../core/params.h"

namespace specdec::cuda {

// Allocates device memory that stays valid for the work that is submitted to the stream by this call.
using Allocate = std::function<char*(int64_t bytes)>;

void draft_step(const DraftStepParams& params, void* stream, const Allocate& allocate);
void speculative_step(const SpeculativeStepParams& params, void* stream, const Allocate& allocate);

}  // namespace specdec::cuda
