// A suffix automaton: finds every substring of a growing text, and where it occurred.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace specdec {

using Token = int32_t;  // >= 0; negative ones separate texts, and each of these occurs once
using StateId = int32_t;

// What follows the substrings of a state.
struct Following {
  Token token;
  StateId state;  // of these substrings with the token
  int32_t count;  // how often that occurred
};

// A suffix of a text, and its state.
struct Suffix {
  StateId state = 0;
  int32_t length = 0;  // 0: there is none
};

// Built online (Blumer et al. 1985, "The smallest automaton recognizing the subwords of a text"): amortised O(1) time
// and at most two states and three edges a token, about 0.1 KB in all.
//
// A state stands for all substrings that end at the same places of the text. They are suffixes of each other, with
// lengths from length(link) + 1 to length(state); the state's link leads to the next shorter suffix, which also ends
// elsewhere. The states on the path of links from the last state stand for the suffixes of the whole text, so the
// first link leads to the longest suffix that occurred in the text before.
//
// Two of the places where a state's substrings end are stored. The first one never changes, so it tells whether a
// substring occurred when the text was still shorter. The last one would have to change with every token for every
// suffix of the text. Only 32 links are followed, so that the time stays O(1). Source code has fewer (1.4 on average,
// at most 19 in 63,000 tokens); aaa... has more. How often a state's substrings occurred is counted in the same way.
class SuffixAutomaton {
 public:
  static constexpr StateId kRoot = 0, kNone = -1;
  static constexpr int64_t kMostTokens = int64_t{1} << 28;

  SuffixAutomaton();

  // Throws std::length_error beyond kMostTokens, and std::bad_alloc.
  void append(Token token);

  long long num_tokens() const { return static_cast<long long>(tokens_.size()); }
  long long num_states() const { return static_cast<long long>(states_.size()); }
  long long num_edges() const { return static_cast<long long>(edges_.size()); }

  // The longest suffix of the text that also occurs earlier.
  Suffix longest_earlier() const { return shorter({last_, 0}); }

  // The next shorter suffix, which also occurs elsewhere.
  Suffix shorter(Suffix suffix) const;

  // The last `most` >= 1 tokens of `suffix`, or all of it.
  Suffix end_of(Suffix suffix, int64_t most) const;

  // The longest suffix of another text with `token`, of which `suffix` was the longest one before, that occurs in this
  // text. Of this text only the first `limit` tokens count.
  Suffix followed(Suffix suffix, Token token, int32_t limit) const;

  // How often the last token occurred earlier, and how often `next` followed it there.
  struct Votes {
    int32_t all, agreeing;
  };
  Votes votes(Token next) const;

  // The index of the token after the first occurrence, and after the last one but that at the end of the text. In a
  // periodic text with more than 32 links, it may be one before the last.
  int32_t first_end(StateId state) const { return states_[state].first_end; }
  int32_t last_end(StateId state) const { return states_[state].last_end; }

  // At the end of the text, what follows is what follows its longest earlier suffix, as a text with a period goes on.
  // Only occurrences that end up to `limit` count, and separators are left out.
  std::vector<Following> following(StateId state, int32_t limit) const;

  // Up to `count` tokens from `start` < num_tokens() on, up to a separator. A copy that reaches the end continues with
  // the tokens that it has copied, as in LZ77, so a periodic text is continued periodically.
  std::vector<Token> copied(int64_t start, int64_t count) const;

 private:
  struct State {
    StateId link;
    int32_t length, first_end, last_end, count;
    int32_t first_edge, last_edge;  // in the order in which they were added; kNone: there are none
  };
  struct Edge {
    StateId from;
    Token token;
    StateId to;
    int32_t next;  // of the same state
  };

  StateId add_state(const State& state);
  void add_edge(StateId from, Token token, StateId to);
  int32_t edge_of(StateId state, Token token) const;
  size_t slot_of(StateId state, Token token) const;
  void grow();

  std::vector<Token> tokens_;
  std::vector<State> states_;
  std::vector<Edge> edges_;
  std::vector<int32_t> slots_;  // a hash table of the edges, by state and token; kNone: free
  StateId last_ = kRoot;
};

}  // namespace specdec
