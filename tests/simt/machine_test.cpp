// Kernels for testing the simulated machine: a correct one, and variants with one bug each.
#include "../../csrc/common/simt.h"

namespace {

using namespace specdec::simt;

constexpr int kBlocks = 2;

float larger(float a, float b) { return a > b ? a : b; }

// The largest of 4096 numbers: each block leaves that of its half between launches. `bug` selects the variant.
void half_max(int bug, float* halves) {
  float* mine = reinterpret_cast<float*>(shared_memory());
  const int warps = num_threads() / 32, all = kBlocks * num_threads();
  float max = -1.0f;
  for (int i = block_x() * num_threads() + thread(); i < 4096; i += all) max = larger(max, (i * 7919) % 4096);
  max = reduce(max, larger);
  if (thread() % 32 == 0) write(&mine[thread() / 32], max);
  if (bug != 1) sync_block();
  if (bug == 2) write(&mine[0], max);                    // every thread
  if (bug == 3 && thread() < 7) sync_block();            // not every thread
  if (bug == 4 && thread() == 5) write(&mine[16], max);  // after the end
  if (bug == 5 && thread() == 5) read(&mine[15]);        // nothing was written there
  if (bug == 6) write(reinterpret_cast<float*>(shared_memory() + 2), max);
  if (thread() >= 32) return;
  for (int warp = 0; warp < warps; ++warp) max = larger(max, read(&mine[warp]));
  if (thread() == 0) write(&halves[bug == 7 ? 0 : block_x()], max);  // both blocks to one place
  if (bug == 8 && block_x() == 1 && thread() == 0) read(&halves[0]);
}

void whole_max(int bug, float* halves, float* largest) {
  if (thread() == 0) *largest = larger(fresh(&halves[0]), fresh(&halves[bug == 9 ? 2 : 1]));
}

std::string fault;

}  // namespace

// Returns the fault, or ""; stores the largest number in *result.
extern "C" const char* run_max(int bug, uint64_t seed, float* result) {
  alignas(16) float halves[4];
  *result = -1.0f;
  use_scratch(reinterpret_cast<char*>(halves), sizeof(halves));
  fault = run({kBlocks, 1, 1}, 128, 64, seed, [&] { half_max(bug, halves); });
  if (fault.empty()) fault = run({1, 1, 1}, 32, 0, seed, [&] { whole_max(bug, halves, result); });
  return fault.c_str();
}
