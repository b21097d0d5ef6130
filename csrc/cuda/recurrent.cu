#include "conv_window.h"
#include "delta_step.h"
#include "launch.h"
#include "ssd_step.h"

namespace specdec::cuda {
namespace {

void refuse_beyond(int64_t most, int64_t given, const char* what) {
  if (given <= most) return;
  throw std::runtime_error(std::string("specdec_kernels: ") + what + ": got " + std::to_string(given) +
                           ", allowed on a GPU: at most " + std::to_string(most));
}

template <class Params>
void launch_blocks(void (*kernel)(Params), const Params& params, int64_t blocks, int threads, int64_t shared,
                   void* stream) {
  cudaLaunchAttribute none;
  if (blocks > 0) launch_one(kernel, params, config_of(blocks, threads, shared, &none, 0), stream);
}

// The scan, and what follows it.
template <class Params>
void launch_scan(const Params& params, void* stream) {
  constexpr int kWarps = kScanThreads / kWarp;
  const Feed& feed = params.feed;
  if (feed.parents != nullptr) refuse_beyond(kMostNodes, feed.columns, "columns of a tree");
  const auto scan = scan_of(params);
  launch_blocks(scan.kernel, params, scan.blocks(feed, kWarps), kScanThreads, scan.shared(feed, kWarps), stream);
  launch_blocks(store_inputs_kernel, stored_by(params), feed.rows * feed.columns, kStoreThreads, 0, stream);
}

}  // namespace

void conv_window(const ConvWindowParams& params, void* stream) {
  const int64_t parts = (params.channels + kScanThreads - 1) / kScanThreads;
  launch_blocks(kernel_of(params), params, params.feed.rows * parts, kScanThreads, 0, stream);
}

void delta_step(const DeltaStepParams& params, void* stream) {
  refuse_beyond(kMostChannels, params.dk, "dk");
  launch_scan(params, stream);
}

void ssd_step(const SsdStepParams& params, void* stream) {
  refuse_beyond(kMostNumbers, params.numbers, "N");
  launch_scan(params, stream);
}

}  // namespace specdec::cuda
