// The operations on a CPU.
#pragma once

#include "../core/params.h"

namespace specdec::cpu {

void draft_step(const DraftStepParams& params);
void speculative_step(const SpeculativeStepParams& params);
void draft_children(const DraftChildrenParams& params);
void verify_tree(const VerifyTreeParams& params);

}  // namespace specdec::cpu
