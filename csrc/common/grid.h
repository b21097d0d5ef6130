// What a launch is made of.
#pragma once

#include <cstdint>

namespace specdec::cuda {

struct Grid {
  int64_t x, y, z;
  int threads;
  int64_t shared;   // bytes of shared memory
  bool after_ours;  // whether the launch before is ours, too, so that the two may overlap
};

}  // namespace specdec::cuda
