// A job is cut into parts, several for each thread. A thread takes its own in order, so that what it reads ahead of one
// is what the next one needs (reading weights takes up to a fifth less time than in any other order), and then those
// that others did not come to. A caller waits only for parts that were taken: threads that other processes keep from
// running take none, and delay nothing. (OpenMP waits for all threads, spinning, and so keeps those that it waits for
// from running.)
#include "pool.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <exception>
#include <mutex>
#include <thread>
#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif

namespace specdec::cpu {
namespace {

constexpr int64_t kParts = 8;  // of a job for each thread
constexpr int64_t kMostThreads = 256;
constexpr int kShort = 2000, kLong = 8000;  // looks, some 20 and 100 µs: at what is about to end, and for the next job

void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

thread_local bool is_inside = false;

// The parts of a thread that nobody took yet: the first in the lower half, the one past the last in the upper half.
struct alignas(64) Share {
  std::atomic<uint64_t> untaken = 0;

  // Takes the first for the thread itself, the last for another one; false: none is left.
  bool take(bool own, uint32_t* part) {
    uint64_t untaken_now = untaken.load(std::memory_order_acquire);
    for (;;) {
      const auto first = static_cast<uint32_t>(untaken_now), end = static_cast<uint32_t>(untaken_now >> 32);
      if (first == end) return false;
      *part = own ? first : end - 1;
      const uint64_t left = own ? untaken_now + 1 : untaken_now - (uint64_t{1} << 32);
      if (untaken.compare_exchange_weak(untaken_now, left, std::memory_order_acq_rel)) return true;
    }
  }
};

class Pool {
 public:
  void run(int64_t tasks, int64_t grain, int64_t threads, void (*run)(const void*, int64_t, int64_t),
           const void* function) {
    threads = std::min<int64_t>(threads, kMostThreads);
    while (workers_ < threads - 1) std::thread([this, index = ++workers_] { work(index); }).detach();
    const int64_t size = std::max(grain, (tasks + threads * kParts - 1) / (threads * kParts));
    const int64_t parts = (tasks + size - 1) / size;
    job_ = {tasks, size, run, function};
    error_ = nullptr;
    threads_.store(static_cast<int>(threads), std::memory_order_relaxed);
    left_.store(static_cast<uint32_t>(parts));  // from here on no thread falls asleep
    for (int64_t thread = 0; thread < threads; ++thread) {
      const auto first = static_cast<uint64_t>(parts * thread / threads);
      const auto end = static_cast<uint64_t>(parts * (thread + 1) / threads);
      shares_[thread].untaken.store(end << 32 | first, std::memory_order_release);  // and the parts can be taken
    }
    if (sleeping_.load() > 0) {
      jobs_.fetch_add(1);
      jobs_.notify_all();
    }
    while (take(0)) {
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
  bool take(int thread) {
    if (left_.load(std::memory_order_relaxed) == 0) return false;  // idle threads look at this alone
    const int threads = threads_.load(std::memory_order_relaxed);
    uint32_t part;
    bool taken = false;
    for (int i = 0; i < threads && !taken; ++i) taken = shares_[(thread + i) % threads].take(i == 0, &part);
    if (!taken) return false;
    const int64_t begin = part * job_.size;
    try {
      job_.run(job_.function, begin, std::min(begin + job_.size, job_.tasks));
    } catch (...) {
      const std::lock_guard<std::mutex> lock(error_mutex_);
      if (!error_) error_ = std::current_exception();
    }
    if (left_.fetch_sub(1, std::memory_order_acq_rel) == 1) left_.notify_one();
    return true;
  }

  void work(int thread) {
    is_inside = true;
    for (;;) {
      for (int i = 0; i < kLong; ++i) {
        if (thread < threads_.load(std::memory_order_relaxed) && take(thread)) {
          i = 0;
        } else {
          pause();
        }
      }
      const uint32_t jobs = jobs_.load();
      sleeping_.fetch_add(1);
      if (left_.load() == 0 || thread >= threads_.load()) jobs_.wait(jobs);
      sleeping_.fetch_sub(1);
    }
  }

  Job job_ = {};
  int workers_ = 0;
  std::exception_ptr error_;
  std::mutex error_mutex_;
  std::array<Share, kMostThreads> shares_;
  std::atomic<int> threads_ = 0, sleeping_ = 0;
  std::atomic<uint32_t> left_ = 0, jobs_ = 0;
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
