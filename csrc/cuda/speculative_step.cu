#include "launch.h"
#include "speculative_step.h"

namespace specdec::cuda {

void speculative_step(const SpeculativeStepParams& params, void* stream, const Allocate& allocate) {
  launch(speculative_measure_kernel, speculative_step_kernel, params, stream, allocate);
}

}  // namespace specdec::cuda
