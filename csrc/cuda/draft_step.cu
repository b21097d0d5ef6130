#include "draft_step.h"
#include "launch.h"

namespace specdec::cuda {

void draft_step(const DraftStepParams& params, void* stream, const Allocate& allocate) {
  launch(draft_measure_kernel, draft_step_kernel, params, stream, allocate);
}

}  // namespace specdec::cuda
