// The rules `token` and `block` of trees: what becomes of a row's p and q while its children are rejected, one after
// the other. p becomes max(0, h p - q), q loses the child, and both are renormalised, but no renormalised row is
// stored: after any number of rejections, p is max(0, p - t q) of the row's own p and q, divided by its mass, and q is
// q without the rejected children, divided by what is left of it.
#pragma once

#include "accept.h"

namespace specdec {

struct Siblings {
  float h = 1.0f;          // joint ratio of the path to the row; always 1 in rule `token`
  float scale = INFINITY;  // 1 / t: p is in proportion to max(0, scale p - q); infinite before the first rejection
  float mass = 1.0f;       // sum max(0, p - t q)
  float left = 1.0f;       // of q
};

// h p(x) / q(x) for the next child x, with p and q as they are after the rejections.
SPECDEC_HD float child_ratio(Siblings siblings, float log_p, float log_q) {
  const float beyond = ratio(log_p, log_q) - 1.0f / siblings.scale;
  const float of_child = siblings.h * beyond * siblings.left / siblings.mass;
  return of_child > 0.0f ? of_child : 0.0f;
}

// The scale after another rejection. The first one's is h, as in a chain.
SPECDEC_HD float next_scale(Siblings siblings) {
  const float h = siblings.h * siblings.left;
  return h / (h / siblings.scale + siblings.mass);
}

// After another rejection. `residual`: sum max(0, scale p - q); `left`: of q, without the child.
SPECDEC_HD Siblings after_rejection(Siblings before, float scale, float residual, float left, bool joint) {
  Siblings after = {before.h, scale, residual / scale, left};
  if (joint) after.h = keep_probability(before.h, residual * (before.h / (scale * before.mass)));
  return after;
}

}  // namespace specdec
