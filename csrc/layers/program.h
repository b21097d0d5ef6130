// Programs: calls of operations that are kept with their arguments, to run one after the other without Python or
// dispatcher between them. Their results are tensors that were given, so that memory stays where it is.
#pragma once

#include <functional>
#include <span>
#include <tuple>
#include <utility>
#include <vector>

#include "../common/torch_glue.h"

namespace specdec {

using Program = std::vector<std::function<void()>>;

// Tensors that the operation which runs on this thread is to write its results to, in their order.
inline thread_local std::span<const Tensor> given_results;

// Where an operation writes a result like this: a new tensor, or the next one that was given.
inline Tensor result_on(const Tensor& like, torch::headeronly::IntHeaderOnlyArrayRef shape, ScalarType dtype) {
  if (given_results.empty()) return empty_on(like, shape, dtype);
  const Tensor given = given_results.front();
  given_results = given_results.subspan(1);
  const auto sizes = given.sizes();
  STD_TORCH_CHECK(std::equal(sizes.begin(), sizes.end(), shape.begin(), shape.end()) && given.scalar_type() == dtype &&
                      given.is_contiguous(),
                  "specdec_layers: a given result has a wrong shape or dtype");
  return given;
}

// The program that keeps the next call on this thread, or null, and the results that this call is to write.
struct Keeping {
  Program* program = nullptr;
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
    const auto [program, results] = std::exchange(keeping, {});
    program->push_back([results, kept = std::tuple<std::decay_t<Arguments>...>(arguments...)] {
      const Giving giving(results);
      std::apply(operation, kept);
      STD_TORCH_CHECK(given_results.empty(), "specdec_layers: more results are given than the operation has");
    });
    if constexpr (!std::is_void_v<Result>) return as<Result>(results);
  }
};

#define SPECDEC_KEEPABLE(operation) TORCH_BOX(&Keepable<&operation>::call)

// The results of the call that is kept next.
inline void keep_results(const std::vector<Tensor>& results) {
  for (const Tensor& result : results) STD_TORCH_CHECK(result.is_cpu(), "specdec_layers: a result is not on a CPU");
  keeping.results = results;
}

}  // namespace specdec
