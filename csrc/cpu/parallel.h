// Work split over torch's threads without knowing torch: module.cpp implements it.
#pragma once

#include <cstdint>

namespace specdec::cpu {

void parallel_for_erased(int64_t tasks, int64_t grain, void (*run)(const void* function, int64_t begin, int64_t end),
                         const void* function);

// Calls function(begin, end) on disjoint ranges that cover [0, tasks), each of `grain` tasks or more.
template <class Function>
void parallel_for(int64_t tasks, int64_t grain, const Function& function) {
  parallel_for_erased(
      tasks, grain, [](const void* f, int64_t begin, int64_t end) { (*static_cast<const Function*>(f))(begin, end); },
      &function);
}

// About 64 blocks of 1024 logits, some 20 µs of work, are worth a thread.
constexpr int64_t kGrainBlocks = 64;

}  // namespace specdec::cpu
