// Runs the operations' launches on fibers; called through ctypes.
#include <vector>

#include "../../csrc/cuda/stages.h"
#include "../../csrc/layers/cuda/linear.h"

namespace {

using namespace specdec;

std::string fault;

// The same stages as on a GPU, by blocks of `threads` threads at most.
template <class Params, class Run>
const char* on_fibers(const Params& params, int threads, uint64_t seed, const Run& run) {
  fault.clear();
  std::vector<char> memory;
  const auto allocate = [&](int64_t bytes) {
    memory.resize(bytes + 16);
    char* begin = memory.data() + (16 - reinterpret_cast<uintptr_t>(memory.data()) % 16) % 16;
    simt::use_scratch(begin, bytes);
    return begin;
  };
  run(params, allocate, [&](auto* kernel, const auto& its, const cuda::Grid& grid) {
    if (!fault.empty()) return;
    const int fewer = grid.threads < threads ? grid.threads : threads;
    cuda::Grid mine = grid;
    if (!grid.after_ours) {  // measuring, where each warp of a row has a block of logits
      mine.x = (grid.x * grid.threads + fewer - 1) / fewer;
    }
    fault = simt::run({mine.x, mine.y, mine.z}, fewer, mine.shared, seed, [&] { kernel(its); });
  });
  return fault.c_str();
}

}  // namespace

extern "C" const char* draft_step(const DraftStepParams* params, int threads, uint64_t seed) {
  return on_fibers(*params, threads, seed, [](const auto&... all) { cuda::run_draft_step(all...); });
}

extern "C" const char* speculative_step(const SpeculativeStepParams* params, int threads, uint64_t seed) {
  return on_fibers(*params, threads, seed, [](const auto&... all) { cuda::run_speculative_step(all...); });
}

// Blocks have as many threads as on a GPU, which determine the order of additions.
extern "C" const char* linear(const cuda::LinearParams* params, uint64_t seed) {
  fault.clear();
  cuda::run_linear(*params, [&](auto* kernel, const auto& its, const cuda::Grid& grid) {
    fault = simt::run({grid.x, grid.y, grid.z}, grid.threads, grid.shared, seed, [&] { kernel(its); });
  });
  return fault.c_str();
}

// What was done since the last call.
extern "C" void take_counts(simt::Counts* out) { *out = simt::take_counts(); }
