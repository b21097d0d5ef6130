// Runs the kernels on fibers; called through ctypes.
#include "../../csrc/cuda/by_rows.h"
#include "../../csrc/cuda/draft_children.h"
#include "../../csrc/cuda/draft_step.h"
#include "../../csrc/cuda/plan.h"
#include "../../csrc/cuda/verify_tree.h"

namespace {

using namespace specdec;
using cuda::Work;

std::string fault;

// A fused launch for `blocks` > 0; else a split one, in which -blocks blocks measure a sequence. A warp has `slots`
// slots for copies, or, if that is negative, one for each of its items. A null `measure`: `decide` measures. With
// `ahead` > 0 and a kernel for it, rows are decided one by one, and a warp has so many slots more than it needs for a
// decision; if the step cannot be decided so, `ahead` is ignored. Returns the fault, or "".
template <class Params, class Memory>
const char* run(void (*measure)(const Work<Params, Memory>&), void (*decide)(const Work<Params, Memory>&),
                const Params& params, int blocks, int threads, int slots, uint64_t seed,
                void (*by_rows)(const Work<Params, Memory>&) = nullptr, int ahead = 0) {
  const int warps = threads / simt::kWarp, all_warps = (blocks > 0 ? blocks : 1) * warps;
  const cuda::Items items = Memory::items(params);
  const int turns = static_cast<int>((items.most + all_warps - 1) / all_warps);
  const bool rows = ahead > 0 && by_rows != nullptr && items.rows > 0;
  const int num_slots = rows                         ? cuda::slots_of(items.rows, items.of_row, all_warps) + ahead
                        : blocks < 0                 ? 0
                        : slots < 0 || slots > turns ? turns
                                                     : slots;
  cuda::Arena arena;
  const Memory pieces = Memory::cut(arena, params, items, cuda::Cut{warps, all_warps, num_slots, rows});
  Work<Params, Memory> work = {params, pieces, items.own_copy, nullptr, arena.size(), -blocks};
  const int own_copies = warps * items.own_copy;
  if (blocks > 0) {
    const int shared = own_copies + static_cast<int>(arena.size());
    fault = simt::run(params.batch, blocks, threads, shared, seed, [&] { (rows ? by_rows : decide)(work); });
    return fault.c_str();
  }
  std::vector<char> scratch(params.batch * arena.size());
  work.scratch = scratch.data();
  const int64_t size = static_cast<int64_t>(scratch.size());
  fault.clear();
  for (const auto& [kernel, clusters] : {std::pair{measure, params.batch * -blocks}, std::pair{decide, params.batch}}) {
    if (kernel != nullptr && fault.empty()) {
      fault = simt::run(clusters, 1, threads, own_copies, seed, [&] { kernel(work); }, work.scratch, size);
    }
  }
  return fault.c_str();
}

}  // namespace

extern "C" const char* draft_step(const DraftStepParams* params, int blocks, int threads, int slots, uint64_t seed) {
  return run(cuda::draft_measure_kernel, cuda::draft_step_kernel, *params, blocks, threads, slots, seed);
}

extern "C" const char* speculative_step(const SpeculativeStepParams* params, int blocks, int threads, int slots,
                                        int ahead, uint64_t seed) {
  return run(cuda::speculative_measure_kernel, cuda::speculative_step_kernel, *params, blocks, threads, slots, seed,
             cuda::speculative_rows_kernel, ahead);
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

// How a machine would launch the step: blocks in a cluster, threads, slots of a warp, bytes of shared memory,
// whether all items stay there, and whether rows are decided one by one.
extern "C" void plan(const SpeculativeStepParams* params, const cuda::Machine* machine, int64_t* plan) {
  const cuda::Items items = cuda::StepMemory::items(*params);
  cuda::StepMemory pieces = {};
  const cuda::Plan made = cuda::plan_of(*machine, params->batch, items, [&](const cuda::Cut& cut) {
    cuda::Arena arena;
    pieces = cuda::StepMemory::cut(arena, *params, items, cut);
    return arena.size();
  });
  const int64_t numbers[] = {made.blocks, made.threads, made.num_slots, made.shared, pieces.ring.stay, made.by_rows};
  memcpy(plan, numbers, sizeof(numbers));
}

// How many blocks would measure a sequence in a split launch.
extern "C" int measuring_blocks(const SpeculativeStepParams* params, const cuda::Machine* machine, bool dependent) {
  return cuda::measuring_blocks(*machine, params->batch, cuda::StepMemory::items(*params), dependent);
}
