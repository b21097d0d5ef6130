// The operations on the current NVIDIA GPU and the given stream. They throw std::runtime_error.
#pragma once

#include <atomic>
#include <functional>

#include "../core/params.h"

namespace specdec::cuda {

// Allocates device memory that stays valid for the work that is submitted to the stream by this call.
using Allocate = std::function<char*(int64_t bytes)>;

// How sequences are launched. The plan's way is the default, the others are for measuring and for tests.
enum class Launches : int {
  kPlanned,
  kSplit,      // measured and decided in two launches on any GPU
  kDependent,  // the same, of which the second one begins while the first one measures
};
inline std::atomic<Launches> launches = Launches::kPlanned;

void draft_step(const DraftStepParams& params, void* stream, const Allocate& allocate);
void speculative_step(const SpeculativeStepParams& params, void* stream, const Allocate& allocate);
void draft_children(const DraftChildrenParams& params, void* stream, const Allocate& allocate);
void verify_tree(const VerifyTreeParams& params, void* stream, const Allocate& allocate);

}  // namespace specdec::cuda
