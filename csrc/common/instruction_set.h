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

// Whether this machine multiplies and adds integers of 16 bits in one instruction of AVX-512.
bool has_vnni();

// Whether weights that are used once are read ahead to the second cache (PREFETCHT1), with which a Xeon takes half the
// time, or to the nearest one (PREFETCHNTA), the only one that was measured on AMD's processors.
bool reads_ahead_to_second_cache();

// The names of those that this machine has, from the plainest to the best. The first, baseline, is everywhere.
std::vector<std::string> instruction_sets();

// Makes operations use this instruction set; false if the machine lacks it. Not while an operation runs.
bool use_instruction_set(const std::string& name);

}  // namespace specdec::cpu
