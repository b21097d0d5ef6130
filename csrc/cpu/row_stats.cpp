#include "row_stats.h"

#include <algorithm>
#include <memory>

#include "../common/parallel.h"
#include "nucleus.h"

namespace specdec::cpu {
namespace {

float max_of_blocks(const BlockStats* blocks, int64_t n) {
  float max = -INFINITY;
  bool nan = false;
  for (int64_t b = 0; b < n; ++b) {
    nan |= blocks[b].max != blocks[b].max;
    max = blocks[b].max > max ? blocks[b].max : max;
  }
  return nan ? NAN : max;
}

// Summed in the order of blocks, so the result does not depend on threads.
float lse_of_blocks(const BlockStats* blocks, int64_t n, float max, float inverse_temperature) {
  float sum = 0.0f;
  for (int64_t b = 0; b < n; ++b) sum += blocks[b].sum * weight(blocks[b].max, max, inverse_temperature);
  return lse_of(max, inverse_temperature, sum);
}

// top-p without top-k needs the weights of the whole row; with top-k, only those of the tokens that it keeps.
bool weighs_all(const RowTask& task) {
  return task.filtered() ? task.top_p < 1.0f && task.top_k == 0.0f : task.weighed;
}

bool selects(const RowTask& task) { return task.filtered() || task.likely > 0; }

bool brackets(const RowTask& task) { return task.filtered() && weighs_all(task) && can_be_sampled(task.row); }

// The first pass over a block: its largest logit, its sum if that is needed already, its split if there is a bracket,
// its sum above the mark, and raw statistics while the block is in the cache.
void measure(const RowTask& task, int64_t block, const Bracket* bracket, BlockStats* stats, float* lanes, Split* split,
             BlockStats* above, BlockStats* raw) {
  const BlockKernels& kernel = block_kernels();
  if (bracket != nullptr) {
    *stats = kernel.split(task.row, block, 1.0f / task.temperature, lanes, *bracket, split);
  } else if (task.mark) {
    *stats = kernel.mark(task.row, block, 1.0f / task.temperature, *task.mark, &above->sum);
    above->max = stats->max;
  } else if (task.temperature != 0.0f && weighs_all(task)) {
    *stats = kernel.stats(task.row, block, 1.0f / task.temperature, lanes);
  } else {
    *stats = {kernel.max(task.row, block, lanes), 0.0f};
  }
  if (raw != nullptr) *raw = kernel.stats(task.row.raw(), block, 1.0f, nullptr);
}

// The cutoffs of a row whose largest logit is finite. `nucleus`: that of top-p, if it is known.
void select(const RowTask& task, const SelectionRow& row, std::optional<float> nucleus, RowStats* stats) {
  if (task.likely > 0) stats->likely_cutoff = kth_largest(row, task.likely);
  if (!task.filtered()) return;
  float cutoff = -INFINITY;
  if (task.top_k > 0.0f) cutoff = kth_largest(row, static_cast<int64_t>(task.top_k));
  if (task.top_p < 1.0f && !nucleus) {
    nucleus = weighs_all(task) ? nucleus_cutoff_of_all(row, task.top_p) : nucleus_cutoff(row, cutoff, task.top_p);
  }
  if (nucleus) cutoff = std::max(cutoff, *nucleus);
  if (task.min_p > 0.0f) cutoff = std::max(cutoff, min_p_cutoff(stats->max, task.temperature, task.min_p));
  stats->cutoff = cutoff;
}

// How the cutoff of top-p is searched in a row that can be sampled.
struct Search {
  Bracket bracket;
  bool again = false;   // with another bracket, as the first did not hold the cutoff
  bool summed = false;  // the blocks' sums are those of the kept logits
};

bool finite(float max) { return max - max == 0.0f; }

int64_t block_of_max(const RowStats& stats) {
  int64_t block = 0;
  while (stats.blocks[block].max != stats.max) ++block;
  return block;
}

// Sorts the first `count` to arrive to the front (the lowest token of a tie), and drops the others.
void keep_first(std::vector<Candidate>& arrivals, int64_t count) {
  const int64_t kept = std::min<int64_t>(count, arrivals.size());
  std::partial_sort(arrivals.begin(), arrivals.begin() + kept, arrivals.end(), [](Candidate a, Candidate b) {
    return a.score != b.score ? a.score > b.score : a.token < b.token;
  });
  arrivals.resize(kept);
}

}  // namespace

StatsOfRows::StatsOfRows(const std::vector<RowTask>& tasks) : stats_(tasks.size()) {
  const int64_t rows = static_cast<int64_t>(tasks.size());
  std::vector<int64_t> first(rows + 1, 0);  // row r owns blocks first[r] .. first[r + 1] - 1
  std::vector<int64_t> present;             // the rows that have data
  bool any_selects = false, any_raw = false, any_brackets = false, any_marks = false;
  for (int64_t r = 0; r < rows; ++r) {
    const bool there = tasks[r].row.data != nullptr;
    if (there) present.push_back(r);
    first[r + 1] = first[r] + (there ? tasks[r].row.num_blocks() : 0);
    any_selects |= there && selects(tasks[r]);
    any_brackets |= there && brackets(tasks[r]);
    any_raw |= there && tasks[r].raw;
    any_marks |= there && tasks[r].mark.has_value();
  }
  blocks_.resize(first.back());
  std::vector<float> lanes(any_selects ? first.back() * kLanes : 0);
  std::vector<BlockStats> raw(any_raw ? first.back() : 0), above(any_marks ? first.back() : 0);
  std::vector<Search> searches(rows);
  const std::unique_ptr<Split[]> splits(any_brackets ? new Split[first.back()] : nullptr);
  const auto select_row = [&](int64_t r, int64_t i) {
    const RowTask& task = tasks[r];
    RowStats& stats = stats_[r];
    const SelectionRow row = {task.row, stats.max, stats.inverse_temperature, stats.blocks, &lanes[i * kLanes]};
    std::optional<float> nucleus;
    if (brackets(task)) {
      Search& search = searches[r];
      nucleus = cutoff_in_bracket(row, search.bracket, &splits[i], task.top_p * total_weight(row));
      if (!nucleus && !search.again) {
        search.again = true;
        search.bracket = guess_bracket(row, task.top_p);
        return;
      }
      search.again = false;
    }
    select(task, row, nucleus, &stats);
    if (nucleus && task.weighed && stats.cutoff <= searches[r].bracket.high) {
      sum_kept(row, searches[r].bracket, &splits[i], stats.cutoff, &blocks_[i]);
      searches[r].summed = true;
    }
  };

  // The rows present[from], ..., present[to - 1].
  const auto read_rows = [&](int64_t from, int64_t to) {
    const auto of_blocks = [&](const auto& function) {
      const int64_t before = first[present[from]], end_of_all = first[present[to - 1] + 1];
      parallel_for(end_of_all - before, kGrainBlocks, [&](int64_t begin, int64_t end) {
        int64_t r = present[from];
        for (int64_t i = before + begin; i < before + end; ++i) {
          while (i >= first[r + 1]) ++r;
          function(r, i - first[r], i);
        }
      });
    };
    const auto of_rows = [&](const auto& function) {
      parallel_for(to - from, any_selects ? 1 : to - from, [&](int64_t begin, int64_t end) {
        for (int64_t i = from + begin; i < from + end; ++i) function(present[i], first[present[i]]);
      });
    };
    const auto any_of_rows = [&](const auto& condition) {
      return std::any_of(present.begin() + from, present.begin() + to, condition);
    };
    if (any_brackets) {
      of_rows([&](int64_t r, int64_t) {
        const RowTask& task = tasks[r];
        if (brackets(task)) searches[r].bracket = guess_bracket(task.row, 1.0f / task.temperature, task.top_p);
      });
    }
    of_blocks([&](int64_t r, int64_t block, int64_t i) {
      const RowTask& task = tasks[r];
      const Bracket* bracket = brackets(task) ? &searches[r].bracket : nullptr;
      measure(task, block, bracket, &blocks_[i], selects(task) ? &lanes[i * kLanes] : nullptr,
              bracket != nullptr ? &splits[i] : nullptr, task.mark ? &above[i] : nullptr, task.raw ? &raw[i] : nullptr);
    });
    of_rows([&](int64_t r, int64_t i) {
      const RowTask& task = tasks[r];
      RowStats& stats = stats_[r];
      stats.blocks = &blocks_[i];
      stats.max = stats.lse = max_of_blocks(stats.blocks, task.row.num_blocks());
      if (task.temperature != 0.0f) stats.inverse_temperature = 1.0f / task.temperature;
      if (task.raw) {
        const float max = max_of_blocks(&raw[i], task.row.num_blocks());
        stats.raw_lse = lse_of_blocks(&raw[i], task.row.num_blocks(), max, 1.0f);
      }
      if (task.mark) {
        stats.lse_above = lse_of_blocks(&above[i], task.row.num_blocks(), stats.max, stats.inverse_temperature);
      }
      if (selects(task) && finite(stats.max)) select_row(r, i);
    });
    const auto again = [&](int64_t r) { return searches[r].again; };
    if (any_of_rows(again)) {
      of_blocks([&](int64_t r, int64_t block, int64_t i) {
        if (!again(r)) return;
        if (blocks_[i].max < searches[r].bracket.low) {
          splits[i].above = 0.0f, splits[i].count = 0;
        } else {
          block_kernels().split(tasks[r].row, block, stats_[r].inverse_temperature, nullptr, searches[r].bracket,
                                &splits[i]);
        }
      });
      of_rows([&](int64_t r, int64_t i) {
        if (again(r)) select_row(r, i);
      });
    }
    const auto to_sum = [&](int64_t r) {
      return tasks[r].filtered() && tasks[r].weighed && finite(stats_[r].max) && !searches[r].summed;
    };
    if (any_of_rows(to_sum)) {
      of_blocks([&](int64_t r, int64_t block, int64_t i) {
        const RowTask& task = tasks[r];
        const RowStats& stats = stats_[r];
        if (!to_sum(r)) return;
        const bool kept = blocks_[i].max >= stats.cutoff;
        blocks_[i].sum =
            kept ? block_kernels().sum_above(task.row, block, blocks_[i].max, stats.inverse_temperature, stats.cutoff)
                 : 0.0f;
      });
    }
  };
  const int64_t all = static_cast<int64_t>(present.size());
  // Where rows with brackets divide evenly among the threads, each takes whole rows: it waits for others only once, and
  // finds in its cache what it reads again. Then parallel_for is serial within.
  if (any_brackets && all % num_threads() == 0) {
    parallel_for(all, 1, read_rows);
  } else if (all > 0) {
    read_rows(0, all);
  }
  for (int64_t r = 0; r < rows; ++r) {
    const RowTask& task = tasks[r];
    if (task.row.data == nullptr || task.temperature == 0.0f || !task.weighed) continue;
    RowStats& stats = stats_[r];
    stats.lse = lse_of_blocks(stats.blocks, task.row.num_blocks(), stats.max, stats.inverse_temperature);
  }
}

int64_t argmax(Row row, const RowStats& stats) { return block_kernels().find(row, block_of_max(stats), stats.max); }

std::vector<int64_t> most_likely(Row row, const RowStats& stats, int64_t size) {
  const float cutoff = std::max(stats.cutoff, stats.likely_cutoff);
  std::vector<int64_t> above, at;
  for (int64_t block = 0; block < row.num_blocks(); ++block) {
    if (stats.blocks[block].max < cutoff) continue;
    float x[kBlock];
    const int64_t n = block_kernels().copy(row, block, x);
    for (int64_t i = 0; i < n; ++i) {
      if (!(x[i] >= cutoff) || x[i] == -INFINITY) continue;
      (x[i] > cutoff ? above : at).push_back(block * kBlock + i);
    }
  }
  const int64_t ties = std::min<int64_t>(at.size(), size - above.size());
  above.insert(above.end(), at.begin(), at.begin() + ties);
  std::sort(above.begin(), above.end());
  return above;
}

int64_t draw(Row row, const RowStats& stats, Noise noise, Stream block_stream, Stream token_stream) {
  const BlockKernels& kernel = block_kernels();
  std::vector<float> mass(row.num_blocks());
  for (size_t b = 0; b < mass.size(); ++b) {
    mass[b] = stats.blocks[b].sum * weight(stats.blocks[b].max, stats.max, stats.inverse_temperature);
  }
  const int64_t block = kernel.draw_index(mass.data(), row.num_blocks(), noise, block_stream);
  if (block < 0) return -1;
  return kernel.draw(row, block, stats.blocks[block].max, stats.inverse_temperature, stats.cutoff, noise, token_stream);
}

std::vector<int64_t> first_arrivals(Row row, const RowStats& stats, int64_t count, const int64_t* ids, Noise noise,
                                    Stream stream) {
  const BlockKernels& kernel = block_kernels();
  const Race race = {stats.max, stats.inverse_temperature, stats.cutoff, ids, noise, stream};
  const auto add_block = [&](int64_t block, float least, std::vector<Candidate>& first) {
    const float max = stats.blocks[block].max;
    if (static_cast<int64_t>(first.size()) == count) least = std::max(least, first.back().score);
    // E is at least 2^-33. A block whose largest weight could not arrive even with that needs no random numbers.
    if (max < stats.cutoff || weight(max, stats.max, stats.inverse_temperature) * 0x1.01p33f < least) return;
    Candidate candidates[kBlock];
    const int64_t n = kernel.arrivals(row, block, race, max, least, candidates);
    if (n == 0) return;
    first.insert(first.end(), candidates, candidates + n);
    keep_first(first, count);
  };
  std::vector<std::vector<Candidate>> found(row.num_blocks() + 1);  // of each range of blocks, at its first one
  // First of all the block of the largest logit: what arrives there rules out most others.
  std::vector<Candidate>& near = found.back();
  const int64_t nearest = block_of_max(stats);
  add_block(nearest, 0.0f, near);
  const float least = static_cast<int64_t>(near.size()) == count ? near.back().score : 0.0f;
  parallel_for(row.num_blocks(), kGrainBlocks / 2, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      if (block != nearest) add_block(block, least, found[begin]);
    }
  });
  std::vector<Candidate> all;
  for (const std::vector<Candidate>& each : found) all.insert(all.end(), each.begin(), each.end());
  keep_first(all, count);
  std::vector<int64_t> tokens;
  for (const Candidate& each : all) tokens.push_back(each.token);
  return tokens;
}

int64_t draw_coupled(Row row, const RowStats& stats, const int64_t* ids, Noise noise) {
  const std::vector<int64_t> winner = first_arrivals(row, stats, 1, ids, noise, kRace);
  return winner.empty() ? -1 : winner[0];
}

}  // namespace specdec::cpu
