// Kernels for testing the simulated machine: a correct one, and variants with one bug each.
#include "../../csrc/cuda/simt.h"

namespace {

using namespace specdec::simt;

float largest;

float larger(float a, float b) { return a > b ? a : b; }

// The largest of 4096 numbers, found by all threads of a cluster; `bug` selects the variant.
void row_max(int bug) {
  float* mine = reinterpret_cast<float*>(shared_memory());
  const int warps = num_threads() / 32, all = blocks_in_cluster() * num_threads();
  float max = -1.0f;
  for (int i = block_in_cluster() * num_threads() + thread(); i < 4096; i += all) max = larger(max, (i * 7919) % 4096);
  max = reduce(max, larger);
  if (bug != 9 && bug != 13) arrive_only();
  if (bug == 12) arrive_only();
  if (bug != 9) wait_cluster();
  if (thread() % 32 == 0) write(&mine[thread() / 32], max);
  if (bug != 1) sync_block();
  if (thread() == 0) {
    for (int warp = 0; warp < warps; ++warp) max = larger(max, read(&mine[warp]));
    if (bug == 10) arrive_cluster();
    write(in_block(&mine[8 + block_in_cluster()], 0), max);
  }
  if (bug == 2) sync_block();
  if (bug == 11) arrive_only();
  if (bug != 2 && bug != 11 && (bug != 10 || thread() != 0)) arrive_cluster();
  if (bug != 2) wait_cluster();
  if (bug == 3) write(&mine[8], max);                    // every thread
  if (bug == 4 && thread() < 7) sync_block();            // not every thread
  if (bug == 5 && thread() == 5) write(&mine[16], max);  // after the end
  if (bug == 6 && thread() == 5) read(&mine[15]);        // nothing was written there
  if (bug == 7) write(reinterpret_cast<float*>(shared_memory() + 2), max);
  if (bug == 8 && block_in_cluster() == 1) return;
  while (bug == 8 && read(in_block(&mine[0], 1)) >= 0.0f) sync_warp();  // until that block has ended
  if (thread() == 0 && block_in_cluster() == 0) {
    for (int block = 0; block < blocks_in_cluster(); ++block) max = larger(max, read(&mine[8 + block]));
    largest = max;
  }
}

// The sum of 1024 numbers, which are copied to a single slot, 128 at a time.
void sum_copies(int bug, const float* numbers) {
  uint64_t* arrival = reinterpret_cast<uint64_t*>(shared_memory());
  float* slot = reinterpret_cast<float*>(shared_memory() + 16);
  const auto copy = [&](int round) {
    if (thread() == 0) copy_bulk(slot, numbers + 128 * round + (bug == 1), 512, arrival);
  };
  if (thread() == 0 && bug != 2) init(arrival);
  copy(0);
  if (bug != 3) sync_warp();
  float sum = 0.0f;
  for (int round = 0; round < 8; ++round) {
    if (bug != 4) wait(arrival, bug == 5 ? 0 : round % 2);
    Bytes16 bytes = load16(slot + 4 * thread());
    if (bug != 6) sync_warp();
    if (round < 7) copy(bug == 7 && round == 3 ? 0 : round + 1);
    if (bug == 8) bytes = load16(slot + 4 * thread());
    float four[4];
    memcpy(four, &bytes, sizeof(four));
    for (float number : four) sum += number;
  }
  if (bug == 9) copy(0);  // nobody waits for it
  sum = reduce(sum, [](float a, float b) { return a + b; });
  if (thread() == 0) largest = sum;
}

std::string fault;

}  // namespace

// Returns the fault, or ""; stores the largest number in *result.
extern "C" const char* run_row_max(int bug, uint64_t seed, float* result) {
  fault = run(2, 4, 128, 64, seed, [bug] { row_max(bug); });
  *result = largest;
  return fault.c_str();
}

// The same for copies of 0 .. 1023.
extern "C" const char* run_sum_copies(int bug, uint64_t seed, float* result) {
  alignas(16) float numbers[1028];
  for (int i = 0; i < 1028; ++i) numbers[i] = static_cast<float>(i);
  largest = -1.0f;
  fault = run(1, 1, 32, 528, seed, [&] { sum_copies(bug, numbers); });
  *result = largest;
  return fault.c_str();
}
