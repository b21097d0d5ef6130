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
  kFused,  // measured and decided in one launch
  kSplit,  // in two launches, of which the second one has one block for each sequence, as on GPUs without clusters
};
inline std::atomic<Launches> launches = Launches::kPlanned;
inline std::atomic<int> blocks_asked = 0;  // of a sequence, if the plan shall not choose it

void draft_step(const DraftStepParams& params, void* stream, const Allocate& allocate);
void speculative_step(const SpeculativeStepParams& params, void* stream, const Allocate& allocate);
void draft_children(const DraftChildrenParams& params, void* stream, const Allocate& allocate);
void verify_tree(const VerifyTreeParams& params, void* stream, const Allocate& allocate);

}  // namespace specdec::cuda
