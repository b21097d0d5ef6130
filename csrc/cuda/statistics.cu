#include "launch.h"
#include "statistics_kernel.h"

namespace specdec::cuda {

void launch_statistics(const StatisticsParams& params, void* stream) {
  cudaLaunchAttribute none;
  launch_one(statistics_kernel, params, config_of(params.launched(), kStatisticsThreads, 0, &none, 0), stream);
}

}  // namespace specdec::cuda
