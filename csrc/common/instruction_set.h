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

// The names of those that this machine has, from the plainest to the best. The first, baseline, is everywhere.
std::vector<std::string> instruction_sets();

// Makes operations use this instruction set; false if the machine lacks it. Not while an operation runs.
bool use_instruction_set(const std::string& name);

}  // namespace specdec::cpu
