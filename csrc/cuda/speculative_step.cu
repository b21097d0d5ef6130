#include "../common/launch.h"
#include "stages.h"

namespace specdec::cuda {

void speculative_step(const SpeculativeStepParams& params, void* stream, const Allocate& allocate) {
  run_speculative_step(params, allocate, Launch(stream));
}

}  // namespace specdec::cuda
