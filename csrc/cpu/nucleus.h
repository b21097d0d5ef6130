// The cutoff of top-p without top-k, as a rule in the one pass that computes the statistics.
//
// A sample of the row, known before the pass, gives a bracket that holds the cutoff almost surely. The pass sums the
// weights above the bracket and lists the few logits within it; the cutoff is selected among these, and the kept
// weights are then known without another pass. That the bracket holds the cutoff is verified, so the sample decides
// how long the search takes, but never what it finds. What it cannot know is the weight of a few large logits that it
// missed. After the pass the total is known, so a second bracket, by the same sample, rarely fails, and its pass leaves
// out all blocks below it. Where that fails too, as in rows with few and large ties, select.h finds the cutoff.
//
// All of this depends on the row alone.
#pragma once

#include <optional>

#include "select.h"

namespace specdec::cpu {

// Whether a sample of the row is large enough.
bool can_be_sampled(Row row);

// A bracket around the cutoff of a row before it is read, and of one whose statistics are known.
Bracket guess_bracket(Row row, float inverse_temperature, float top_p);
Bracket guess_bracket(const SelectionRow& row, float top_p);

// The largest logit c such that the tokens >= c weigh at least `wanted`, if the bracket holds it. `splits`: of blocks.
std::optional<float> cutoff_in_bracket(const SelectionRow& row, Bracket bracket, const Split* splits, double wanted);

// Sets the blocks' sums to the weights of the tokens >= cutoff, for a cutoff that the bracket holds.
void sum_kept(const SelectionRow& row, Bracket bracket, const Split* splits, float cutoff, BlockStats* blocks);

}  // namespace specdec::cpu
