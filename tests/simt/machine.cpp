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

// What was last done to 4 bytes of shared memory.
struct Seen {
  struct By {
    const Fiber* fiber = nullptr;
    Passed passed = {};
  };
  By writer = {}, reader = {};
  bool added = false;  // the last write was an atomic addition
  int additions = 0;
  const uint64_t* copied = nullptr;  // the last write was a copy with this arrival,
  int copy = 0;                      // its copy of this number
};

// The copies that an arrival tracks.
struct Copies {
  int begun = 0, done = 0;
  char* to = nullptr;
  const char* from = nullptr;
  int bytes = 0;
  std::vector<Seen::By> waiters = {};  // the first thread that waited for each copy

  bool in_flight() const { return done < begun; }
  void finish() {
    if (in_flight()) memcpy(to, from, bytes), ++done;
  }
};

struct Warp {
  Meeting barrier = {}, exchange = {};
  int turn = 0;  // which of the exchange's two sets of slots is next
  alignas(16) char slots[2][32][16] = {};
};

struct Memory {
  char* begin;
  int64_t size;
  std::unordered_map<int64_t, Seen> seen = {};  // by index of 4-byte words
  std::unordered_map<const uint64_t*, Copies> copies = {};
};

struct Block {
  int rank;
  std::unique_ptr<char[]> owned;  // of exactly the requested size, so that sanitizers see accesses beyond it
  Memory memory;
  std::vector<Warp> warps;
  Meeting barrier = {};
  int remaining = 0;  // threads that have not ended
};

namespace {

constexpr size_t kStack = 128 * 1024;

struct Machine {
  std::vector<Block> blocks;
  Memory scratch;
  std::vector<Fiber> fibers;
  std::vector<Fiber*> ready;
  Meeting cluster_barrier;
  int64_t cluster = 0;
  int threads = 0;
  std::mt19937_64 random;
  std::function<void()> body;
  std::string fault;
  void* main_stack_pointer = nullptr;
  size_t remaining = 0;
};

thread_local Machine* machine = nullptr;
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

void arrive_at_cluster(bool releases) {
  if (current->arrived) fail("a thread arrives again at a barrier that it has not left");
  current->arrived = true, current->releases = releases;
  current->passed.arrived += releases;
  arrive(machine->cluster_barrier);
}

void entry() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr);
#endif
  machine->body();
  current->done = true;
  --machine->remaining;
  if (--current->block->remaining == 0) {
    for (const auto& [arrival, copies] : current->block->memory.copies) {
      if (copies.in_flight()) fail("a block ends while a copy to its memory is in flight");
    }
  }
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

Warp& warp() { return current->block->warps[current->thread / 32]; }

std::string name_of(const Fiber& fiber) {
  return "thread " + std::to_string(fiber.thread) + " of block " + std::to_string(fiber.block->rank);
}

// Whether a barrier separates an earlier access from what the running fiber does now.
bool ordered(const Seen::By& before) {
  const Fiber& then = *before.fiber;
  const Fiber& now = *current;
  if (&then == &now || now.passed.cluster > before.passed.arrived) return true;
  if (then.block != now.block) return false;
  if (now.passed.block > before.passed.block) return true;
  return then.thread / 32 == now.thread / 32 && now.passed.warp > before.passed.warp;
}

template <class Where>
void check(const Seen::By& before, const char* what, const Where& where) {
  if (before.fiber == nullptr || ordered(before)) return;
  fail("race: " + name_of(*current) + " " + what + " " + name_of(*before.fiber) + ", without a barrier between them" +
       where());
}

}  // namespace

int thread() { return current->thread; }
int num_threads() { return machine->threads; }
int block_in_cluster() { return current->block->rank; }
int blocks_in_cluster() { return static_cast<int>(machine->blocks.size()); }
int64_t cluster() { return machine->cluster; }

void sync_warp() {
  meet(warp().barrier);
  ++current->passed.warp;
}

