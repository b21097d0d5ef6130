#include "sequence_law.h"

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

// The entry of a token, made where there is none. Entries ascend.
Entry& entry_of(std::vector<Entry>& entries, int64_t token) {
  auto at = std::lower_bound(entries.begin(), entries.end(), token,
                             [](const Entry& entry, int64_t t) { return entry.token < t; });
  if (at == entries.end() || at->token != token) at = entries.insert(at, Entry{token, 0.0f, false, 0, false});
  return *at;
}

}  // namespace

RowTask task_of(const LawParams& law, int64_t b, Row row) {
  RowTask task;
  task.row = row;
  task.temperature = law.temperature[b];
  if (law.filters != nullptr) {
    task.top_k = law.filters[3 * b], task.top_p = law.filters[3 * b + 1], task.min_p = law.filters[3 * b + 2];
  }
  return task;
}

std::vector<Patch> patches_of(const LawParams& law, int64_t b, Row row, const int64_t* ids, int64_t position,
                              const int64_t* drafts, int64_t num_drafts) {
  if (!law.has_table) return {};
  const int64_t vocabulary = ids == nullptr ? row.size : ids[row.size - 1] + 1;
  std::vector<Entry> entries;
  entries.reserve(law.table_size + num_drafts + law.num_ends);
  for (int64_t i = b * law.table_size; i < (b + 1) * law.table_size && law.table_ids[i] < vocabulary; ++i) {
    entries.push_back({law.table_ids[i], law.table_bias[i], law.table_in_prompt[i], law.table_count[i], false});
  }
  for (int64_t i = 0; i < num_drafts; ++i) {
    if (drafts[i] >= 0 && drafts[i] < vocabulary) entry_of(entries, drafts[i]).count += 1;
  }
  for (int64_t i = 0; i < law.num_ends && position + num_drafts < law.first_end[b]; ++i) {
    if (law.ends[i] >= 0 && law.ends[i] < vocabulary) entry_of(entries, law.ends[i]).banned = true;
  }
  Penalties of_sequence = {1.0f, 0.0f, 0.0f};
  if (law.penalties != nullptr)
    of_sequence = {law.penalties[3 * b], law.penalties[3 * b + 1], law.penalties[3 * b + 2]};
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
    const float logit = adjust(logit_at(row, token), entry.bias, entry.in_prompt, entry.count, of_sequence);
    patches.push_back({token, entry.banned ? -INFINITY : logit});
  }
  return patches;
}

}  // namespace specdec::cpu
