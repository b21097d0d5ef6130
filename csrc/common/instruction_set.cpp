#include "instruction_set.h"

namespace specdec::cpu {
namespace {

InstructionSet best() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool has_avx2 =
      __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    return InstructionSet::kAvx512;
  }
  if (has_avx2) return InstructionSet::kAvx2;
#endif
  return InstructionSet::kBaseline;
}

// Each set has what the ones before it have.
std::vector<InstructionSet> all() {
  std::vector<InstructionSet> found;
  for (InstructionSet set : {InstructionSet::kBaseline, InstructionSet::kAvx2, InstructionSet::kAvx512}) {
    if (set <= best()) found.push_back(set);
  }
  return found;
}

InstructionSet& in_use() {
  static InstructionSet used = best();
  return used;
}

}  // namespace

InstructionSet instruction_set() { return in_use(); }

#if defined(__x86_64__)
bool has_vnni() { return __builtin_cpu_supports("avx512vnni"); }
bool reads_ahead_to_second_cache() { return __builtin_cpu_is("intel"); }
#else
bool has_vnni() { return false; }
bool reads_ahead_to_second_cache() { return false; }
#endif

const char* name_of(InstructionSet set) {
  switch (set) {
    case InstructionSet::kAvx512:
      return "avx512";
    case InstructionSet::kAvx2:
      return "avx2";
    default:
      return "baseline";
  }
}

std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
  for (InstructionSet set : all()) names.push_back(name_of(set));
  return names;
}

bool use_instruction_set(const std::string& name) {
  for (InstructionSet set : all()) {
    if (name != name_of(set)) continue;
    in_use() = set;
    return true;
  }
  return false;
}

}  // namespace specdec::cpu