void sync_block() {
  meet(current->block->barrier);
  ++current->passed.block;
}

void arrive_cluster() { arrive_at_cluster(true); }
void arrive_only() { arrive_at_cluster(false); }

void wait_cluster() {
  if (!current->arrived) fail("a thread waits at a barrier where it has not arrived");
  if (machine->cluster_barrier.done == current->meetings) wait(machine->cluster_barrier);
  current->arrived = false, ++current->meetings;
  current->passed.cluster += current->releases;
}

void sync_cluster() {
  arrive_cluster();
  wait_cluster();
}

void init(uint64_t* arrival) {
  access(arrival, sizeof(*arrival), Access::kWrite);
  if (!current->block->memory.copies.emplace(arrival, Copies()).second) fail("an arrival is initialised again");
}

void copy_bulk(void* to, const void* from, int bytes, uint64_t* arrival) {
  Memory& memory = current->block->memory;
  const auto found = memory.copies.find(arrival);
  if (found == memory.copies.end()) fail("copy with an arrival that was never initialised");
  Copies& copies = found->second;
  if (copies.in_flight()) fail("copy with an arrival that another one has");
  if ((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from) | bytes) % 16 != 0) {
    fail("bulk copy that is not aligned");
  }
  char* place = static_cast<char*>(to);
  for (int i = 0; i < bytes; i += 4) {
    access(place + i, 4, Access::kCopy);
    Seen& seen = memory.seen[(place + i - memory.begin) / 4];
    seen.copied = arrival, seen.copy = copies.begun;
  }
  memset(to, 0xab, bytes);
  copies.to = place, copies.from = static_cast<const char*>(from), copies.bytes = bytes;
  ++copies.begun;
  ++counted.copies, counted.copied += bytes;
}

void wait(uint64_t* arrival, int round) {
  access(arrival, sizeof(*arrival), Access::kRead);
  const auto found = current->block->memory.copies.find(arrival);
  if (found == current->block->memory.copies.end()) fail("wait with an arrival that was never initialised");
  Copies& copies = found->second;
  int& waited = current->waited[arrival];
  if (waited % 2 != round) fail("wait for another round than the next");
  for (int turns = 0; copies.begun <= waited; ++turns) {  // by another thread, soon
    if (turns > 100000) fail("deadlock: a thread waits for a copy that no one begins");
    yield();
  }
  while (copies.done <= waited && machine->random() % 4 != 0) yield();
  if (copies.done <= waited) copies.finish();
  if (static_cast<int>(copies.waiters.size()) <= waited) copies.waiters.push_back({current, current->passed});
  ++waited;
}

Counts take_counts() { return std::exchange(counted, {}); }

void look_at(const void* place, int size, Access kind) {
  counted.loads += kind == Access::kRead;
  const char* address = static_cast<const char*>(place);
  const Memory& scratch = machine->scratch;
  if (address >= scratch.begin && address < scratch.begin + scratch.size) return access(place, size, kind);
  for (const Block& block : machine->blocks) {
    const Memory& memory = block.memory;
    if (address < memory.begin || address >= memory.begin + memory.size) continue;
    counted.from_shared += size;
    return access(place, size, Access::kRead);
  }
  counted.from_device += size;
}

char* shared_memory() { return current->block->memory.begin; }

char* in_block(char* place, int block) {
  return machine->blocks[block].memory.begin + (place - current->block->memory.begin);
}

