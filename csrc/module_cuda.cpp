// The CUDA kernels of sampling and verification as torch's operations. They are a separate module, which is loaded only
// if torch has CUDA.
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#define SPECDEC_PACKAGE "specdec_kernels"

#include "arguments.h"
#include "common/extension_cuda.h"
#include "cuda/operations.h"

namespace specdec::cuda {
namespace {

// Calls operation(params, stream, allocate) on the tensor's device with its current stream.
template <class Params>
void run_on(const Tensor& tensor, const Params& params, void (*operation)(const Params&, void*, const Allocate&)) {
  const OnDevice on(tensor);
  std::optional<Tensor> scratch;  // torch's allocator reuses its memory in the order of the stream
  operation(params, on.stream, [&](int64_t bytes) {
    scratch = empty_on(tensor, {bytes}, ScalarType::Byte);
    return static_cast<char*>(scratch->mutable_data_ptr());
  });
}

void run_draft_step(const DraftStepParams& params, const Tensor& logits) { run_on(logits, params, draft_step); }
void run_speculative_step(const SpeculativeStepParams& params, const Tensor& logits) {
  run_on(logits, params, speculative_step);
}

STABLE_TORCH_LIBRARY_IMPL(specdec_kernels, CUDA, m) {
  m.impl("draft_step", TORCH_BOX(&specdec::draft_step<run_draft_step>));
  m.impl("speculative_step", TORCH_BOX(&specdec::speculative_step<run_speculative_step>));
}

}  // namespace
}  // namespace specdec::cuda
