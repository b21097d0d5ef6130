// Trees of candidates. Rule `walk` draws a token at a row and goes on to the child that holds it. Rule `token`
// (SpecInfer, arXiv 2305.09781, with Sequoia's draws without replacement, arXiv 2402.12374) tests a row's children in
// turn. Rule `block` (Traversal verification, arXiv 2505.12398) tests a row's node after everything below it.
//
// Every sequence goes through its tree by itself. It reads a row when it enters it, and sums a residual when it rejects
// a child; what many sequences want is done together, split over threads by blocks. Rows that no path enters are not
// read.
#include <algorithm>

#include "../common/parallel.h"
#include "tree.h"

namespace specdec::cpu {
namespace {

constexpr int64_t kSequencesAtOnce = 1024;  // few enough for the records of their rows to stay in the cache

class Verifying {
 public:
  explicit Verifying(const VerifyTreeParams& params) : params_(params), joint_(params.rule == kTreeBlock) {}

  void run(int64_t first, int64_t count) {
    std::vector<Sequence> sequences;
    std::vector<Sequence*> active;
    for (int64_t b = first; b < first + count; ++b) {
      sequences.push_back({b, Tree(params_, b), params_.rule == kTreeWalk || params_.sampling.temperature[b] == 0.0f});
    }
    for (Sequence& sequence : sequences) active.push_back(&sequence);
    while (!active.empty()) {
      std::vector<Sequence*> entering, rest;
      std::vector<Residual*> residuals;
      for (Sequence* sequence : active) {
        if (sequence->want == Sequence::kRow)
          entering.push_back(sequence);
        else
          residuals.push_back(&sequence->places.back().next);
      }
      read(entering);
      weigh(residuals);
      const int64_t grain = params_.rule == kTreeWalk ? 1 : kGrainBlocks / 4;
      parallel_for(static_cast<int64_t>(active.size()), grain, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; ++i) go_on(*active[i]);
      });
      for (Sequence* sequence : active) {
        if (sequence->want != Sequence::kNothing) rest.push_back(sequence);
      }
      active.swap(rest);
    }
  }

 private:
  // Reads the rows that sequences enter: p, and q if there are children to be tested with it.
  void read(const std::vector<Sequence*>& sequences) {
    const int64_t n = static_cast<int64_t>(sequences.size());
    std::vector<RowTask> tasks(2 * n);  // the target's rows, then the draft's
    for (int64_t i = 0; i < n; ++i) {
      Sequence& sequence = *sequences[i];
      const int64_t b = sequence.b, row = sequence.row;
      Place& place = sequence.places.emplace_back();
      place.siblings.h = sequence.h;
      place.child = sequence.tree.first_child(row);
      VerifiedRow& here = place.read;
      here.sequence = b, here.j = row;
      std::vector<int64_t> drafts;  // on the path to this row
      for (size_t j = 1; j < sequence.places.size(); ++j) drafts.push_back(token_of(b, sequence.places[j].read.j - 1));
      const auto task = [&](const LogitRows& logits, const int64_t* ids, Row* at, std::vector<Patch>* patches) {
        *at = row_at(logits, b, row);
        *patches = patches_of(params_.sampling, b, *at, ids, params_.position[b], drafts.data(), drafts.size());
        set_patches(*at, *patches);
        return task_of(params_.sampling, b, *at);
      };
      tasks[i] = task(params_.target, nullptr, &here.p_row, &here.p_patches);
      tasks[i].weighed = !sequence.walks;
      if (!sequence.walks && has_candidates(sequence, row)) {
        tasks[n + i] = task(params_.draft, params_.d2t, &here.q.row, &here.q_patches);
      }
    }
    const StatsOfRows& stats = stats_.emplace_back(tasks);
    for (int64_t i = 0; i < n; ++i) {
      Place& place = sequences[i]->places.back();
      place.read.p = stats[i];
      if (const int32_t fault = row_fault(stats[i].max, stats[i].inverse_temperature)) {
        place.read.flags = fault, place.read.faulty = true, place.child = -1;
      } else if (tasks[n + i].row.data != nullptr) {
        place.q = stats[n + i];
        place.rest = place.read.q_patches;
        place.read.q = {place.read.q.row, place.q.distribution(), params_.d2t, params_.draft.vocabulary};
      }
    }
  }

