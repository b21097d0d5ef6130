"""Of the kernels for CPUs."""

from .mutation import Mutation, mutations

MUTATIONS: list[Mutation] = [
    *mutations(
        "csrc/cpu/verification.cpp",
        "tests/kernels/test_parity.py -k cpu",
        {
            "noise-keyed-by-position-alone": (
                "static_cast<uint32_t>(params.position[b]), static_cast<uint32_t>(j)}",
                "static_cast<uint32_t>(params.position[b] + j), 0}",
            ),
            "bonus-from-the-wrong-row": (
                "row.p_row = row_at(params.target, b, j);",
                "row.p_row = row_at(params.target, b, j == rows_ - 1 && j > 0 ? j - 1 : j);",
            ),
            "handed-over-q-before-the-filter": (", distribution.cutoff = params.draft_cutoff[at];", ";"),
            "penalties-see-one-draft-less": (
                "row.p_patches = patches_of(params.sampling, b, row.p_row, nullptr, position, drafts, j);",
                "row.p_patches = patches_of(params.sampling, b, row.p_row, nullptr, position, drafts, j > 0 ? j - 1 : 0);",
            ),
            "draft-token-in-32-bits": (
                "const int64_t x = params.draft_tokens[b * k + j];",
                "const int32_t x = static_cast<int32_t>(params.draft_tokens[b * k + j]);",
                "tests/kernels/test_corners.py tests/kernels/test_faults.py -k cpu",
            ),
            "raw-log-probs-after-penalties": ("logit_at(row.p_row.raw(), token)", "logit_at(row.p_row, token)"),
        },
    ),
    *mutations(
        "csrc/cpu/verify_block.cpp",
        "tests/kernels/test_parity.py -k 'cpu and block'",
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
                "joint_ratio(sequence.w.back(), ratio(row.log_p_x",
                "joint_ratio(1.0f, ratio(row.log_p_x",
            ),
            "block-shortest-prefix": ("    --sequence.length;\n    shorten(", "    sequence.length = 0;\n    shorten("),
        },
    ),
    *mutations(
        "csrc/cpu/verify_token.cpp",
        "tests/kernels/test_corners.py tests/kernels/test_faults.py -k cpu",
        {
            "first-rejection-ignored": (
                "  return Outcome::kFinished;\n}\n\n}  // namespace",
                "  return Outcome::kKept;\n}\n\n}  // namespace",
                "tests/kernels/test_parity.py -k cpu",
            ),
            "greedy-bonus-is-drawn": ("  if (row.greedy()) {", "  if (row.greedy() && row.draft >= 0) {"),
            "zero-q-accepted": ("if (row.log_q_x == -INFINITY || !accept(", "if (!accept("),
            "rejection-draws-from-p": (
                "verification.finish(row, verification.draw_residual(residual));",
                "verification.finish(row, verification.draw_target(row));",
                "tests/kernels/test_parity.py -k cpu",
            ),
            "no-mass-ends-the-step": (
                "    return Outcome::kKept;\n  } else {\n    verification.finish(",
                "    return Outcome::kFinished;\n  } else {\n    verification.finish(",
            ),
        },
    ),
    *mutations(
        "csrc/cpu/verify_tree.cpp",
        "tests/kernels/test_trees.py -k 'parity or chain'",
        {
            "tree-q-keeps-the-rejected-child": ("changed |= patch->logit == -INFINITY;", "changed = false;"),
            "tree-reduced-q-loses-another-token": ("column = id - ids;", "column = ids - ids;"),
            "tree-recovers-with-the-roots-noise": (
                "const Noise noise = noise_of(sequence.b, row);",
                "const Noise noise = noise_of(sequence.b, 0);",
            ),
            "tree-block-tests-with-the-first-ratio": ("place.siblings.h = sequence.h;", "place.siblings.h = 1.0f;"),
            "tree-recovers-from-p": ("place.rejected.empty() ? draw(", "place.rejected.size() < 99 ? draw("),
            "tree-draft-fault-unseen": (
                "if (const int32_t fault = row_fault(place.q.max, place.q.inverse_temperature)) {",
                "if (const int32_t fault = 0 * row_fault(place.q.max, place.q.inverse_temperature)) {",
                "tests/kernels/test_trees_corners.py -k cpu",
            ),
        },
    ),
    *mutations(
        "csrc/cpu/draft_step.cpp",
        "tests/kernels/test_parity.py -k cpu",
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
                "const float log_q = log_probability(logit_at(row, token), stats.distribution());\n    write(b, log_q < -4.0f ? -1 : token, log_q, stats.cutoff, stats.lse);",
            ),
        },
    ),
    *mutations(
        "csrc/cpu/draft_children.cpp",
        "tests/kernels/test_trees.py -k 'parity or chain'",
        {
            "tree-children-share-noise-between-nodes": (
                "static_cast<uint32_t>(params_.offset[b])};",
                "static_cast<uint32_t>(0 * params_.offset[b])};",
            ),
            "tree-children-in-draft-ids": ("there ? target_id(tokens[i])", "there ? tokens[i]"),
            "tree-likely-children-of-a-greedy-sequence": ("task.temperature = 1.0f;", "task.temperature = 0.0f;"),
        },
    ),
    *mutations(
        "csrc/cpu/nucleus.cpp",
        "tests/kernels/test_filters.py -k 'sample or flat_and_peaked or drafts_for_itself'",
        {
            "bracket-below-the-cutoff-unnoticed": ("  if (!(above < wanted)) return {};\n", ""),
            "one-value-below-the-cutoff-unnoticed": (
                "row.inverse_temperature)} < wanted) return {};",
                "1.0f)} < 0.0) return {};",
            ),
            "kept-sum-without-the-one-value": (
                "sum = split.above + split.count * weight(",
                "sum = split.above + 0.0f * weight(",
            ),
        },
    ),
    *mutations(
        "csrc/cpu/row_stats.cpp",
        "tests/kernels/test_filters.py tests/kernels/test_parity.py -k cpu",
        {
            "top-p-before-top-k": (
                "nucleus_cutoff(row, cutoff, task.top_p)",
                "nucleus_cutoff(row, -INFINITY, task.top_p)",
            ),
            "top-k-one-more": ("static_cast<int64_t>(task.top_k))", "static_cast<int64_t>(task.top_k) + 1)"),
            "min-p-above-the-bracket": (
                "task.weighed && stats.cutoff <= searches[r].bracket.high)",
                "task.weighed)",
                "tests/kernels/test_filters.py -k 'sample or flat_and_peaked or drafts_for_itself'",
            ),
            "race-without-the-block-of-the-maximum": (
                "add_block(nearest, 0.0f, near);",
                "",
                "tests/kernels/test_parity.py -k cpu",
            ),
            "greedy-takes-the-last-block": (
                "return block_kernels().find(row, block_of_max(stats), stats.max);",
                "int64_t block = row.num_blocks() - 1;\n  while (stats.blocks[block].max != stats.max) --block;\n  return block_kernels().find(row, block, stats.max);",
                "tests/kernels/test_corners.py tests/kernels/test_faults.py -k cpu",
            ),
        },
    ),
    *mutations(
        "csrc/cpu/sampling.cpp",
        "tests/kernels/test_penalties.py tests/kernels/test_parity.py -k cpu",
        {
            "drafts-not-counted": ("entry_of(entries, drafts[i]).count += 1;", "entry_of(entries, drafts[i]);"),
            "ends-of-the-first-row": (
                "position + num_drafts < sampling.first_end[b]",
                "position < sampling.first_end[b]",
            ),
            "table-of-the-first-sequence": (
                "int64_t i = b * sampling.table_size; i < (b + 1) * sampling.table_size",
                "int64_t i = 0; i < sampling.table_size",
            ),
        },
    ),
    *mutations(
        "csrc/cpu/sure_drafts.cpp",
        "tests/kernels/test_sure_drafts.py",
        {
            "least-p-from-the-least-weight": (
                "{log_weight - stats.lse - margin,",
                "{log_weight - stats.lse - log_top_p - margin,",
            ),
            "kept-by-all-weight": ("< stats.lse + log_top_p;", "< stats.lse;"),
            "sure-ones-are-not-emitted": ("      keep(rows[i]);\n", ""),
        },
    ),
    *mutations(
        "csrc/cpu/select.cpp",
        "tests/kernels/test_filters.py tests/kernels/test_parity.py -k cpu",
        {
            "top-p-passes-the-mass-by": (
                "if (above + sums[bin] >= wanted) break;",
                "if (above + sums[bin] > wanted) break;",
            ),
        },
    ),
    *mutations(
        "csrc/cpu/block_bins.h",
        "tests/kernels/test_filters.py tests/kernels/test_parity.py -k cpu",
        {
            "selection-reads-one-lane-less": (
                "sums[Bins::kCopies * bin[i] + i % Bins::kCopies] += size[i];",
                "sums[Bins::kCopies * bin[i] + i % Bins::kCopies] += i == kLanes - 1 ? 0.0f : size[i];",
            ),
        },
    ),
    *mutations(
        "csrc/cpu/block_draws.h",
        "tests/kernels/test_trees.py -k 'parity or chain'",
        {
            "tree-sampled-children-are-the-likely-ones": (
                "scores[i] /= exponential(uniform(words[i]));",
                "scores[i] /= exponential(uniform(words[0]));",
            ),
        },
    ),
    *mutations(
        "csrc/cpu/block_noise.h",
        "tests/kernels/test_parity.py -k cpu",
        {
            "words-of-calls-out-of-order": ("lane / 2 + lane % 2 * (kCalls / 2)", "lane"),
        },
    ),
    *mutations(
        "csrc/cpu/block_nucleus.h",
        "tests/kernels/test_filters.py -k 'sample or flat_and_peaked or drafts_for_itself'",
        {
            "upper-end-counted-twice": (
                "each > bracket.high ? above[lane] + w",
                "each >= bracket.high ? above[lane] + w",
            ),
        },
    ),
    *mutations(
        "csrc/cpu/load.h",
        "tests/kernels/test_allowed.py -k cpu",
        {"masked-rows-are-read-in-place": (" && row.allowed.words == nullptr) {", ") {")},
    ),
    *mutations(
        "csrc/cpu/block_sums.h",
        "tests/kernels/test_filters.py tests/kernels/test_parity.py -k cpu",
        {
            "tie-dropped-from-the-draw": (
                "w[i] = x[i] >= cutoff ? each : 0.0f;",
                "w[i] = x[i] > cutoff ? each : 0.0f;",
            ),
        },
    ),
    *mutations(
        "csrc/layers/cpu/linear.cpp",
        "tests/layers/test_linear.py",
        {
            "linear-forgets-the-last-inputs": ("whole; rest > 0)", "whole; rest > 1024)"),
            "linear-forgets-the-inputs-before": (
                "inputs.first > 0 ? own : nullptr",
                "inputs.first < 0 ? own : nullptr",
            ),
            "linear-takes-the-last-rows-at-their-place": (
                "const int64_t at = std::min(row, params.rows - kRows);",
                "const int64_t at = std::min(row, params.rows - kRows) / kRows * kRows;",
            ),
        },
    ),
    *mutations(
        "csrc/layers/cpu/lanes.h",
        "tests/layers/test_linear.py -k bfloat16",
        {"bfloat16-is-taken-for-less": ("bits <<= 16;", "bits <<= 15;")},
    ),
    *mutations(
        "csrc/layers/cpu/packed.h",
        "tests/layers/test_blocks_of_weights.py",
        {
            "blocks-of-upper-halves-first": ("(both & 15) - centre;", "(both >> 4) - centre;"),
            "blocks-forget-the-upper-bits-of-scales": ("| first >> 6 << 4", "| first >> 7 << 4"),
            "blocks-are-centred-at-seven": ("block.quants, 8, 8, 8, out", "block.quants, 8, 7, 8, out"),
        },
    ),
    *mutations(
        "csrc/layers/cpu/packed_linear.cpp",
        "tests/layers/test_blocks_of_weights.py",
        {
            "inputs-are-scaled-by-those-of-the-first-row": (
                "x.scales[(row * inputs + first)",
                "x.scales[(0 * inputs + first)",
            ),
            "inputs-are-cut-off": ("std::min(x[i] * inverse, 32767.0f) + kWhole", "x[i] * inverse + kWhole"),
        },
    ),
    *mutations(
        "csrc/layers/cpu/attend.cpp",
        "tests/layers/test_attend.py",
        {
            "attention-sinks-weigh-nothing": ("if (sink) sums[0] +=", "if (false) sums[0] +="),
            "attention-of-one-scale": ("scores *= params.scale;", "scores *= 1.0f;"),
            "attention-forgets-the-path": ("query.weights[query.length++] =", "query.weights[query.length] ="),
            "attention-multiplies-what-is-not-seen-by-zero": (
                "if (slot >= query.first && slot < query.end) add(",
                "add(",
            ),
        },
    ),
    *mutations(
        "csrc/layers/cpu/elementwise.cpp",
        "tests/layers/test_elementwise.py",
        {
            "rotation-the-other-way": ("x[i] * cos[i] - x[i + half] * sin[i]", "x[i] * cos[i] + x[i + half] * sin[i]"),
            "rms-norm-forgets-the-last-numbers": (
                "for (int j = 0; i + j < p.size; ++j)",
                "for (int j = 0; i + j < 0; ++j)",
            ),
        },
    ),
    *mutations(
        "csrc/common/pool.cpp",
        "tests/layers/test_pool.py -k several",
        {
            "pool-forgets-the-last-part": (
                "std::min(begin + job_.size, job_.tasks)",
                "std::min(begin + job_.size, job_.tasks - 1)",
            ),
            "pool-does-not-wait": (
                "while (const uint32_t left = left_.load(",
                "while (const uint32_t left = 0 & left_.load(",
            ),
        },
    ),
    *mutations(
        "csrc/layers/feed.h",
        "tests/layers/test_recurrent.py -k 'ragged and cpu'",
        {"recurrence-goes-on-with-the-last-text": ("start == 0 ? 0 : base", "base")},
    ),
    *mutations(
        "csrc/layers/cpu/recurrence.h",
        "tests/layers/test_recurrent.py -k 'ragged and cpu'",
        {
            "recurrence-keeps-rejected-drafts": (
                "choose_places(keep ? latest() : static_cast<int>(stands.commit - stands.begin) - 1)",
                "choose_places(latest())",
            ),
            "recurrence-forgets-the-first-of-a-chunk": ("if (left-- > feed.places)", "if (left-- > 1)"),
            "recurrence-stores-one-place-late": ("position++ % feed.places", "++position % feed.places"),
            "recurrence-forgets-what-it-read": ("keep ? start + count :", "keep ? start :"),
        },
    ),
    *mutations(
        "csrc/layers/cpu/recurrence.h",
        "tests/layers/test_recurrent.py -k 'trees and cpu'",
        {
            "tree-of-a-recurrence-is-a-chain": ("of_column_[above] : before_start", "latest() : latest()"),
            "tree-of-a-recurrence-frees-a-state-early": ("if (from >= 0 && last_[parent + 1] == i)", "if (from >= 0)"),
        },
    ),
    *mutations(
        "csrc/layers/cpu/conv_window.cpp",
        "tests/layers/test_recurrent.py -k 'ragged and cpu'",
        {"convolution-begins-one-late": ("position = start - p.taps + tap;", "position = start - p.taps + tap + 1;")},
    ),
    *mutations(
        "csrc/layers/cpu/delta_step.cpp",
        "tests/layers/test_recurrent.py -k 'trees and cpu'",
        {"delta-rule-takes-products-of-another": ("if (t == 0 || step.parent != t - 1)", "if (t == 0)")},
    ),
    *mutations(
        "csrc/layers/cpu/delta_step.cpp",
        "tests/layers/test_recurrent.py -k 'ragged and cpu'",
        {"delta-rule-takes-keys-of-other-heads": ("head / (p.heads / p.key_heads)", "head % p.key_heads")},
    ),
    *mutations(
        "csrc/layers/cpu/ssd_step.cpp",
        "tests/layers/test_recurrent.py -k 'ragged and cpu'",
        {
            "state-space-takes-other-groups": ("step.at * p.groups + lines.group", "step.at * p.groups"),
            "state-space-reads-the-next-head": ("if (left-- == 0) ++head", "if (--left == 0) ++head"),
        },
    ),
    *mutations(
        "csrc/cpu/tree.h",
        "tests/kernels/test_trees.py -k 'parity or chain'",
        {
            "tree-num-nodes-is-ignored": ("std::min(params.num_nodes[b], params.nodes);", "params.nodes;"),
            "tree-siblings-in-reverse": (
                "(last[row] < 0 ? first_[row] : next_[last[row]]) = node;",
                "next_[node] = first_[row], first_[row] = node;",
            ),
        },
    ),
]
