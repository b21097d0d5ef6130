// Programs: calls of operations that are kept with their arguments, to run one after the other without Python or
// dispatcher between them. Their results are tensors that were given, so that memory stays where it is.
#pragma once

#include <functional>
#include <memory>
#include <mutex>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "torch_glue.h"
#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif

namespace specdec {

using Program = std::vector<std::function<void()>>;

// The program that keeps the next call on this thread, and the results that this call is to write.
struct Keeping {
  std::shared_ptr<Program> program;
  std::vector<Tensor> results;
};
inline thread_local Keeping keeping;

template <class Result>
Result as(const std::vector<Tensor>& results) {
  if constexpr (std::is_same_v<Result, Tensor>) {
    return results.at(0);
  } else if constexpr (std::is_same_v<Result, std::tuple<Tensor, Tensor>>) {
    return {results.at(0), results.at(1)};
  } else {
    return Result(results);
  }
}

// Lets an operation write its results to these tensors.
class Giving {
 public:
  explicit Giving(const std::vector<Tensor>& results) { given_results = results; }
  ~Giving() { given_results = {}; }
};

// An operation that a program can keep.
template <auto operation, class Signature = decltype(operation)>
struct Keepable;

template <auto operation, class Result, class... Arguments>
struct Keepable<operation, Result (*)(Arguments...)> {
  static Result call(Arguments... arguments) {
    if (!keeping.program) return operation(std::forward<Arguments>(arguments)...);
    auto [program, results] = std::exchange(keeping, {});
    program->push_back([results, kept = std::tuple<std::decay_t<Arguments>...>(arguments...)] {
      const Giving giving(results);
      std::apply(operation, kept);
      STD_TORCH_CHECK(given_results.empty(), "specdec_kernels: more results are given than the operation has");
    });
    if constexpr (!std::is_void_v<Result>) return as<Result>(results);
  }
};

#define SPECDEC_KEEPABLE(operation) TORCH_BOX(&Keepable<&operation>::call)

// All programs, by numbers, so that a wrong one is an error and no address.
class Programs {
 public:
  static Programs& all() {
    static Programs& programs = *new Programs;  // outlives all that frees one at the end of the process
    return programs;
  }

  int64_t add() {
    const std::lock_guard<std::mutex> lock(mutex_);
    programs_[++latest_] = std::make_shared<Program>();
    return latest_;
  }

  std::shared_ptr<Program> get(int64_t number) {
    const std::lock_guard<std::mutex> lock(mutex_);
    const auto found = programs_.find(number);
    STD_TORCH_CHECK(found != programs_.end(), "specdec_kernels: there is no program ", number);
    return found->second;
  }

  void remove(int64_t number) {
    std::shared_ptr<Program> removed = get(number);  // is freed behind the lock
    const std::lock_guard<std::mutex> lock(mutex_);
    programs_.erase(number);
  }

 private:
  Programs() {
#if defined(__unix__) || defined(__APPLE__)  // a forked process must not inherit the lock of a thread that it lacks
    pthread_atfork([] { all().mutex_.lock(); }, [] { all().mutex_.unlock(); }, [] { all().mutex_.unlock(); });
#endif
  }

  std::mutex mutex_;
  int64_t latest_ = 0;
  std::unordered_map<int64_t, std::shared_ptr<Program>> programs_;
};

inline int64_t new_program() { return Programs::all().add(); }
inline void free_program(int64_t number) { Programs::all().remove(number); }

// The next keepable operation that this thread calls is kept instead of run. 0: it is run after all.
inline void keep_next(int64_t number, const std::vector<Tensor>& results) {
  for (const Tensor& result : results) STD_TORCH_CHECK(result.is_cpu(), "specdec_kernels: a result is not on a CPU");
  keeping = number == 0 ? Keeping() : Keeping{Programs::all().get(number), results};
}

inline void run_program(int64_t number) {
  const std::shared_ptr<Program> program = Programs::all().get(number);
  for (const auto& call : *program) call();
}

}  // namespace specdec
