// Rule `coupled` (Daliri et al., arXiv 2408.07978): each position has its own noise, with which p's race is run. A
// draft is accepted iff it wins.
#include "../common/parallel.h"
#include "verification.h"

namespace specdec::cpu {

void verify_coupled(Verification& verification, std::vector<int64_t> walking) {
  for (int64_t j = 0; !walking.empty(); ++j) {
    const std::vector<VerifiedRow> rows = verification.read(walking, j);
    const int64_t n = static_cast<int64_t>(rows.size());
    std::vector<uint8_t> kept(n, 0);
    parallel_for(n, 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const VerifiedRow& row = rows[i];
        int64_t winner = -1;
        if (!row.faulty) winner = row.greedy() ? argmax(row.p_row, row.p) : verification.draw_race(row);
        kept[i] = winner >= 0 && winner == row.draft;
        if (kept[i])
          verification.keep(row);
        else
          verification.finish(row, winner);
      }
    });
    walking.clear();
    for (int64_t i = 0; i < n; ++i) {
      if (kept[i]) walking.push_back(rows[i].sequence);
    }
  }
}

}  // namespace specdec::cpu
