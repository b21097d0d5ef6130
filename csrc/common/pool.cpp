// A job is cut into parts, several for each thread, and every thread takes the next one when it is done with its own. A
// caller waits only for parts that were taken: threads that other processes keep from running take none, and delay
// nothing. (OpenMP waits for all threads, spinning, and so keeps those that it waits for from running.)
#include "pool.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <thread>
#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif

namespace specdec::cpu {
namespace {

constexpr int64_t kParts = 8;               // of a job for each thread
constexpr int kShort = 2000, kLong = 8000;  // looks, some 20 and 100 µs: at what is about to end, and for the next job

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

thread_local bool is_inside = false;

class Pool {
 public:
  void run(int64_t tasks, int64_t grain, int64_t threads, void (*run)(const void*, int64_t, int64_t),
           const void* function) {
    while (workers_ < threads - 1) std::thread([this, index = workers_++] { work(index); }).detach();
    const int64_t size = std::max(grain, (tasks + threads * kParts - 1) / (threads * kParts));
    const auto parts = static_cast<uint32_t>((tasks + size - 1) / size);
    job_ = {tasks, size, run, function};
    error_ = nullptr;
    helpers_.store(static_cast<int>(threads) - 1, std::memory_order_relaxed);
    left_.store(parts, std::memory_order_relaxed);
    untaken_.store(parts);  // from here on the job can be taken
    if (sleeping_.load() > 0) {
      jobs_.fetch_add(1);
      jobs_.notify_all();
    }
    while (take()) {
    }
    for (int i = 0; i < kShort && left_.load(std::memory_order_acquire) > 0; ++i) pause();
    while (const uint32_t left = left_.load(std::memory_order_acquire)) left_.wait(left);
    if (error_) std::rethrow_exception(error_);
  }

  std::mutex mutex;  // of the thread whose job it is

 private:
  struct Job {
    int64_t tasks, size;
    void (*run)(const void*, int64_t, int64_t);
    const void* function;
  };

  // Computes one part of the job; false: none is left. A job with a part that was taken does not end before it is done.
  bool take() {
    uint32_t untaken = untaken_.load(std::memory_order_acquire);
    do {
      if (untaken == 0) return false;
    } while (!untaken_.compare_exchange_weak(untaken, untaken - 1, std::memory_order_acq_rel));
    const int64_t begin = (untaken - 1) * job_.size;
    try {
      job_.run(job_.function, begin, std::min(begin + job_.size, job_.tasks));
    } catch (...) {
      const std::lock_guard<std::mutex> lock(error_mutex_);
      if (!error_) error_ = std::current_exception();
    }
    if (left_.fetch_sub(1, std::memory_order_acq_rel) == 1) left_.notify_one();
    return true;
  }

  void work(int index) {
    is_inside = true;
    for (;;) {
      for (int i = 0; i < kLong; ++i) {
        if (index < helpers_.load(std::memory_order_relaxed) && take()) {
          i = 0;
        } else {
          pause();
        }
      }
      const uint32_t jobs = jobs_.load();
      sleeping_.fetch_add(1);
      if (untaken_.load() == 0 || index >= helpers_.load()) jobs_.wait(jobs);
      sleeping_.fetch_sub(1);
    }
  }

  Job job_ = {};
  int workers_ = 0;
  std::exception_ptr error_;
  std::mutex error_mutex_;
  std::atomic<int> helpers_ = 0, sleeping_ = 0;
  std::atomic<uint32_t> untaken_ = 0, left_ = 0, jobs_ = 0;
};

std::atomic<Pool*> pool = nullptr;

// A forked process has none of the threads; what they held is left to itself.
Pool* own_pool() {
  if (Pool* found = pool.load()) return found;
#if defined(__unix__) || defined(__APPLE__)
  static const int registered = pthread_atfork(nullptr, nullptr, [] { pool.store(nullptr); });
  static_cast<void>(registered);
#endif
  Pool *made = new Pool, *none = nullptr;
  if (pool.compare_exchange_strong(none, made)) return made;
  delete made;
  return none;
}

}  // namespace

void run_in_pool(int64_t tasks, int64_t grain, int64_t threads, void (*run)(const void*, int64_t, int64_t),
                 const void* function) {
  if (tasks <= 0) return;
  grain = std::max<int64_t>(grain, 1);
  threads = std::min(threads, (tasks + grain - 1) / grain);
  if (threads > 1 && !is_inside) {
    Pool* const own = own_pool();
    if (std::unique_lock<std::mutex> lock(own->mutex, std::try_to_lock); lock) {
      is_inside = true;
      struct Outside {
        ~Outside() { is_inside = false; }
      } outside;
      return own->run(tasks, grain, threads, run, function);
    }
  }
  run(function, 0, tasks);
}

}  // namespace specdec::cpu
