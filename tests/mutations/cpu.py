"""Mutations of the CPU backend: the mathematics in csrc/core and the operations in csrc/cpu."""

from .mutation import Mutation, mutations

PARITY = "tests/kernels/test_parity.py -k cpu"
RACES = "tests/kernels/test_parity.py -k races_by_words"
BLOCK = "tests/kernels/test_parity.py -k 'cpu and block'"
CORNERS = "tests/kernels/test_corners.py tests/kernels/test_faults.py -k cpu"
FAULTS = "tests/kernels/test_faults.py tests/kernels/test_corners.py -k cpu"
FILTERS = "tests/kernels/test_filters.py tests/kernels/test_parity.py -k cpu"
SAMPLED = "tests/kernels/test_filters.py -k 'sample or flat_and_peaked or drafts_for_itself'"
SURE = "tests/kernels/test_sure_drafts.py"
PENALTIES = "tests/kernels/test_penalties.py tests/kernels/test_parity.py -k cpu"
INSTRUCTION_SETS = "tests/kernels/test_instruction_sets.py"
NOISE = "tests/kernels/test_extreme_noise.py tests/kernels/test_parity.py -k cpu"

MUTATIONS: list[Mutation] = [
    *mutations(
        "csrc/cpu/verification.cpp",
        PARITY,
        {
            "noise-keyed-by-position-alone": (
                "static_cast<uint32_t>(params.position[b]), static_cast<uint32_t>(j)}",
                "static_cast<uint32_t>(params.position[b] + j), 0}",
            ),
            "batch-row-as-seed": (
                "{static_cast<uint64_t>(params.seed[b]), static_cast<uint32_t>(params.position[b]), ",
                "{static_cast<uint64_t>(b), static_cast<uint32_t>(params.position[b]), ",
            ),
            "acceptance-shares-noise-with-recovery": ("n.offset, kAccept)", "n.offset, kRecoverBlock)"),
            "bonus-from-the-wrong-row": (
                "row.p_row = row_at(params.target, b, j);",
                "row.p_row = row_at(params.target, b, j == rows_ - 1 && j > 0 ? j - 1 : j);",
            ),
            "q-from-the-wrong-row": (
                "return {row_at(params.draft, b, j), distribution",
                "return {row_at(params.draft, b, j > 0 ? j - 1 : j), distribution",
            ),
            "q-before-the-filter": (
                "if (q_stats != nullptr) row.q.distribution = q_stats->distribution();",
                "if (q_stats != nullptr) row.q.distribution = {q_stats->inverse_temperature, q_stats->lse, -INFINITY};",
            ),
            "handed-over-q-before-the-filter": (", distribution.cutoff = params.draft_cutoff[at];", ";"),
            "residual-subtracts-only-the-draft": (
                "row.log_q_x = row.q.log_probability(row.draft);",
                "row.log_q_x = row.q.log_probability(row.draft);\n"
                "  const int64_t here = row.sequence * params.num_drafts_max + row.j;\n"
                "  row.q = {{}, {}, params.draft_tokens + here, &kCertain, 1};",
            ),
            "penalties-see-one-draft-less": (
                "row.p_patches = patches_of(params.sampling, b, row.p_row, nullptr, position, drafts, j);",
                "row.p_patches = patches_of(params.sampling, b, row.p_row, nullptr, position, drafts, j > 0 ? j - 1 : 0);",
            ),
            "q-without-penalties": ("    set_patches(row.q.row, row.q_patches);\n", ""),
            "ragged-batch-ignored": (
                "if (j >= (params.num_drafts == nullptr ? k : std::min(params.num_drafts[b], k))) return -1;",
                "if (j >= k) return -1;",
            ),
            "draft-token-in-32-bits": (
                "const int64_t x = params.draft_tokens[b * k + j];",
                "const int32_t x = static_cast<int32_t>(params.draft_tokens[b * k + j]);",
                CORNERS,
            ),
            "draft-token-V-is-a-token": (
                "if (x >= 0 && x < params.vocabulary) return x;",
                "if (x >= 0) return x;",
                CORNERS,
            ),
            "draft-fault-unseen": (
                "row.q.distribution.lse);\n    if (fault != 0) {",
                "row.q.distribution.lse);\n    if (fault == kTargetNan) {",
                FAULTS,
            ),
            "raw-log-probs-after-penalties": ("logit_at(row.p_row.raw(), token)", "logit_at(row.p_row, token)"),
        },
    ),
    *mutations(
        "csrc/cpu/verify_token.cpp",
        PARITY,
        {
            "first-rejection-ignored": (
                "  return Outcome::kFinished;\n}\n\n}  // namespace",
                "  return Outcome::kKept;\n}\n\n}  // namespace",
            ),
            "greedy-bonus-is-drawn": (
                "  if (row.greedy()) {",
                "  if (row.greedy() && row.draft >= 0) {",
                CORNERS,
            ),
            "zero-q-accepted": ("if (row.log_q_x == -INFINITY || !accept(", "if (!accept(", CORNERS),
            "rejection-draws-from-p": (
                "verification.finish(row, verification.draw_residual(residual));",
                "verification.finish(row, verification.draw_target(row));",
            ),
            "no-mass-ends-the-step": (
                "    return Outcome::kKept;\n  } else {\n    verification.finish(",
                "    return Outcome::kFinished;\n  } else {\n    verification.finish(",
                CORNERS,
            ),
        },
    ),
    *mutations(
        "csrc/cpu/sure_drafts.cpp",
        SURE,
        {
            "least-p-from-the-least-weight": (
                "{log_weight - stats.lse - margin,",
                "{log_weight - stats.lse - log_top_p - margin,",
            ),
            "largest-q-from-all-weight": (
                "log_weight - stats.lse - log_top_p + margin}",
                "log_weight - stats.lse + margin}",
            ),
            "sure-though-not-kept": ("  if (!kept) return {};\n", ""),
            "kept-by-all-weight": ("< stats.lse + log_top_p;", "< stats.lse;"),
            "sure-though-q-is-zero": ("return most > -INFINITY && accept(", "return accept("),
            "sure-in-spite-of-top-k": ("task.top_k == 0.0f && ", ""),
            "sure-ones-are-not-emitted": ("      keep(rows[i]);\n", ""),
        },
    ),
    *mutations(
        "csrc/cpu/linear.cpp",
        "tests/kernels/test_linear.py",
        {
            "linear-forgets-the-last-inputs": ("sizeof(float); rest > 0)", "sizeof(float); rest > 1024)"),
            "linear-adds-the-lower-halves-twice": ("halves<kWidth, kGroup, 1>", "halves<kWidth, kGroup, 0>"),
            "linear-adds-the-first-bias": ("sum + params.bias[o]", "sum + params.bias[0]"),
            "linear-order-depends-on-the-rows": (
                "outputs_of<kWidth, 5, 2>(params",
                "outputs_of<kWidth / 2, 5, 2>(params",
            ),
            "linear-leaves-out-the-last-outputs": ("for (; output < end; ++output)", "for (; false; ++output)"),
            "linear-takes-the-first-part-again": (
                "const int64_t row = part * params.rows / parts,",
                "const int64_t row = 0 * part,",
            ),
        },
    ),
    *mutations(
        "csrc/module.cpp",
        "tests/kernels/test_linear.py",
        {
            "linear-leaves-the-last-of-few-rows-to-torch": ("rows > *most_rows", "rows >= *most_rows"),
            "linear-forgets-torchs-bias": ("from(weight), from(bias)}", "from(weight), from(std::optional<Tensor>())}"),
        },
    ),
    *mutations(
        "csrc/cpu/verify_block.cpp",
        BLOCK,
        {
            "block-with-the-token-residual": (
                "{&sequence->row(), sequence->w[sequence->length]}",
                "{&sequence->row(), 1.0f}",
            ),
            "block-stops-at-the-first-refusal": (
                "if (may_go_on(verification, sequence))",
                "if (verification.uniform_at(sequence.b, j) < sequence.w.back())",
            ),
            "block-tests-with-the-next-number": (
                "verification.uniform_at(sequence.b, sequence.length - 1) <\n        keep",
                "verification.uniform_at(sequence.b, sequence.length) <\n        keep",
            ),
            "block-forgets-the-joint-ratio": (
                "joint_ratio(sequence.w.back(), row.log_p_x",
                "joint_ratio(1.0f, row.log_p_x",
            ),
            "block-shortest-prefix": ("    --sequence.length;\n    shorten(", "    sequence.length = 0;\n    shorten("),
        },
    ),
    *mutations(
        "csrc/cpu/draft_step.cpp",
        PARITY,
        {
            "draft-and-recovery-share-noise": (
                "noise, kDraftBlock, kDraftToken)",
                "noise, kRecoverBlock, kRecoverToken)",
            ),
            "coupled-draft-noise-of-the-first-position": (
                "noise = {noise.seed, noise.position + noise.offset, 0};",
                "noise = {noise.seed, noise.position, 0};",
            ),
            "coupled-noise-by-draft-ids": (
                "draw_coupled(row, stats, params_.d2t, noise)",
                "draw_coupled(row, stats, nullptr, noise)",
            ),
            "unlikely-draft-withdrawn": (
                "write(b, token, log_probability(logit_at(row, token), stats.distribution()), stats.cutoff, stats.lse);",
                "const float log_q = log_probability(logit_at(row, token), stats.distribution());\n"
                "    write(b, log_q < -4.0f ? -1 : token, log_q, stats.cutoff, stats.lse);",
            ),
            "compact-q-not-renormalised": (
                "stats.max * stats.inverse_temperature + logf(sum),\n",
                "stats.lse,\n",
            ),
            "compact-q-in-draft-ids": (
                "params_.compact + slot] = target_id(token);",
                "params_.compact + slot] = token;",
            ),
        },
    ),
    *mutations(
        "csrc/cpu/sampling.cpp",
        PENALTIES,
        {
            "drafts-not-counted": ("entry_of(entries, drafts[i]).count += 1;", "entry_of(entries, drafts[i]);"),
            "ends-allowed-one-too-late": (
                "position + num_drafts < sampling.first_end[b]",
                "position + num_drafts <= sampling.first_end[b]",
            ),
            "ends-of-the-first-row": (
                "position + num_drafts < sampling.first_end[b]",
                "position < sampling.first_end[b]",
            ),
            "ends-of-the-first-sequence": ("sampling.ends[b * sampling.num_ends + i]", "sampling.ends[i]"),
            "table-of-the-first-sequence": (
                "int64_t i = b * sampling.table_size; i < (b + 1) * sampling.table_size",
                "int64_t i = 0; i < sampling.table_size",
            ),
        },
    ),
    *mutations(
        "csrc/cpu/row_stats.cpp",
        FILTERS,
        {
            "compact-takes-the-last-of-a-tie": (
                "at.begin(), at.begin() + ties",
                "at.end() - ties, at.end()",
                PARITY,
            ),
            "top-p-before-top-k": (
                "nucleus_cutoff(row, cutoff, task.top_p)",
                "nucleus_cutoff(row, -INFINITY, task.top_p)",
            ),
            "top-p-before-temperature": (
                "{task.row, stats.max, stats.inverse_temperature, ",
                "{task.row, stats.max, 1.0f, ",
            ),
            "top-k-one-more": ("static_cast<int64_t>(task.top_k))", "static_cast<int64_t>(task.top_k) + 1)"),
            "lowest-cutoff-wins": (
                "cutoff = std::max(cutoff, min_p_cutoff(stats->max, task.temperature, task.min_p));",
                "cutoff = min_p_cutoff(stats->max, task.temperature, task.min_p);",
            ),
            "lse-before-the-filter": (
                "blocks_[i].max, stats.inverse_temperature, stats.cutoff)\n                 : 0.0f;",
                "blocks_[i].max, stats.inverse_temperature, -INFINITY)\n                 : 0.0f;",
            ),
            "min-p-above-the-bracket": (
                "task.weighed && stats.cutoff <= searches[r].bracket.high)",
                "task.weighed)",
                SAMPLED,
            ),
            "nan-in-another-block-unseen": ("return nan ? NAN : max;", "return max;", FAULTS),
            "coupled-race-skips-blocks": ("* 0x1.01p33f < least", "* 0x1.01p3f < least", PARITY),
            "race-without-the-block-of-the-maximum": ("add_block(nearest, 0.0f, near);", "", PARITY),
            "race-ranges-know-one-arrival": (
                "static_cast<int64_t>(near.size()) == count ? near.back().score : 0.0f;",
                "near.empty() ? 0.0f : near.front().score;",
                "tests/kernels/test_trees.py -k parity",
            ),
            "greedy-takes-the-last-block": (
                "return block_kernels().find(row, block_of_max(stats), stats.max);",
                "int64_t block = row.num_blocks() - 1;\n  while (stats.blocks[block].max != stats.max) --block;\n"
                "  return block_kernels().find(row, block, stats.max);",
                CORNERS,
            ),
        },
    ),
    *mutations(
        "csrc/cpu/select.cpp",
        FILTERS,
        {
            "top-p-passes-the-mass-by": (
                "if (above + sums[bin] >= wanted) break;",
                "if (above + sums[bin] > wanted) break;",
            )
        },
    ),
    *mutations(
        "csrc/cpu/nucleus.cpp",
        SAMPLED,
        {
            "bracket-below-the-cutoff-unnoticed": ("  if (!(above < wanted)) return {};\n", ""),
            "bracket-above-the-cutoff-unnoticed": ("  if (total_weight(inside) < wanted) return {};\n", ""),
            "one-value-below-the-cutoff-unnoticed": (
                "row.inverse_temperature)} < wanted) return {};",
                "1.0f)} < 0.0) return {};",
            ),
            "incomplete-lists-are-taken": ("  if (!complete || count == 0) return {};", "  if (count == 0) return {};"),
            "kept-sum-with-all-of-the-bracket": (
                "sum_above(inside, 0, max, row.inverse_temperature, cutoff)",
                "sum_above(inside, 0, max, row.inverse_temperature, bracket.low)",
            ),
            "kept-sum-without-the-one-value": (
                "sum = split.above + split.count * weight(",
                "sum = split.above + 0.0f * weight(",
            ),
        },
    ),
    *mutations(
        "csrc/cpu/block_nucleus.h",
        SAMPLED,
        {
            "upper-end-counted-twice": (
                "each > bracket.high ? above[lane] + w",
                "each >= bracket.high ? above[lane] + w",
            ),
            "list-without-its-second-lanes": (
                "inside[lane] | uint64_t{inside[lane + 1]} << 32;",
                "inside[lane] | uint64_t{0 * inside[lane + 1]} << 32;",
            ),
            "at-most-four-of-two-lanes": ("while (count < end) {", "if (count < end) {"),
        },
    ),
    *mutations(
        "csrc/cpu/load.h",
        PARITY,
        {
            "token-V-at-a-ragged-tail": (
                "for (int64_t i = n; i < padded; ++i) x[i] = -INFINITY;",
                "for (int64_t i = n; i < padded; ++i) x[i] = 0.0f;",
            ),
            "penalty-lost-at-a-blocks-end": (
                "|| p->token >= begin + n) {",
                "|| p->token >= begin + n - 1) {",
                PENALTIES,
            ),
        },
    ),
    *mutations(
        "csrc/cpu/block_sums.h",
        PARITY,
        {
            "tie-dropped-from-the-draw": (
                "w[i] = x[i] >= cutoff ? each : 0.0f;",
                "w[i] = x[i] > cutoff ? each : 0.0f;",
                FILTERS,
            ),
            "nan-argmax": (
                "return any_nan(x, n) ? NAN : max_of_numbers(best);",
                "return max_of_numbers(best);",
                FAULTS,
            ),
            "residual-not-subtracted": (
                "weights[i] = residual(weights[i], probability(x[i], q.distribution));",
                "weights[i] = residual(weights[i], 0.0f * probability(x[i], q.distribution));",
            ),
            "exponent-clamped-too-low": (
                "lowest = kLowestExponent + 0.0f * scale;",
                "lowest = kLowestExponent - 9.0f + 0.0f * scale;",
                INSTRUCTION_SETS,
            ),
            "four-lanes-not-summed": ("i < 8; ++i) sum[i] += sum[i + 8];", "i < 4; ++i) sum[i] += sum[i + 8];"),
        },
    ),
    *mutations(
        "specdec_kernels/backends/native.py",
        INSTRUCTION_SETS,
        {
            "instruction-set-ignored": ("        extension.use_instruction_set(asked)\n", ""),
            "unknown-instruction-set-ignored": ("if asked not in has:", "if not has:"),
            "ptx-for-its-own-family-only": (
                "(name != version or capability[0] == built[0])",
                "capability[0] == built[0]",
                "tests/kernels/test_imports.py",
            ),
            "machine-code-for-later-families": (
                "(name != version or capability[0] == built[0])",
                "True",
                "tests/kernels/test_imports.py",
            ),
            "architecture-letter-ignored": ("(later and not exact)", "later", "tests/kernels/test_imports.py"),
        },
    ),
    *mutations(
        "csrc/cpu/block_bins.h",
        FILTERS,
        {
            "selection-reads-one-lane-less": (
                "sums[Bins::kCopies * bin[i] + i % Bins::kCopies] += size[i];",
                "sums[Bins::kCopies * bin[i] + i % Bins::kCopies] += i == kLanes - 1 ? 0.0f : size[i];",
            ),
            "range-without-its-upper-end": (
                "return (x >= bins.low) & (x <= bins.high);",
                "return (x >= bins.low) & (x < bins.high);",
            ),
        },
    ),
    *mutations(
        "csrc/cpu/block_draws.h",
        PARITY,
        {
            "blocks-share-their-noise": (
                "exponentials(philox_words, block * kBlock, n, noise, stream, e);",
                "exponentials(philox_words, 0, n, noise, stream, e);",
            ),
            "race-limit-too-small": ("* 0x1.0001p32f / least;", "* 0x1p30f / least;"),
            "race-keeps-what-filters-drop": (
                "const float w = x >= race.cutoff ?",
                "const float w = x >= -INFINITY ?",
                RACES,
            ),
        },
    ),
    *mutations(
        "csrc/cpu/block_noise.h",
        PARITY,
        {
            "words-of-calls-out-of-order": ("lane / 2 + lane % 2 * (kCalls / 2)", "lane"),
            "group-of-words-kept-too-long": (
                "if (ids[i] / kGroup != group) {",
                "if (group < 0 || ids[i] / kGroup > group + 1) {",
            ),
            "group-of-words-begins-at-its-first-token": (
                "philox_words(group * kGroup, kGroup",
                "philox_words(ids[i] / kLanes * kLanes, kGroup",
                RACES,
            ),
        },
    ),
    *mutations(
        "csrc/core/params.h",
        CORNERS,
        {
            "row-offset-in-32-bits": ("b * sequence_stride", "static_cast<int32_t>(b * sequence_stride)"),
        },
    ),
    *mutations(
        "csrc/core/accept.h",
        PARITY,
        {
            "ratio-inverted": ("return expf(log_p - log_q);", "return expf(log_q - log_p);"),
            "certain-acceptance-only": (
                "return u < ratio(log_p, log_q);",
                "return ratio(log_p, log_q) >= 1.0f + 0.0f * u;",
            ),
            "joint-ratio-beyond-one": ("return longer < 1.0f ? longer : 1.0f;", "return longer;"),
            "keep-probability-of-the-token-rule": (
                "const float either = mass + (1.0f - w);",
                "const float either = mass + 1.0f - 0.0f * w;",
            ),
        },
    ),
    *mutations(
        "csrc/core/distribution.h",
        PENALTIES,
        {
            "penalties-are-contracted": (
                "rounded_product(penalties.frequency, static_cast<float>(count))",
                "penalties.frequency * static_cast<float>(count)",
                "tests/kernels/test_contraction.py::test_a_host_with_fused_operations",
            ),
            "repetition-penalty-inverted": (
                "x < 0.0f ? rounded_product(x, penalties.repetition) : x / penalties.repetition",
                "x < 0.0f ? x / penalties.repetition : rounded_product(x, penalties.repetition)",
            ),
            "repetition-penalty-ignores-the-sign": (
                "x < 0.0f ? rounded_product(x, penalties.repetition) : x / penalties.repetition",
                "x / penalties.repetition",
            ),
            "presence-counts-the-prompt": (
                "if (count > 0) x = x - penalties.presence",
                "if (in_prompt || count > 0) x = x - penalties.presence",
            ),
            "tie-dropped-from-p": (
                "return logit >= distribution.cutoff ? p : 0.0f;",
                "return logit > distribution.cutoff ? p : 0.0f;",
                PARITY,
            ),
            "tie-dropped-from-log-p": (
                "return logit >= distribution.cutoff ? log_probability",
                "return logit > distribution.cutoff ? log_probability",
                FILTERS,
            ),
            "zeros-have-two-keys": (
                "return 0x80000000u + ((magnitude ^ negative) - negative);",
                "return bits ^ (negative | 0x80000000u);",
                FILTERS,
            ),
            "min-p-before-temperature": (
                "return max + temperature * logf(min_p);",
                "return max + 0.0f * temperature + logf(min_p);",
                FILTERS,
            ),
        },
    ),
    *mutations(
        "csrc/core/random.h",
        NOISE,
        {
            "u-may-be-one": ("return u < 1.0f - 0x1p-24f ? u : 1.0f - 0x1p-24f;", "return u;"),
            "u-may-be-zero": ("(static_cast<float>(bits) + 0.5f) * 0x1p-32f", "static_cast<float>(bits) * 0x1p-32f"),
            "u-of-24-bits": (
                "(static_cast<float>(bits) + 0.5f) * 0x1p-32f",
                "(static_cast<float>(bits >> 8) + 0.5f) * 0x1p-24f",
            ),
            "seed-in-32-bits": ("k1 = static_cast<uint32_t>(seed >> 32);", "k1 = 0;"),
            "nine-rounds": ("round < 10", "round < 9"),
        },
    ),
]
