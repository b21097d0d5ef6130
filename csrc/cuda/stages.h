// The launches of both operations, in their order: measure, select with filters, sums with rule `block` or race with
// rule `coupled`, decide. Which kernel each is depends on the call alone. `launch(kernel, params, grid)` is a stream's
// on a GPU (launch.h), and runs fibers in tests.
#pragma once

#include "decide.h"
#include "draft.h"
#include "grid.h"
#include "measure.h"
#include "operations.h"
#include "select.h"
#include "sums.h"

namespace specdec::cuda {

constexpr int64_t kMostSequences = 65535;  // of a launch: the most blocks that a grid has in this dimension

// Calls function(Plain<format, kAligned>()).
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

// Calls function(rows) for the rows of this work.
template <class Work, class Function>
void with_rows(const Work& work, const Function& function) {
  if (!work.plain()) return function(Any());
  work.whole_vectors() ? with_plain<true>(work.dtype(), function) : with_plain<false>(work.dtype(), function);
}

// Threads of a block that measures, as an H200 was fastest with so many blocks of logits.
inline int measuring_threads(int64_t blocks) {
  return blocks < 2000 ? 128 : blocks < 20000 ? 64 : blocks < 100000 ? 128 : 256;
}

// Plain rows, of the target or of the draft.
template <class Work, class Launch>
void measure_plain(const Work& work, int64_t sequences, const LogitRows& rows, const int64_t* num_drafts, bool of_draft,
                   const Launch& launch) {
  const int first = of_draft ? work.emitting() : 0, count = of_draft ? work.rows() - first : work.emitting();
  if (count == 0) return;
  const int64_t place = work.place(work.first, first);
  const Scratch& scratch = work.scratch;
  LogitRows of_launch = rows;
  of_launch.data += work.first * rows.sequence_stride;
  const Measuring params = {of_launch,
                            work.params.sampling.temperature + work.first,
                            num_drafts == nullptr ? nullptr : num_drafts + work.first,
                            scratch.stats + place,
                            scratch.parts == nullptr ? nullptr : scratch.parts + place * kParts,
                            static_cast<uint32_t>(work.place(1, 0)),
                            static_cast<uint32_t>(work.blocks(first)),
                            of_draft,
                            of_draft || num_drafts != nullptr};
  const int threads = measuring_threads(sequences * count * params.n), warps = threads / kWarp;
  const Grid grid = {(params.n + warps - 1) / warps, sequences, count, threads, 0, false};
  with_plain<true>(rows.dtype, [&](auto its) {
    using Format = typename decltype(its)::Format;
    scratch.parts == nullptr ? launch(measure_kernel<Format, false>, params, grid)
                             : launch(measure_kernel<Format, true>, params, grid);
  });
}

template <class Work, class Launch>
void measure_any(const Work& work, int64_t sequences, const Launch& launch) {
  constexpr int kThreads = 128, kWarps = kThreads / kWarp;
  const int most = work.blocks(0) > work.blocks(work.rows() - 1) ? work.blocks(0) : work.blocks(work.rows() - 1);
  launch(measure_any_kernel<Work>, work,
         Grid{(most + kWarps - 1) / kWarps, sequences, work.rows(), kThreads, 0, false});
}

template <class Work, class Launch>
void select(const Work& work, int64_t sequences, const Launch& launch) {
  if (work.scratch.rows == nullptr) return;
  Arena shared(nullptr);
  SelectMemory::cut(shared, work.n);
  with_rows(work, [&](auto rows) {
    launch(select_kernel<decltype(rows), Work>, work,
           Grid{work.rows(), sequences, 1, kSelectThreads, shared.size(), true});
  });
}

template <class Work, class Launch>
void race(const Work& work, int64_t sequences, const Launch& launch) {
  if (work.scratch.races == nullptr) return;
  with_rows(work, [&](auto rows) {
    launch(race_kernel<decltype(rows), Work>, work,
           Grid{work.n, sequences, work.emitting(), kRaceThreads, sizeof(Slots), true});
  });
}

// Calls stages(work, sequences) for all sequences, of which one launch has a limited number.
template <class Work, class Stages>
void in_turn(Work work, const Allocate& allocate, const Stages& stages) {
  if (work.params.batch == 0) return;
  Arena arena(nullptr);
  work.cut(arena);
  Arena memory(allocate(arena.size()));
  work.scratch = work.cut(memory);
  for (; work.first < work.params.batch; work.first += kMostSequences) {
    const int64_t left = work.params.batch - work.first;
    stages(work, left < kMostSequences ? left : kMostSequences);
  }
}

template <class Launch>
void run_draft_step(const DraftStepParams& params, const Allocate& allocate, const Launch& launch) {
  in_turn(DraftWork::of(params), allocate, [&](const DraftWork& work, int64_t sequences) {
    work.adjusts() ? measure_any(work, sequences, launch)
                   : measure_plain(work, sequences, work.logits(), nullptr, false, launch);
    select(work, sequences, launch);
    race(work, sequences, launch);
    Arena shared(nullptr);
    DraftMemory::cut(shared);
    with_rows(work, [&](auto rows) {
      launch(draft_kernel<decltype(rows)>, work, Grid{1, sequences, 1, kDraftThreads, shared.size(), true});
    });
  });
}

template <class Launch>
void run_speculative_step(const SpeculativeStepParams& params, const Allocate& allocate, const Launch& launch) {
  in_turn(StepWork::of(params), allocate, [&](const StepWork& work, int64_t sequences) {
    if (work.adjusts() || params.log_probs != nullptr) {
      measure_any(work, sequences, launch);
    } else {
      measure_plain(work, sequences, params.target, params.num_drafts, false, launch);
      if (weighs_drafts(params)) measure_plain(work, sequences, params.draft, params.num_drafts, true, launch);
    }
    select(work, sequences, launch);
    race(work, sequences, launch);
    const int64_t shared = work.scratch.own == nullptr ? work.memory_size() : 0;
    with_rows(work, [&](auto rows) {
      using Rows = decltype(rows);
      if (params.rule == kRuleBlock) {
        launch(sums_kernel<Rows>, work, Grid{kSumsBlocks, sequences, 1, kSumsThreads, shared, true});
      }
      const Grid grid = {1, sequences, 1, params.batch < 4 ? 256 : kDecideThreads<Rows>, shared, true};
      switch (params.rule) {
        case kRuleToken:
          return launch(decide_kernel<Rows, kRuleToken>, work, grid);
        case kRuleBlock:
          return launch(decide_kernel<Rows, kRuleBlock>, work, grid);
        default:
          return launch(decide_kernel<Rows, kRuleCoupled>, work, grid);
      }
    });
  });
}

}  // namespace specdec::cuda
