"""Of the CUDA kernels, which tests run on fibers."""

from .mutation import Mutation, mutations

MUTATIONS: list[Mutation] = [
    *mutations(
        "csrc/cuda/blocks.h",
        "tests/simt/test_simt.py -k anywhere",
        {
            "cuda-shifted-rows-lose-a-word": ("both[k] = (shift & 4) != 0 ? both[k + 1] : both[k];", ";"),
            "cuda-large-logits-overflow": (
                "scale = fminf(scale, as_float(",
                "scale = fmaxf(scale, 0.0f * as_float(",
                "tests/kernels/test_extremes.py -k 'beyond_what and cuda'",
            ),
            "cuda-the-last-logit-of-a-row-is-left-out": (
                "if (place < left) all = Format::bits",
                "if (place + 1 < left) all = Format::bits",
                "tests/simt/test_best_first.py::test_the_last_logit_of_a_row",
            ),
        },
    ),
    *mutations(
        "csrc/cuda/measure.h",
        "tests/simt/test_best_first.py::test_each_sequence_has_the_rows_that_its_drafts_lead_to",
        {
            "cuda-rows-that-drafts-lead-to-are-not-measured": (
                "|| !params.used(b, i)) return;",
                "|| !params.used(b, i + 1)) return;",
            ),
        },
    ),
    *mutations(
        "csrc/cuda/work.h",
        "tests/kernels/test_parity.py -k cuda",
        {
            "cuda-masks-count-beside-a-table-only": (
                "return params.sampling.has_table || params.allowed.words != nullptr;",
                "return params.sampling.has_table;",
                "tests/kernels/test_allowed.py -k cuda",
            ),
            "cuda-statistics-of-drafts-over-the-targets": (
                "return uint64_t{b} * rows + i;",
                "return uint64_t{b} * (k() + 1) + i % (k() + 1);",
            ),
            "cuda-penalties-of-other-drafts-of-the-step": (
                "work.drafted = draft.drafts == nullptr ? 0 : draft.offset;",
                "work.drafted = 0;",
                "tests/kernels/test_penalties.py -k cuda",
            ),
        },
    ),
    *mutations(
        "csrc/cuda/sequence.h",
        "tests/simt/test_best_first.py",
        {
            "cuda-q-from-the-row-before": (
                "    const Row row = draft_row(j);\n    if constexpr",
                "    const Row row = draft_row(j > 0 ? j - 1 : j);\n    if constexpr",
            ),
            "cuda-mapped-q-stays-at-its-first-token": ("        at += there;\n", ""),
            "cuda-block-sums-too-few-rows": ("if (u < w * 1.0001f)", "if (u < w * 0.05f)"),
            "cuda-block-is-sure-of-one-draft-more": ("if (w == 1.0f) sure = j + 1;", "if (w > 0.5f) sure = j + 1;"),
            "cuda-a-draft-that-q-lacks-is-possible": (
                "seen.possible() ? ratio(seen.p, seen.q) : 0.0f",
                "ratio(seen.p, seen.q)",
                "tests/kernels/test_corners.py -k 'q_zero and cuda'",
            ),
        },
    ),
    *mutations(
        "csrc/cuda/sums.h",
        "tests/simt/test_best_first.py -k 'block or form'",
        {"cuda-sums-of-the-first-blocks-alone": ("block += simt::blocks_x() * warps", "block += params.n")},
    ),
    *mutations(
        "csrc/cuda/decide.h",
        "tests/simt/test_best_first.py",
        {
            "cuda-best-first-ends-with-the-first-mass": (
                "if (score_of(best) >= bound * rounding) break;",
                "if (best != 0 && bound * rounding >= 0.0f) break;",
            ),
            "cuda-no-mass-rejects-the-draft": (
                "if (block < 0 && possible(here.p)) {",
                "if (block < 0 && here.p > INFINITY) {",
            ),
            "cuda-joint-tests-with-the-ratio-alone": (
                "const float keep = drafted ? keep_probability(w, simt::read(&s.memory.total[j])) : w;",
                "const float keep = drafted ? fminf(w, 1.0f + simt::read(&s.memory.total[j])) : w;",
            ),
        },
    ),
    *mutations(
        "csrc/cuda/draws.h",
        "tests/simt/test_best_first.py",
        {
            "cuda-warps-tell-each-other-in-one-place": (
                "simt::write(&slots->best[turn][warp()], mine);",
                "turn = 0, simt::write(&slots->best[turn][warp()], mine);",
            ),
            "cuda-equal-numbers-have-one-rank": (
                "others.of[k] > mine || (others.of[k] == mine && at + k < i)",
                "others.of[k] > mine",
                "tests/simt/test_few_candidates.py",
            ),
        },
    ),
    *mutations(
        "csrc/cuda/race.h",
        "tests/kernels/test_parity.py -k 'cuda and coupled'",
        {
            "cuda-race-in-position-and-offset": (
                "{step.seed, step.position + step.offset, 0}",
                "{step.seed, step.position, 0}",
            ),
            "cuda-likely-losers-never-race": ("kLeastWeight = 0x1p-33f / 17.0f", "kLeastWeight = 0x1p-4f"),
            "cuda-mapped-tokens-race-with-their-indices": (
                "if (row.d2t == nullptr) {\n        best",
                "if (row.size > 0) {\n        best",
                "tests/simt/test_simt.py::test_tokens_of_a_reduced_vocabulary_race_with_the_ids_of_the_target",
            ),
        },
    ),
    *mutations(
        "csrc/cuda/select.h",
        "tests/kernels/test_filters.py -k cuda",
        {
            "cuda-masses-of-what-filters-drop": ("return x[k] >= cutoff ? x[k] : -INFINITY;", "return x[k];"),
        },
    ),
    *mutations(
        "csrc/cuda/candidates.h",
        "tests/simt/test_few_candidates.py",
        {
            "cuda-bound-one-bin-too-high": ("simt::total(bins_before) + 1)", "simt::total(bins_before))"),
        },
    ),
    *mutations(
        "csrc/cuda/few.h",
        "tests/simt/test_few_candidates.py",
        {
            "cuda-few-reach-what-they-do-not": ("if (tries && all < wanted) return false;", ""),
            "cuda-few-keep-what-top-p-drops": ("mass(i) > 0 && before <", "mass(i) > 0 && before / 2 <"),
            "cuda-blocks-weigh-what-is-dropped": ("if (logit >= cutoff) kept_of_block", "kept_of_block"),
        },
    ),
    *mutations(
        "csrc/cuda/bins.h",
        "tests/kernels/test_filters.py tests/kernels/test_parity.py -k cuda",
        {
            "cuda-one-bin-too-many": ("scale = (kBins - 1) / width", "scale = kBins / width"),
        },
    ),
    *mutations(
        "csrc/layers/cuda/linear.h",
        "tests/layers/test_linear_gpu.py",
        {
            "cuda-linear-takes-inputs-of-x-in-another-order": (
                "{x.word[i], x.word[i + 1]});",
                "{x.word[i / 2], x.word[i / 2 + 2]});",
            ),
            "cuda-linear-drops-a-warps-part": (
                "for (int part = 0; part < kLinearWarps; ++part)",
                "for (int part = 0; part < kLinearWarps - 1; ++part)",
            ),
            "cuda-linear-parts-by-the-number-of-rows": (
                "most = tiles_of(chunks, kLinearWarps), first",
                "most = tiles_of(chunks, kTiles == 1 ? kLinearWarps : kLinearWarps / 2), first",
            ),
            "cuda-linear-sums-read-before-they-are-there": ("  simt::sync_block();\n  if (warp()", "  if (warp()"),
            "cuda-linear-rounds-before-the-bias": (
                "if (params.bias != nullptr) total[e] +=",
                "if (params.bias != nullptr) total[e] = Format::logit(Format::nearest(total[e]), 0) +",
            ),
        },
    ),
    *mutations(
        "csrc/layers/cuda/linear.h",
        "tests/layers/test_norm_and_add_linear.py",
        {
            "cuda-linear-norm-of-the-tile-before": (
                "total += simt::read(&of_warps[(each * kTiles + tile) * kRows + group]);",
                "total += simt::read(&of_warps[each * kTiles * kRows + group]);",
            ),
            "cuda-linear-adds-before-it-rounds": (
                "total[e] = rounded<Format>(total[e]) + Format::logit(",
                "total[e] = total[e] + Format::logit(",
            ),
        },
    ),
    *mutations(
        "csrc/layers/cuda/weights.h",
        "tests/layers/test_linear_int8.py",
        {
            "cuda-int8-scale-of-another-output": ("(scales)[output % kOutputs]", "(scales)[(output + 1) % kOutputs]"),
            "cuda-int8-parts-of-a-chunk-exchanged": ("bytes.word[2 * part + i]", "bytes.word[2 * (1 - part) + i]"),
        },
    ),
    *mutations(
        "csrc/cuda/rows.h",
        "tests/kernels/test_penalties.py tests/kernels/test_parity.py -k cuda",
        {
            "cuda-drafts-have-no-penalties": ("listed + row.num_drafts + sampling.num_ends;", "listed;"),
            "cuda-penalties-of-another-token": (
                "adjusted(row, row.target_id(first + place_of(which)), logit)",
                "adjusted(row, row.target_id(first), logit)",
            ),
        },
    ),
]
