// The launches of both operations, in their order: measure, select with filters, sums with rule `block` or race with
// rule `coupled`, decide. Which kernel each is depends on the call alone. `launch(kernel, params, grid)` is a stream's
// on a GPU (launch.h), and runs fibers in tests.
#pragma once

#include "../common/grid.h"
#include "decide.h"
#include "draft.h"
#include "measure.h"
#include "operations.h"
#include "select.h"
#include "sums.h"

namespace specdec::cuda {

constexpr int64_t kMostSequences = 65535;  // of a launch: the most blocks that a grid has in this dimension

// Calls function(rows) for plain rows of a format.
template <bool kAligned, class Function>
void with_plain(Dtype dtype, const Function& function) {
  switch (dtype) {
    case Dtype::kBFloat16:
      return function(Plain<BFloat16, kAligned>());
    case Dtype::kFloat16:
      return function(Plain<Float16, kAligned>());
    default:
      return function(Plain<Float32, kAligned>());
  }
}

// Calls function(rows) for the rows of this work, once they are measured.
template <class Function>
void with_rows(const Work& work, const Function& function) {
  if (!work.plain()) return function(Any());
  work.whole_vectors() ? with_plain<true>(work.params.target.dtype, function)
                       : with_plain<false>(work.params.target.dtype, function);
}

// Threads of a block that measures, as an H200 was fastest with so many blocks of logits.
inline int measuring_threads(int64_t blocks) {
  return blocks < 2000 ? 128 : blocks < 20000 ? 64 : blocks < 100000 ? 128 : 256;
}

template <class Launch>
void measure(const Work& work, int64_t sequences, const Launch& launch) {
  const auto launch_kernel = [&](auto rows) {
    using Rows = decltype(rows);
    const int threads = Rows::kAny ? 128 : measuring_threads(sequences * work.rows * work.n);
    const int warps = threads / kWarp;
    launch(measure_kernel<Rows>, work, Grid{(work.n + warps - 1) / warps, sequences, work.rows, threads, 0, false});
  };
  work.measured_plainly() ? with_plain<false>(work.params.target.dtype, launch_kernel) : launch_kernel(Any());
}

template <class Launch>
void select(const Work& work, int64_t sequences, const Launch& launch) {
  if (work.scratch.rows == nullptr) return;
  Arena shared(nullptr);
  SelectMemory::cut(shared, work.n);
  with_rows(work, [&](auto rows) {
    launch(select_kernel<decltype(rows)>, work, Grid{work.rows, sequences, 1, kSelectThreads, shared.size(), true});
  });
}

template <class Launch>
void race(const Work& work, int64_t sequences, const Launch& launch) {
  if (work.scratch.races == nullptr) return;
  with_rows(work, [&](auto rows) {
    launch(race_kernel<decltype(rows)>, work,
           Grid{work.n, sequences, work.emitting(), kRaceThreads, sizeof(Slots), true});
  });
}

template <class Launch>
void draw(const Work& work, int64_t sequences, const Launch& launch) {
  with_rows(work, [&](auto rows) {
    launch(draft_kernel<decltype(rows)>, work, Grid{1, sequences, 1, kDraftThreads, sizeof(DraftMemory), true});
  });
}

template <class Launch>
void decide(const Work& work, int64_t sequences, const Launch& launch) {
  const int64_t shared = work.scratch.own == nullptr ? work.memory_size() : 0;
  with_rows(work, [&](auto rows) {
    using Rows = decltype(rows);
    const Grid grid = {1, sequences, 1, work.params.batch < 4 ? 256 : kDecideThreads<Rows>, shared, true};
    switch (work.params.rule) {
      case kRuleToken:
        return launch(decide_kernel<Rows, kRuleToken>, work, grid);
      case kRuleBlock:
        launch(sums_kernel<Rows>, work, Grid{kSumsBlocks, sequences, 1, kSumsThreads, shared, true});
        return launch(decide_kernel<Rows, kRuleBlock>, work, grid);
      default:
        return launch(decide_kernel<Rows, kRuleCoupled>, work, grid);
    }
  });
}

// All launches, for all sequences, of which one launch has a limited number. `last`: the launches after these.
template <class Launch, class Last>
void run(Work work, const Allocate& allocate, const Launch& launch, const Last& last) {
  if (work.params.batch == 0) return;
  Arena arena(nullptr);
  work.cut(arena);
  Arena memory(allocate(arena.size()));
  work.scratch = work.cut(memory);
  for (; work.first < work.params.batch; work.first += kMostSequences) {
    const int64_t left = work.params.batch - work.first, sequences = left < kMostSequences ? left : kMostSequences;
    measure(work, sequences, launch);
    select(work, sequences, launch);
    race(work, sequences, launch);
    last(work, sequences, launch);
  }
}

template <class Launch>
void run_draft_step(const DraftStepParams& params, const Allocate& allocate, const Launch& launch) {
  run(Work::of(params), allocate, launch, [](const auto&... all) { draw(all...); });
}

template <class Launch>
void run_speculative_step(const SpeculativeStepParams& params, const Allocate& allocate, const Launch& launch) {
  run(Work{params}, allocate, launch, [](const auto&... all) { decide(all...); });
}

}  // namespace specdec::cuda
