// Runs the kernels on fibers; called through ctypes.
#include "../../csrc/cuda/draft_children.h"
#include "../../csrc/cuda/draft_step.h"
#include "../../csrc/cuda/plan.h"
#include "../../csrc/cuda/speculative_step.h"
#include "../../csrc/cuda/statistics_kernel.h"
#include "../../csrc/cuda/verify_tree.h"

namespace {

using namespace specdec;
using cuda::Work;

std::string fault;

// One launch of clusters for `blocks` > 0; else a split one, in which -blocks blocks measure a sequence and one
// decides. A warp has `slots` slots for copies, or, if that is negative, one for each of its items. A null `measure`:
// `decide` measures. `measured`: a launch before the one of clusters measures, if the operation can be launched so.
// Returns the fault, or "".
template <class Params, class Memory>
const char* run(void (*measure)(const Work<Params, Memory>&), void (*decide)(const Work<Params, Memory>&),
                const Params& params, int blocks, int threads, int slots, uint64_t seed, bool measured = false) {
  const int warps = threads / simt::kWarp, all_warps = (blocks > 0 ? blocks : 1) * warps;
  cuda::Items items = Memory::items(params);
  std::optional<cuda::StatisticsParams> rows;
  if constexpr (requires { Memory::to_measure(params); }) {
    if (measured && blocks > 0) rows = Memory::to_measure(params);
    if (rows) items = Memory::deciding(params, items);
  }
  const int turns = static_cast<int>((items.most + all_warps - 1) / all_warps);
  const int num_slots = blocks < 0 ? 0 : slots < 0 || slots > turns ? turns : slots;
  cuda::Arena arena;
  const Memory pieces = Memory::cut(arena, params, items, cuda::Cut{warps, all_warps, num_slots, rows.has_value()});
  Work<Params, Memory> work = {params, pieces, items.own_copy, nullptr, arena.size(), -blocks, nullptr};
  const int own_copies = warps * items.own_copy, shared = own_copies + static_cast<int>(arena.size());
  std::vector<char> scratch(blocks > 0 && !rows ? 0 : params.batch * arena.size());
  const int64_t size = static_cast<int64_t>(scratch.size());
  const auto clusters = [&] {
    return simt::run(params.batch, blocks, threads, shared, seed, [&] { decide(work); }, scratch.data(), size);
  };
  if (rows) {
    if constexpr (requires { pieces.statistics(); }) {
      rows->memory = scratch.data(), work.measured = scratch.data();
      rows->stride = work.stride = pieces.statistics().size, rows->mass_at = pieces.statistics().mass_at;
    }
    fault = simt::run(
        rows->launched(), 1, cuda::kStatisticsThreads, 0, seed, [&] { cuda::statistics_kernel(*rows); }, scratch.data(),
        size);
    if (fault.empty()) fault = clusters();
    return fault.c_str();
  }
  if (blocks > 0) {
    fault = clusters();
    return fault.c_str();
  }
  work.scratch = scratch.data();
  fault.clear();
  for (const auto& [kernel, of] : {std::pair{measure, params.batch * -blocks}, std::pair{decide, params.batch}}) {
    if (kernel != nullptr && fault.empty()) {
      fault = simt::run(of, 1, threads, own_copies, seed, [&] { kernel(work); }, work.scratch, size);
    }
  }
  return fault.c_str();
}

}  // namespace

extern "C" const char* draft_step(const DraftStepParams* params, int blocks, int threads, int slots, bool measured,
                                  uint64_t seed) {
  return run(cuda::draft_measure_kernel, cuda::draft_step_kernel, *params, blocks, threads, slots, seed, measured);
}

extern "C" const char* speculative_step(const SpeculativeStepParams* params, int blocks, int threads, int slots,
                                        bool measured, uint64_t seed) {
  return run(cuda::speculative_measure_kernel, cuda::speculative_step_kernel, *params, blocks, threads, slots, seed,
             measured);
}

extern "C" const char* draft_children(const DraftChildrenParams* params, int blocks, int threads, int slots,
                                      uint64_t seed) {
  return run(cuda::children_measure_kernel, cuda::draft_children_kernel, *params, blocks, threads, slots, seed);
}

extern "C" const char* verify_tree(const VerifyTreeParams* params, int blocks, int threads, int slots, uint64_t seed) {
  return run({}, cuda::verify_tree_kernel, *params, blocks, threads, slots, seed);
}

// What was done since the last call.
extern "C" void take_counts(specdec::simt::Counts* out) { *out = specdec::simt::take_counts(); }

// How a machine would launch the step, in one launch or by the second of two: blocks in a cluster, threads, slots of a
// warp, bytes of shared memory, and whether all items stay there.
extern "C" void plan(const SpeculativeStepParams* params, const cuda::Machine* machine, bool measured, int64_t* plan) {
  const cuda::Items all = cuda::StepMemory::items(*params);
  const cuda::Items items = measured ? cuda::StepMemory::deciding(*params, all) : all;
  cuda::StepMemory pieces = {};
  const cuda::Plan made = cuda::plan_of(*machine, params->batch, items, [&](cuda::Cut cut) {
    cuda::Arena arena;
    cut.measured = measured;
    pieces = cuda::StepMemory::cut(arena, *params, items, cut);
    return arena.size();
  });
  const int64_t numbers[] = {made.blocks, made.threads, made.num_slots, made.shared, pieces.ring.stay};
  memcpy(plan, numbers, sizeof(numbers));
}

// How many blocks would measure a sequence in a split launch.
extern "C" int measuring_blocks(const SpeculativeStepParams* params, const cuda::Machine* machine) {
  return cuda::measuring_blocks(*machine, params->batch, cuda::StepMemory::items(*params));
}
