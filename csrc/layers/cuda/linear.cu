#include "../../common/launch.h"
#include "linear.h"

namespace specdec::cuda {

void linear(const LinearParams& params, void* stream) { run_linear(params, Launch(stream)); }

}  // namespace specdec::cuda
