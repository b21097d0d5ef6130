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

RowTask LawParams::task(int64_t b, Row row) const {
  RowTask task;
  task.row = row;
  task.temperature = temperature[b];
  if (filters != nullptr) {
    task.top_k = filters[3 * b], task.top_p = filters[3 * b + 1], task.min_p = filters[3 * b + 2];
  }
  return task;
}

std::vector<Patch> LawParams::patches(int64_t b, Row row, const int64_t* ids, int64_t position, const int64_t* drafts,
                                      int64_t num_drafts) const {
  if (!has_table) return {};
  const int64_t vocabulary = ids == nullptr ? row.size : ids[row.size - 1] + 1;
  std::vector<Entry> entries;
  entries.reserve(table_size + num_drafts + num_ends);
  for (int64_t i = b * table_size; i < (b + 1) * table_size && table_ids[i] < vocabulary; ++i) {
    entries.push_back({table_ids[i], table_bias[i], table_in_prompt[i], table_count[i], false});
  }
  for (int64_t i = 0; i < num_drafts; ++i) {
    if (drafts[i] >= 0 && drafts[i] < vocabulary) entry_of(entries, drafts[i]).count += 1;
  }
  for (int64_t i = 0; i < num_ends && position + num_drafts < first_end[b]; ++i) {
    if (ends[i] >= 0 && ends[i] < vocabulary) entry_of(entries, ends[i]).banned = true;
  }
  Penalties of_sequence = {1.0f, 0.0f, 0.0f};
  if (penalties != nullptr) of_sequence = {penalties[3 * b], penalties[3 * b + 1], penalties[3 * b + 2]};
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
