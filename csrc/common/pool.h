// Threads for work of some 10 µs and more, on machines where other processes run, too.
#pragma once

#include <cstdint>

namespace specdec::cpu {

// Calls run(function, begin, end) on disjoint ranges that cover [0, tasks), each of at least `grain` tasks, by up to
// `threads` threads, the caller among them. What run throws is thrown. A call within a part of a job, or beside
// another thread's job, has one range.
void run_in_pool(int64_t tasks, int64_t grain, int64_t threads, void (*run)(const void*, int64_t, int64_t),
                 const void* function);

}  // namespace specdec::cpu
