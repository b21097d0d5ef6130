// What the recurrences share: how the tokens of one row follow each other, and what is stored at the end.
#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "../feed.h"
#include "lanes.h"

namespace specdec::cpu {

inline int64_t count_valid(const Feed& feed, int64_t row) {
  const bool* valid = feed.valid + row * feed.columns;
  return std::count(valid, valid + feed.columns, true);
}

// Where a state is: in the layer's own memory, in one of a thread's tiles, from 0 on, or nowhere: no token follows it.
constexpr int kHeld = -1, kNowhere = -2;

// A token that a forward takes into a state.
struct Step {
  int64_t at;  // its inputs: of [state row, place] of a window, or of [row, column] of what is fed
  int parent;  // the step that it follows; -1: it follows what the layer holds
  int place;   // where the state after it goes
  bool fed;    // it is fed, and so read
};

// The tokens that a forward takes into the state of a row: those that the state lacks, then the fed ones. None: the row
// is fed nothing. The state after the last token that stays is held. A tile is free once all that follow had it.
struct Steps {
  std::vector<Step> all;
  int tiles;
  bool from_nothing;

  // `base` is null for a layer without a state.
  void plan(const Feed& feed, const int64_t* base, int64_t row, bool keep) {
    all.clear();
    tiles = 0;
    if (count_valid(feed, row) == 0) return;
    const int64_t held = feed.first_row + row, start = feed.start[row];
    const FedRow stands = fed_row(base ? base[held] : start, start, feed.commit[row], feed.places);
    from_nothing = stands.from_nothing;
    for (int64_t position = stands.begin; position < start; ++position) {
      all.push_back({held * feed.places + position % feed.places, latest(), kNowhere, false});
    }
    of_column_.assign(feed.columns, latest());
    const int before_start = latest();
    for (int64_t column = 0; column < feed.columns; ++column) {
      const int64_t at = row * feed.columns + column;
      if (!feed.valid[at]) continue;
      int parent = latest();
      if (feed.parents) {  // anything that is no earlier column stands for none
        const int64_t above = feed.parents[at];
        parent = above >= 0 && above < column ? of_column_[above] : before_start;
      }
      of_column_[column] = latest() + 1;
      all.push_back({at, parent, kNowhere, true});
    }
    choose_places(keep ? latest() : static_cast<int>(stands.commit - stands.begin) - 1);
  }

 private:
  std::vector<int> of_column_, last_, free_;

  int latest() const { return static_cast<int>(all.size()) - 1; }

  // `kept`: the step whose state stays, or -1.
  void choose_places(int kept) {
    last_.assign(all.size() + 1, -1);  // of those that follow a step; the first is of what is held
    free_.clear();
    for (int i = 0; i <= latest(); ++i) last_[all[i].parent + 1] = i;
    for (int i = 0; i <= latest(); ++i) {
      const int parent = all[i].parent, from = parent < 0 ? kHeld : all[parent].place;
      if (from >= 0 && last_[parent + 1] == i) free_.push_back(from);
      if (i == kept) {
        all[i].place = kHeld;
      } else if (last_[i + 1] >= 0) {
        if (free_.empty()) free_.push_back(tiles++);
        all[i].place = free_.back();
        free_.pop_back();
      }
    }
  }
};

// Calls body(row, part, steps) for the tasks from `begin` to `end`, which are parts of rows that are fed anything.
template <class Body>
SPECDEC_BODY void each_part(const Feed& feed, const int64_t* base, bool keep, int64_t parts, int64_t begin, int64_t end,
                            const Body& body) {
  Steps steps;
  for (int64_t task = begin; task < end; ++task) {
    if (task == begin || task % parts == 0) steps.plan(feed, base, task / parts, keep);
    if (!steps.all.empty()) body(task / parts, task % parts, steps);
  }
}

// Stores the inputs x [rows, columns, numbers] of tokens that may be rolled back in a window [R, places, numbers].
inline void store(const Feed& feed, const float* x, float* window, int64_t numbers) {
  for (int64_t row = 0; row < feed.rows; ++row) {
    int64_t position = feed.start[row], left = count_valid(feed, row);
    for (int64_t column = 0; column < feed.columns; ++column) {
      if (!feed.valid[row * feed.columns + column]) continue;
      if (feed.parents) position = feed.start[row] + column;
      const int64_t place = (feed.first_row + row) * feed.places + position++ % feed.places;
      if (left-- > feed.places) continue;  // another one will be there
      std::memcpy(window + place * numbers, x + (row * feed.columns + column) * numbers, numbers * sizeof(float));
    }
  }
}

// Notes how many tokens the states contain after an operation.
inline void advance(const Feed& feed, int64_t* base, bool keep) {
  for (int64_t row = 0; row < feed.rows; ++row) {
    const int64_t count = count_valid(feed, row), start = feed.start[row];
    if (count == 0) continue;
    int64_t& own = base[feed.first_row + row];
    own = keep ? start + count : fed_row(own, start, feed.commit[row], feed.places).commit;
  }
}

// Zeroes the results [rows, columns, numbers] of the columns that are no tokens.
inline void clear_others(const Feed& feed, float* out, int64_t numbers) {
  for (int64_t column = 0; column < feed.rows * feed.columns; ++column) {
    if (!feed.valid[column]) std::fill_n(out + column * numbers, numbers, 0.0f);
  }
}

// At least so many numbers of a thread's memory, at a cache line's beginning. They are 0 when it grows.
inline float* reserve(std::vector<float>* memory, int64_t numbers) {
  constexpr int64_t kLine = 64 / sizeof(float);
  if (static_cast<int64_t>(memory->size()) < numbers + kLine) memory->assign(numbers + kLine, 0.0f);
  return reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(memory->data()) + 63) / 64 * 64);
}

// Copies the first `count` of kWhole numbers; most often all of them, and then by whole vectors, since a vector cannot
// be read at once from where smaller ones have just been written.
template <int kWhole>
SPECDEC_BODY void copy_first(float* to, const float* from, int64_t count) {
  typedef float Whole __attribute__((vector_size(kWhole * sizeof(float)), aligned(4), may_alias));
  if (count == kWhole) {
    *reinterpret_cast<Whole*>(to) = *reinterpret_cast<const Whole*>(from);
  } else {
    std::memcpy(to, from, count * sizeof(float));
  }
}

// What is read into a farther cache while a thread computes: the states that come next, a line at a time. They need not
// exist.
struct Ahead {
  const float *at, *end;

  SPECDEC_HD void prefetch() {
    if (at >= end) return;
    __builtin_prefetch(at, 0, 2);
    at += 16;
  }
};

constexpr int64_t kGrainNumbers = 16 * 1024;  // of a state, times tokens, are worth a thread

}  // namespace specdec::cpu
