#include "launch.h"
#include "verify_tree.h"

namespace specdec::cuda {

void verify_tree(const VerifyTreeParams& params, void* stream, const Allocate& allocate) {
  launch<VerifyTreeParams, TreeMemory>(nullptr, verify_tree_kernel, params, stream, allocate);
}

}  // namespace specdec::cuda
