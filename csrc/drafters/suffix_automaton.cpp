#include "suffix_automaton.h"

#include <stdexcept>

namespace specdec {
namespace {

constexpr int kRecent = 32;  // most links that are followed for each token to update where substrings ended last

uint64_t hash(StateId state, Token token) {
  uint64_t x = (static_cast<uint64_t>(static_cast<uint32_t>(state)) << 32) | static_cast<uint32_t>(token);
  x = (x ^ (x >> 31)) * 0x9E3779B97F4A7C15u;  // a prime near 2^64 divided by the golden ratio
  return x ^ (x >> 29);
}

}  // namespace

SuffixAutomaton::SuffixAutomaton() : slots_(8, kNone) { add_state({kNone, 0, 0, 0, 0, kNone, kNone}); }

StateId SuffixAutomaton::add_state(const State& state) {
  states_.push_back(state);
  return static_cast<StateId>(states_.size() - 1);
}

// Returns where the edge is, or would be.
size_t SuffixAutomaton::slot_of(StateId state, Token token) const {
  const size_t mask = slots_.size() - 1;
  size_t slot = hash(state, token) & mask;
  while (slots_[slot] != kNone && (edges_[slots_[slot]].from != state || edges_[slots_[slot]].token != token)) {
    slot = (slot + 1) & mask;
  }
  return slot;
}

int32_t SuffixAutomaton::edge_of(StateId state, Token token) const { return slots_[slot_of(state, token)]; }

void SuffixAutomaton::grow() {
  slots_.assign(slots_.size() * 2, kNone);
  for (size_t i = 0; i < edges_.size(); ++i) {
    slots_[slot_of(edges_[i].from, edges_[i].token)] = static_cast<int32_t>(i);
  }
}

void SuffixAutomaton::add_edge(StateId from, Token token, StateId to) {
  if (3 * (edges_.size() + 1) > 2 * slots_.size()) grow();
  const int32_t edge = static_cast<int32_t>(edges_.size());
  edges_.push_back({from, token, to, kNone});
  State& state = states_[from];
  if (state.last_edge == kNone) {
    state.first_edge = edge;
  } else {
    edges_[state.last_edge].next = edge;
  }
  state.last_edge = edge;
  slots_[slot_of(from, token)] = edge;
}

void SuffixAutomaton::append(Token token) {
  if (static_cast<int64_t>(tokens_.size()) >= kMostTokens) throw std::length_error("a text has too many tokens");
  // Suffixes that end here become earlier occurrences only now, as a token follows them.
  const int32_t end = static_cast<int32_t>(tokens_.size());
  StateId state = states_[last_].link;
  for (int i = 0; i < kRecent && state > kRoot; ++i, state = states_[state].link) {
    states_[state].last_end = end;
    ++states_[state].count;
  }
  tokens_.push_back(token);
  const StateId added = add_state({kRoot, end + 1, end + 1, end + 1, 1, kNone, kNone});
  state = last_;
  last_ = added;
  // Adds a transition to the suffixes that this token had never followed before.
  int32_t edge = kNone;
  for (; state != kNone && (edge = edge_of(state, token)) == kNone; state = states_[state].link) {
    add_edge(state, token, added);
  }
  if (state == kNone) return;
  const StateId old = edges_[edge].to;
  if (states_[old].length == states_[state].length + 1) {
    states_[added].link = old;
    return;
  }
  // `old` also stands for longer substrings, which do not end here, so the shorter ones get a new state.
  const State whole = states_[old];
  const StateId split =
      add_state({whole.link, states_[state].length + 1, whole.first_end, whole.last_end, whole.count, kNone, kNone});
  for (int32_t i = whole.first_edge; i != kNone; i = edges_[i].next) {
    const Edge copy = edges_[i];
    add_edge(split, copy.token, copy.to);
  }
  states_[added].link = states_[old].link = split;
  for (; state != kNone && (edge = edge_of(state, token)) != kNone && edges_[edge].to == old;
       state = states_[state].link) {
    edges_[edge].to = split;
  }
}

Suffix SuffixAutomaton::shorter(Suffix suffix) const {
  const StateId state = states_[suffix.state].link;
  return state <= kRoot ? Suffix{} : Suffix{state, states_[state].length};
}

Suffix SuffixAutomaton::end_of(Suffix suffix, int64_t most) const {
  while (suffix.length > most) {
    const Suffix next = shorter(suffix);
    if (next.length < most) return {suffix.state, static_cast<int32_t>(most)};
    suffix = next;
  }
  return suffix;
}

Suffix SuffixAutomaton::followed(Suffix suffix, Token token, int32_t limit) const {
  for (;; suffix = shorter(suffix)) {
    const int32_t edge = edge_of(suffix.state, token);
    // A state that was split since is as good: up to the limit, both parts end at the same places.
    if (edge != kNone && states_[edges_[edge].to].first_end <= limit) return {edges_[edge].to, suffix.length + 1};
    if (suffix.state == kRoot) return {};
  }
}

SuffixAutomaton::Votes SuffixAutomaton::votes(Token next) const {
  StateId state = states_[last_].link;
  if (state <= kRoot) return {0, 0};
  while (states_[state].link > kRoot) state = states_[state].link;
  const int32_t edge = edge_of(state, next);
  return {states_[state].count, edge == kNone ? 0 : states_[edges_[edge].to].count};
}

std::vector<Following> SuffixAutomaton::following(StateId state, int32_t limit) const {
  std::vector<Following> found;
  if (state == last_) state = states_[state].link;
  if (state <= kRoot) return found;
  for (int32_t i = states_[state].first_edge; i != kNone; i = edges_[i].next) {
    const Edge& edge = edges_[i];
    if (edge.token >= 0 && states_[edge.to].first_end <= limit) {
      found.push_back({edge.token, edge.to, states_[edge.to].count});
    }
  }
  return found;
}

std::vector<Token> SuffixAutomaton::copied(int64_t start, int64_t count) const {
  std::vector<Token> copy;
  copy.reserve(count);
  const int64_t size = static_cast<int64_t>(tokens_.size());
  for (int64_t i = 0; i < count; ++i) {
    const Token token = start + i < size ? tokens_[start + i] : copy[start + i - size];
    if (token < 0) break;
    copy.push_back(token);
  }
  return copy;
}

}  // namespace specdec
