#include "sampling.h"

#include <algorithm>

namespace specdec::cpu {
namespace {

struct Entry {
  int64_t token;
  float bias;
  bool in_prompt;
  int32_t count;
  bool banned;
};

// The entry of a token in the ascending list; it is inserted if it is missing.
Entry& entry_of(std::vector<Entry>& entries, int64_t token) {
  auto at = std::lower_bound(entries.begin(), entries.end(), token,
                             [](const Entry& entry, int64_t t) { return entry.token < t; });
  if (at == entries.end() || at->token != token) at = entries.insert(at, Entry{token, 0.0f, false, 0, false});
  return *at;
}

}  // namespace

RowTask task_of(const SamplingArguments& sampling, int64_t b, Row row) {
  RowTask task;
  task.row = row;
  task.temperature = sampling.temperature[b];
  if (sampling.filters != nullptr) {
    task.top_k = sampling.filters[3 * b], task.top_p = sampling.filters[3 * b + 1],
    task.min_p = sampling.filters[3 * b + 2];
  }
  return task;
}

std::vector<Patch> patches_of(const SamplingArguments& sampling, int64_t b, Row row, const int64_t* ids,
                              int64_t position, const int64_t* drafts, int64_t num_drafts) {
  if (!sampling.has_table) return {};
  const int64_t vocabulary = ids == nullptr ? row.size : ids[row.size - 1] + 1;
  std::vector<Entry> entries;
  entries.reserve(sampling.table_size + num_drafts + sampling.num_ends);
  for (int64_t i = b * sampling.table_size; i < (b + 1) * sampling.table_size && sampling.table_ids[i] < vocabulary;
       ++i) {
    entries.push_back(
        {sampling.table_ids[i], sampling.table_bias[i], sampling.table_in_prompt[i], sampling.table_count[i], false});
  }
  for (int64_t i = 0; i < num_drafts; ++i) {
    if (drafts[i] >= 0 && drafts[i] < vocabulary) entry_of(entries, drafts[i]).count += 1;
  }
  for (int64_t i = 0; i < sampling.num_ends && position + num_drafts < sampling.first_end[b]; ++i) {
    const int64_t end = sampling.ends[b * sampling.num_ends + i];
    if (end >= 0 && end < vocabulary) entry_of(entries, end).banned = true;
  }
  Penalties penalties = {1.0f, 0.0f, 0.0f};
  if (sampling.penalties != nullptr)
    penalties = {sampling.penalties[3 * b], sampling.penalties[3 * b + 1], sampling.penalties[3 * b + 2]};
  std::vector<Patch> patches;
  patches.reserve(entries.size());
  const int64_t* id = ids;
  for (const Entry& entry : entries) {
    int64_t token = entry.token;
    if (ids != nullptr) {
      id = std::lower_bound(id, ids + row.size, token);
      if (*id != token) continue;
      token = id - ids;
    }
    const float logit = adjust(logit_at(row, token), entry.bias, entry.in_prompt, entry.count, penalties);
    patches.push_back({token, entry.banned ? -INFINITY : logit});
  }
  return patches;
}

void set_patches(Row& row, const std::vector<Patch>& patches) {
  row.patches = patches.data();
  row.num_patches = static_cast<int64_t>(patches.size());
}

}  // namespace specdec::cpu
