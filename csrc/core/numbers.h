// The numbers with which a model computes.
#pragma once

#include "params.h"

namespace specdec {

struct Numbers {
  char* data;
  Dtype dtype;
};

}  // namespace specdec
