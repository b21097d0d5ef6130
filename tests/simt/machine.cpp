#include "machine.h"

#include <ucontext.h>

#include <algorithm>
#include <memory>
#include <random>
#include <unordered_map>
#include <utility>
#include <vector>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#else
#define ASAN_UNPOISON_MEMORY_REGION(place, size) (void)(place)
#endif

namespace specdec::simt {

thread_local Fiber* current = nullptr;

// Threads that wait for each other.
struct Meeting {
  int expected = 0, arrived = 0, done = 0;  // done: how often all have arrived
  std::vector<Fiber*> waiting = {};
};

// What was last done to 4 bytes of memory, and by which block of which launch.
struct Seen {
  struct By {
    bool any = false;
    int thread = 0;
    int64_t block = 0;
    Passed passed = {};
  };
  By writer = {}, reader = {};
  bool added = false;  // the last write was an atomic addition
  int additions = 0;
};

struct Warp {
  Meeting barrier = {}, exchange = {};
  int turn = 0;  // which of the exchange's two sets of slots is next
  alignas(16) char slots[2][32][16] = {};
};

struct Memory {
  char* begin = nullptr;
  int64_t size = 0;
  std::unordered_map<int64_t, Seen> seen = {};  // by index of 4-byte words
};

namespace {

constexpr size_t kStack = 128 * 1024;

struct Machine {
  std::unique_ptr<char[]> owned;  // of exactly the requested size, so that sanitizers see accesses beyond it
  Memory shared;
  std::vector<Warp> warps;
  Meeting barrier = {};
  std::vector<Fiber> fibers;
  std::vector<Fiber*> ready;
  GridSize grid, block;  // where the block is
  int threads = 0;
  std::mt19937_64 random;
  std::function<void()> body;
  std::string fault;
  void* main_stack_pointer = nullptr;
  size_t remaining = 0;
};

thread_local Machine* machine = nullptr;
thread_local Memory scratch;
thread_local int64_t block_number = 0;  // of all launches
thread_local int64_t first_of_launch = 0;
Counts counted = {};

extern "C" void specdec_switch_stacks(void** save, void* to);
#if defined(__x86_64__) && !defined(SPECDEC_UCONTEXT)
asm(R"(
.text
specdec_switch_stacks:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");
#else
// The portable way, which is slower, since it saves signal masks as well.
void specdec_switch_stacks(void** save, void* to) {
  ucontext_t here;
  *save = &here;
  swapcontext(&here, static_cast<ucontext_t*>(to));
}
#endif

// Switches from the running fiber to another one; null stands for the caller of `run`.
void switch_to(Fiber* to) {
  Fiber* from = current;
  void** save = from == nullptr ? &machine->main_stack_pointer : &from->stack_pointer;
  void* target = to == nullptr ? machine->main_stack_pointer : to->stack_pointer;
#if defined(__SANITIZE_ADDRESS__)
  static thread_local const void* main_bottom = nullptr;
  static thread_local size_t main_size = 0;
  void* fake = nullptr;
  __sanitizer_start_switch_fiber(from != nullptr && from->done ? nullptr : &fake, to ? to->stack : main_bottom,
                                 to ? kStack : main_size);
#endif
  current = to;
  specdec_switch_stacks(save, target);
#if defined(__SANITIZE_ADDRESS__)
  const void* bottom;
  size_t size;
  __sanitizer_finish_switch_fiber(fake, &bottom, &size);
  if (from != nullptr && main_bottom == nullptr) main_bottom = bottom, main_size = size;
#endif
}

// Switches to any fiber that is ready; to the caller of `run` if none is, or after a fault.
void give_turn() {
  Machine& m = *machine;
  if (m.ready.empty() || !m.fault.empty()) {
    if (m.fault.empty() && m.remaining > 0) m.fault = "deadlock: threads wait at a barrier that others never reach";
    return switch_to(nullptr);
  }
  const size_t i = m.random() % m.ready.size();
  Fiber* next = m.ready[i];
  m.ready[i] = m.ready.back();
  m.ready.pop_back();
  if (next != current) switch_to(next);
}

void yield() {
  machine->ready.push_back(current);
  give_turn();
}

[[noreturn]] void fail(const std::string& what) {
  if (machine->fault.empty()) machine->fault = what;
  switch_to(nullptr);
  __builtin_unreachable();
}

// Whether all have arrived now.
bool arrive(Meeting& meeting) {
  if (++meeting.arrived < meeting.expected) return false;
  meeting.arrived = 0, ++meeting.done;
  machine->ready.insert(machine->ready.end(), meeting.waiting.begin(), meeting.waiting.end());
  meeting.waiting.clear();
  return true;
}

void wait(Meeting& meeting) {
  meeting.waiting.push_back(current);
  give_turn();
}

void meet(Meeting& meeting) {
  if (!arrive(meeting)) wait(meeting);
}

void entry() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr);
#endif
  machine->body();
  current->done = true;
  --machine->remaining;
  give_turn();
  __builtin_unreachable();
}

// Prepares a stack so that switching to it begins `entry`.
#if defined(__x86_64__) && !defined(SPECDEC_UCONTEXT)
void* before_entry(char* stack) {
  // The stack looks as if the fiber had been left just before `entry`: its address above six saved registers, aligned
  // as at a call.
  const auto top = reinterpret_cast<uintptr_t>(stack + kStack) & ~uintptr_t{15};
  void** frame = reinterpret_cast<void**>(top) - 2;
  *frame = reinterpret_cast<void*>(&entry);
  return frame - 6;
}
#else
void* before_entry(char* stack) {
  auto* context = new (stack) ucontext_t;  // at the stack's far end
  getcontext(context);
  context->uc_stack.ss_sp = stack + sizeof(ucontext_t), context->uc_stack.ss_size = kStack - sizeof(ucontext_t);
  context->uc_link = nullptr;
  makecontext(context, entry, 0);
  return context;
}
#endif

Warp& warp() { return machine->warps[current->thread / 32]; }

// Whether a barrier separates an earlier access from what the running fiber does now, or the end of a launch.
bool ordered(const Seen::By& before) {
  if (before.block != block_number) return before.block < first_of_launch;
  if (before.thread == current->thread || current->passed.block > before.passed.block) return true;
  return before.thread / 32 == current->thread / 32 && current->passed.warp > before.passed.warp;
}

template <class Where>
void check(const Seen::By& before, const char* what, const Where& where) {
  if (!before.any || ordered(before)) return;
  if (before.block != block_number)
    fail(std::string("race: a block ") + what + " another block of the launch" + where());
  fail("race: thread " + std::to_string(current->thread) + " " + what + " thread " + std::to_string(before.thread) +
       ", without a barrier between them" + where());
}

}  // namespace