  void go_on(Sequence& sequence) {
    if (sequence.walks)
      walk(sequence);
    else if (sequence.want == Sequence::kResidual)
      reject(sequence);
    else
      test(sequence);
  }

  void walk(Sequence& sequence) {
    Place& place = sequence.places.back();
    const VerifiedRow& here = place.read;
    if (here.faulty) return finish(sequence, -1);
    const uint32_t depth = static_cast<uint32_t>(sequence.places.size() - 1);
    Noise noise = noise_of(sequence.b, 0);
    noise.position += depth;
    const int64_t drawn = here.greedy() ? argmax(here.p_row, here.p) : draw_coupled(here.p_row, here.p, nullptr, noise);
    while (to_candidate(sequence, place) && token_of(sequence.b, place.child) != drawn) to_next(sequence, place);
    if (place.child < 0) return finish(sequence, drawn);
    enter(sequence, place.child, 1.0f);
  }

  // Tests the children of the row, and if all are rejected, the row's own node.
  void test(Sequence& sequence) {
    Place& place = sequence.places.back();
    for (; to_candidate(sequence, place); to_next(sequence, place)) {
      if (const int32_t fault = row_fault(place.q.max, place.q.inverse_temperature)) {
        place.read.flags |= fault << kDraftFlagShift;
        place.child = -1;
        break;
      }
      if (place.siblings.h == 0.0f) break;  // neither the node nor anything below it can be kept any more
      const float ratio = ratio_of(place);
      const float u = uniform_at(sequence.b, place.child);
      // A node without candidates below it is kept iff u < h, which needs no more than this.
      const bool below = joint_ && ratio > 0.0f && has_candidates(sequence, place.child + 1);
      if (u < ratio || below) return enter(sequence, place.child, joint_ ? std::min(ratio, 1.0f) : 1.0f);
      if (place.siblings.left > 0.0f) return want_residual(sequence);  // else there is nothing to subtract
    }
    const int64_t row = place.read.j;
    if (row > 0 && joint_ && !(uniform_at(sequence.b, row - 1) < place.siblings.h)) {
      sequence.places.pop_back();
      return want_residual(sequence);
    }
    if (place.read.faulty) return finish(sequence, -1);
    const Noise noise = noise_of(sequence.b, row);
    finish(sequence, place.rejected.empty() ? draw(place.read.p_row, place.read.p, noise, kRecoverBlock, kRecoverToken)
                                            : draw_residual(place.residual, noise));
  }

  void enter(Sequence& sequence, int64_t node, float h) {
    sequence.want = Sequence::kRow, sequence.row = node + 1, sequence.h = h;
  }

  void want_residual(Sequence& sequence) {
    Place& place = sequence.places.back();
    place.next = {&place.read, next_scale(place.siblings)};
    sequence.want = Sequence::kResidual;
  }

  // The present child is rejected, and the residual has been weighed.
  void reject(Sequence& sequence) {
    Place& place = sequence.places.back();
    const float mass = place.next.total();
    if (mass == 0.0f && place.siblings.h == 1.0f) {
      // p and q are equal up to rounding: the child is accepted after all, unless p(x) = 0.
      if (ratio_of(place) > 0.0f) return enter(sequence, place.child, 1.0f);
    } else {
      remove(place, token_of(sequence.b, place.child));
      place.siblings = after_rejection(place.siblings, place.next.w, mass, left_of(place), joint_);
      place.residual = std::move(place.next);
    }
    to_next(sequence, place);
    test(sequence);
  }

  // Ends the path, with this token unless it is -1.
  void finish(Sequence& sequence, int64_t token) const {
    const int64_t b = sequence.b, first = b * (params_.depth + 1);
    const int64_t accepted = static_cast<int64_t>(sequence.places.size()) - 1;
    for (int64_t i = 0; i < accepted; ++i) {
      const int64_t node = sequence.places[i + 1].read.j - 1;
      params_.path[first + i] = node;
      params_.tokens[first + i] = token_of(b, node);
    }
    params_.tokens[first + accepted] = token;
    params_.num_accepted[b] = static_cast<int32_t>(accepted);
    params_.num_emitted[b] = static_cast<int32_t>(accepted + (token >= 0));
    for (const Place& place : sequence.places) params_.status[b] |= place.read.flags;
    sequence.want = Sequence::kNothing;
  }

