// Runs jobs in the pool of csrc/common/pool.cpp, from several threads at once, and checks that every task is done once.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <stdexcept>
#include <thread>
#include <vector>

#include "../../csrc/common/pool.h"

namespace {

template <class Function>
void parallel(int64_t tasks, int64_t grain, int64_t threads, const Function& function) {
  specdec::cpu::run_in_pool(
      tasks, grain, threads,
      [](const void* f, int64_t begin, int64_t end) { (*static_cast<const Function*>(f))(begin, end); }, &function);
}

std::atomic<int> wrong = 0;

void expect(bool right, const char* what) {
  if (right) return;
  std::printf("%s\n", what);
  ++wrong;
}

void jobs(int seed) {
  for (int job = 0; job < 200; ++job) {
    const int64_t tasks = (job * 37 + seed) % 300, grain = job % 7, threads = 1 + job % 5;
    std::vector<int> done(tasks, 0);
    std::atomic<int> short_ranges = 0;
    parallel(tasks, grain, threads, [&](int64_t begin, int64_t end) {
      if (end - begin < grain && end != tasks) ++short_ranges;
      for (int64_t i = begin; i < end; ++i) ++done[i];
      std::atomic<int64_t> within = 0;
      parallel(3, 1, threads, [&](int64_t first, int64_t last) { within += last - first; });
      expect(within == 3, "a job within a job was not done once");
    });
    for (int count : done) expect(count == 1, "a task was not done once");
    expect(short_ranges == 0, "a range is shorter than the grain");
    if (job % 50 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));  // the threads fall asleep
    if (job % 10) continue;
    std::atomic<int> slow = 0;  // whose last parts are still at work when none is left to take
    parallel(4, 1, 4, [&](int64_t begin, int64_t end) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1 + begin % 2));
      slow += static_cast<int>(end - begin);
    });
    expect(slow == 4, "a job ended before its parts");
    try {
      parallel(100, 1, 3, [&](int64_t, int64_t end) {
        if (end == 100) throw std::runtime_error("told");
      });
      expect(false, "nothing was thrown");
    } catch (const std::runtime_error&) {
    }
  }
}

}  // namespace

int main() {
  std::thread other([] { jobs(1); }), another([] { jobs(2); });
  jobs(3);
  other.join();
  another.join();
  return wrong > 0;
}
