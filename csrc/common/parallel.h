// Splits work over as many threads as torch has, or as were chosen. extension.cpp implements it, so that nothing here
// depends on torch.
#pragma once

#include <cstdint>

namespace specdec::cpu {

void parallel_for_erased(int64_t tasks, int64_t grain, void (*run)(const void* function, int64_t begin, int64_t end),
                         const void* function);

int64_t num_threads();

// Calls function(begin, end) on disjoint ranges that cover [0, tasks), each of at least `grain` tasks. A call
// within such a function has one range.
template <class Function>
void parallel_for(int64_t tasks, int64_t grain, const Function& function) {
  parallel_for_erased(
      tasks, grain, [](const void* f, int64_t begin, int64_t end) { (*static_cast<const Function*>(f))(begin, end); },
      &function);
}

}  // namespace specdec::cpu
