#include "draft_children.h"
#include "launch.h"

namespace specdec::cuda {

void draft_children(const DraftChildrenParams& params, void* stream, const Allocate& allocate) {
  launch(children_measure_kernel, draft_children_kernel, params, stream, allocate);
}

}  // namespace specdec::cuda