int thread() { return current->thread; }
int num_threads() { return machine->threads; }
int block_x() { return static_cast<int>(machine->block.x); }
int block_y() { return static_cast<int>(machine->block.y); }
int block_z() { return static_cast<int>(machine->block.z); }
int blocks_x() { return static_cast<int>(machine->grid.x); }

void sync_warp() {
  meet(warp().barrier);
  ++current->passed.warp;
}

void sync_block() {
  meet(machine->barrier);
  ++current->passed.block;
}

Counts take_counts() { return std::exchange(counted, {}); }

void count_load() { ++counted.loads; }

char* shared_memory() { return machine->shared.begin; }

void use_scratch(char* memory, int64_t size) { scratch.begin = memory, scratch.size = size, scratch.seen.clear(); }

void access(const void* place, int size, Access kind) {
  if (machine->random() % 8 == 0) yield();
  const char* address = static_cast<const char*>(place);
  const auto holds = [&](const Memory& memory) {
    return address >= memory.begin && address + size <= memory.begin + memory.size;
  };
  Memory* memory = holds(machine->shared) ? &machine->shared : holds(scratch) ? &scratch : nullptr;
  if (memory == nullptr) fail("access outside of shared memory and of that between launches, or across its end");
  const int64_t offset = address - memory->begin;
  const auto where = [&] {
    return ", at byte " + std::to_string(offset) + (memory == &scratch ? " between launches" : " of shared memory");
  };
  if (offset % size != 0 || size % 4 != 0) fail("access that is not aligned" + where());
  const Seen::By me = {true, current->thread, block_number, current->passed};
  for (int64_t word = offset / 4; word < (offset + size) / 4; ++word) {
    Seen& seen = memory->seen[word];
    if (kind != Access::kWrite && !seen.writer.any) fail("read of memory that was never written" + where());
    if (kind == Access::kRead) {
      check(seen.writer, "reads what is written by", where);
      seen.reader = me;
    } else {
      if (kind != Access::kAdd || !seen.added) check(seen.writer, "writes what is written by", where);
      check(seen.reader, "writes what is read by", where);
      seen.writer = me;
      seen.added = kind == Access::kAdd;
      if (seen.added) ++counted.additions, counted.most = std::max<int64_t>(counted.most, ++seen.additions);
    }
  }
}

const char* exchange(const void* bytes, int size) {
  Warp& mine = warp();
  // The next exchange uses the other set of slots, and no thread can be two exchanges ahead.
  const int turn = mine.turn;
  memcpy(mine.slots[turn][current->thread % 32], bytes, size);
  const bool last = mine.exchange.arrived + 1 == mine.exchange.expected;
  if (last) mine.turn ^= 1;
  meet(mine.exchange);
  return &mine.slots[turn][0][0];
}

std::string run(GridSize grid, int threads, int64_t shared, uint64_t seed, const std::function<void()>& body) {
  Machine m = {};
  machine = &m;
  m.grid = grid, m.threads = threads, m.body = body;
  m.random.seed(seed);
  ++counted.launches;
  static thread_local std::vector<std::unique_ptr<char[]>> stacks;  // kept for the next call, as there are megabytes
  while (static_cast<int>(stacks.size()) < threads) stacks.emplace_back(new char[kStack]);
  first_of_launch = block_number + 1;
  for (int64_t i = 0; i < grid.x * grid.y * grid.z && m.fault.empty(); ++i) {
    m.block = {i % grid.x, i / grid.x % grid.y, i / grid.x / grid.y};
    ++block_number, ++counted.blocks;
    m.owned.reset(new char[shared]);
    m.shared = {m.owned.get(), shared};
    m.warps = std::vector<Warp>(threads / 32);
    m.barrier = {threads};
    m.fibers.clear(), m.ready.clear();
    for (Warp& each : m.warps) each.barrier.expected = each.exchange.expected = 32;
    m.remaining = threads;
    for (int t = 0; t < threads; ++t) m.fibers.push_back({t});
    for (int t = 0; t < threads; ++t) {
      m.fibers[t].stack = stacks[t].get();
      ASAN_UNPOISON_MEMORY_REGION(stacks[t].get(), kStack);  // of frames that were never left
      m.fibers[t].stack_pointer = before_entry(stacks[t].get());
      m.ready.push_back(&m.fibers[t]);
    }
    give_turn();
  }
  machine = nullptr;
  return m.fault;
}

}  // namespace specdec::simt