  // The joint ratio of the path to the present child.
  float ratio_of(Place& place) const {
    const int64_t x = token_of(place.read.sequence, place.child);
    const bool rejected = std::find(place.rejected.begin(), place.rejected.end(), x) != place.rejected.end();
    const float log_q = rejected ? -INFINITY : place.read.q.log_probability(x);
    if (log_q == -INFINITY) {
      place.read.flags |= kDraftZeroProbability;
      return 0.0f;
    }
    const float log_p = log_probability(logit_at(place.read.p_row, x), place.read.p.distribution());
    return child_ratio(place.siblings, log_p, log_q);
  }

  // Takes a token away from q.
  void remove(Place& place, int64_t x) const {
    place.rejected.push_back(x);
    int64_t column = x;
    if (const int64_t* ids = params_.d2t) {
      const int64_t* end = ids + params_.draft.vocabulary;
      const int64_t* id = std::lower_bound(ids, end, x);
      if (id == end || *id != x) return;
      column = id - ids;
    }
    auto at = std::lower_bound(place.rest.begin(), place.rest.end(), column,
                               [](const Patch& patch, int64_t token) { return patch.token < token; });
    if (at == place.rest.end() || at->token != column) at = place.rest.insert(at, Patch{column, 0.0f});
    at->logit = -INFINITY;
  }

  // What is left of q. It is summed over the tokens that are left, since a difference from 1 would lose its digits: of
  // the blocks that lost a token, over these again.
  float left_of(const Place& place) const {
    const Distribution q = place.q.distribution();
    Row row = place.read.q.row;
    set_patches(row, place.rest);
    float left = 0.0f;
    auto patch = place.rest.begin();
    for (int64_t block = 0; block < row.num_blocks(); ++block) {
      const BlockStats& stats = place.q.blocks[block];
      bool changed = false;
      for (; patch != place.rest.end() && patch->token < (block + 1) * kBlock; ++patch) {
        changed |= patch->logit == -INFINITY;
      }
      const float sum =
          changed ? block_kernels().sum_above(row, block, stats.max, q.inverse_temperature, q.cutoff) : stats.sum;
      left += sum * probability(stats.max, q.inverse_temperature, q.lse);
    }
    return left;
  }

  // Goes on from the present child to the first that is a candidate; false if there is none.
  bool to_candidate(const Sequence& sequence, Place& place) const {
    place.child = candidate_from(sequence, place.child, &place.read.flags);
    return place.child >= 0;
  }

  void to_next(const Sequence& sequence, Place& place) const { place.child = sequence.tree.next_sibling(place.child); }

  bool has_candidates(const Sequence& sequence, int64_t row) const {
    int32_t flags = 0;
    return candidate_from(sequence, sequence.tree.first_child(row), &flags) >= 0;
  }

  int64_t candidate_from(const Sequence& sequence, int64_t child, int32_t* flags) const {
    for (; child >= 0; child = sequence.tree.next_sibling(child)) {
      const int64_t x = token_of(sequence.b, child);
      if (x >= 0 && x < params_.vocabulary) break;
      if (x != -1) *flags |= kDraftOutOfRange;
    }
    return child;
  }

  int64_t token_of(int64_t b, int64_t node) const { return params_.node_tokens[b * params_.nodes + node]; }

  Noise noise_of(int64_t b, int64_t offset) const {
    return {static_cast<uint64_t>(params_.seed[b]), static_cast<uint32_t>(params_.position[b]),
            static_cast<uint32_t>(offset)};
  }

  float uniform_at(int64_t b, int64_t node) const {  // u in (0, 1), which tests a node
    const Noise noise = noise_of(b, node);
    return uniform(philox(noise.seed, 0, noise.position, noise.offset, kAccept).word[0]);
  }

  const VerifyTreeParams& params_;
  const bool joint_;
  std::deque<StatsOfRows> stats_;  // of all rows that were read
};

}  // namespace

void verify_tree(const VerifyTreeParams& params) {
  const int64_t slots = params.batch * (params.depth + 1);
  std::fill_n(params.path, slots, int64_t{-1});
  std::fill_n(params.tokens, slots, int64_t{-1});
  std::fill_n(params.num_accepted, params.batch, 0);
  std::fill_n(params.num_emitted, params.batch, 0);
  std::fill_n(params.status, params.batch, 0);
  for (int64_t first = 0; first < params.batch; first += kSequencesAtOnce) {
    Verifying(params).run(first, std::min(kSequencesAtOnce, params.batch - first));
  }
}

}  // namespace specdec::cpu
