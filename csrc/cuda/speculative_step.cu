#include "by_rows.h"
#include "launch.h"

namespace specdec::cuda {

void speculative_step(const SpeculativeStepParams& params, void* stream, const Allocate& allocate) {
  launch(speculative_measure_kernel, speculative_step_kernel, params, stream, allocate, speculative_rows_kernel);
}

}  // namespace specdec::cuda
