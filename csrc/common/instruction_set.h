// Kernels are compiled for several instruction sets. The best one that the machine has is used, or the one that was
// chosen.
#pragma once

#include <string>
#include <vector>

namespace specdec::cpu {

enum class InstructionSet { kBaseline, kAvx2, kAvx512 };

// The one in use.
InstructionSet instruction_set();

const char* name_of(InstructionSet set);

// Whether this machine, which has AVX-512, multiplies and adds integers of 16 bits in one instruction.
bool has_vnni();

// Where weights that are used once are read ahead to: Intel's processors take half the time when it is the second cache
// (PREFETCHT1), and AMD's were measured with the nearest one (PREFETCHNTA).
bool reads_ahead_to_second_cache();

// The names of those that this machine has, from the plainest to the best. The first, baseline, is everywhere.
std::vector<std::string> instruction_sets();

// Makes operations use this instruction set; false if the machine lacks it. Not while an operation runs.
bool use_instruction_set(const std::string& name);

}  // namespace specdec::cpu
