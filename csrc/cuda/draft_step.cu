#include "../common/launch.h"
#include "stages.h"

namespace specdec::cuda {

void draft_step(const DraftStepParams& params, void* stream, const Allocate& allocate) {
  run_draft_step(params, allocate, Launch(stream));
}

}  // namespace specdec::cuda