void access(const void* place, int size, Access kind) {
  if (kind != Access::kCopy && machine->random() % 8 == 0) yield();
  const char* address = static_cast<const char*>(place);
  const auto holds = [&](const Memory& memory) {
    return address >= memory.begin && address + size <= memory.begin + memory.size;
  };
  Memory* memory = holds(machine->scratch) ? &machine->scratch : nullptr;
  int rank = -1;
  for (Block& block : machine->blocks) {
    if (!holds(block.memory)) continue;
    memory = &block.memory, rank = block.rank;
    if (&block != current->block && current->meetings == 0) {
      fail("access to the shared memory of another block before a barrier of the cluster says that it runs");
    }
    if (block.remaining == 0) fail("access to the shared memory of a block that has ended");
  }
  if (memory == nullptr) fail("access outside of shared memory, or across its end");
  const int64_t offset = address - memory->begin;
  const auto where = [&] {
    return ", at byte " + std::to_string(offset) + " of " + (rank < 0 ? "scratch" : "block " + std::to_string(rank));
  };
  if (offset % size != 0 || size % 4 != 0) fail("access that is not aligned" + where());
  for (int64_t word = offset / 4; word < (offset + size) / 4; ++word) {
    Seen& seen = memory->seen[word];
    const bool writes = kind == Access::kWrite || kind == Access::kCopy;
    if (!writes && seen.writer.fiber == nullptr && memory != &machine->scratch) {
      fail("read of shared memory that was never written" + where());
    }
    if (kind == Access::kRead) {
      if (seen.copied != nullptr) {
        const Copies& copies = memory->copies[seen.copied];
        const auto mine = current->waited.find(seen.copied);
        const bool waited = mine != current->waited.end() && mine->second > seen.copy;
        const bool known = static_cast<int>(copies.waiters.size()) > seen.copy && ordered(copies.waiters[seen.copy]);
        if (!waited && !known) fail("race: " + name_of(*current) + " reads what a copy may still write" + where());
      } else {
        check(seen.writer, "reads what is written by", where);
      }
      seen.reader = {current, current->passed};
    } else {
      seen.copied = nullptr;
      if (kind != Access::kAdd || !seen.added) check(seen.writer, "writes what is written by", where);
      check(seen.reader, "writes what is read by", where);
      seen.writer = {current, current->passed};
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

std::string run(int64_t clusters, int blocks, int threads, int shared, uint64_t seed, const std::function<void()>& body,
                char* scratch, int64_t scratch_size) {
  Machine m = {};
  machine = &m;
  m.threads = threads;
  m.random.seed(seed);
  m.body = body;
  static thread_local std::vector<std::unique_ptr<char[]>>
      stacks;  // kept for the next call, since there are megabytes of them
  while (static_cast<int>(stacks.size()) < blocks * threads) stacks.emplace_back(new char[kStack]);
  for (m.cluster = 0; m.cluster < clusters && m.fault.empty(); ++m.cluster) {
    m.blocks.clear(), m.fibers.clear(), m.ready.clear();
    m.scratch = {scratch, scratch_size};
    for (int rank = 0; rank < blocks; ++rank) {
      char* memory = new char[shared];
      m.blocks.push_back({rank, std::unique_ptr<char[]>(memory), {memory, shared}, std::vector<Warp>(threads / 32)});
      m.blocks.back().barrier.expected = m.blocks.back().remaining = threads;
      for (Warp& each : m.blocks.back().warps) each.barrier.expected = each.exchange.expected = 32;
    }
    m.cluster_barrier = {blocks * threads};
    m.remaining = blocks * threads;
    for (int i = 0; i < blocks * threads; ++i) m.fibers.push_back({&m.blocks[i / threads], i % threads});
    for (int i = 0; i < blocks * threads; ++i) {
      m.fibers[i].stack = stacks[i].get();
      ASAN_UNPOISON_MEMORY_REGION(stacks[i].get(), kStack);  // of frames that were never left
      m.fibers[i].stack_pointer = before_entry(stacks[i].get());
      m.ready.push_back(&m.fibers[i]);
    }
    give_turn();
    counted.block_barriers = m.fibers[0].passed.block, counted.cluster_barriers = m.fibers[0].passed.cluster;
  }
  machine = nullptr;
  return m.fault;
}

}  // namespace specdec::simt
