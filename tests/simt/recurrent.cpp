// Runs the kernels of recurrent layers on fibers; called through ctypes.
#include "../../csrc/cuda/conv_window.h"
#include "../../csrc/cuda/delta_step.h"
#include "../../csrc/cuda/ssd_step.h"

namespace {

using namespace specdec;

std::string fault;

int64_t state_of_row(const cuda::DeltaStepParams& p) { return p.heads * p.dk * p.dv; }
int64_t state_of_row(const cuda::SsdStepParams& p) { return p.heads * p.size * p.numbers; }

// The rows' states count as scratch, of which the machine finds races.
template <class Params>
const char* run(const Params& params, int threads, uint64_t seed) {
  const auto scan = cuda::scan_of(params);
  const Feed& feed = params.feed;
  const int warps = threads / simt::kWarp;
  const int64_t floats = state_of_row(params);
  fault = simt::run(
      scan.blocks(feed, warps), 1, threads, static_cast<int>(scan.shared(feed, warps)), seed,
      [&] { scan.kernel(params); }, reinterpret_cast<char*>(params.state + feed.first_row * floats),
      feed.rows * floats * static_cast<int64_t>(sizeof(float)));
  if (!fault.empty()) return fault.c_str();
  const cuda::StoreParams stored = cuda::stored_by(params);
  fault = simt::run(feed.rows * feed.columns, 1, threads, 0, seed, [&] { cuda::store_inputs_kernel(stored); });
  return fault.c_str();
}

}  // namespace

extern "C" const char* conv_window(const cuda::ConvWindowParams* params, int threads, uint64_t seed) {
  const int64_t parts = (params->channels + threads - 1) / threads;
  fault = simt::run(params->feed.rows * parts, 1, threads, 0, seed, [&] { cuda::kernel_of (*params)(*params); });
  return fault.c_str();
}

extern "C" const char* delta_step(const cuda::DeltaStepParams* params, int threads, uint64_t seed) {
  return run(*params, threads, seed);
}

extern "C" const char* ssd_step(const cuda::SsdStepParams* params, int threads, uint64_t seed) {
  return run(*params, threads, seed);
}
