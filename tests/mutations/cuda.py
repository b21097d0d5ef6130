"""Of the CUDA kernels, which tests run on fibers."""

from .mutation import Mutation, mutations

MUTATIONS: list[Mutation] = [
    *mutations(
        "csrc/cuda/measure.h",
        "tests/kernels/test_parity.py -k cuda",
        {
            "cuda-copy-over-what-lanes-still-read": ("      simt::sync_warp();  // all lanes have read the slot\n", ""),
            "cuda-results-in-one-block": ("block < simt::blocks_in_cluster(); ++block", "block < 1; ++block"),
        },
    ),
    *mutations(
        "csrc/cuda/statistics_kernel.h",
        "tests/simt/test_measured.py",
        {
            "cuda-statistics-of-drafts-over-the-targets": (
                "int64_t{i} * params.blocks + block",
                "int64_t{j} * params.blocks + block",
            ),
        },
    ),
    *mutations(
        "csrc/cuda/row_draws.h",
        "tests/simt/test_measured.py",
        {"cuda-last-statistics-not-loaded": ("i < granules; i +=", "i + 1 < granules; i +=")},
    ),
    *mutations(
        "csrc/cuda/walk.h",
        "tests/kernels/test_parity.py -k cuda",
        {
            "cuda-residual-read-before-it-is-weighed": (
                "weigh_residual(s, place, end.j, 1.0f, memory.residual, &turn);\n    simt::sync_cluster();",
                "weigh_residual(s, place, end.j, 1.0f, memory.residual, &turn);",
            ),
            "cuda-joint-tests-with-the-next-number": (
                "    u = row.u;\n",
                "    u = simt::read(&memory.examined[j + 1 < drafted ? j + 1 : j]).u;\n",
                "tests/kernels/test_parity.py -k 'cuda and block'",
            ),
            "cuda-pairs-of-the-block-after": (
                "copy_pair(block + pairs * place.all_warps, ",
                "copy_pair(block + (pairs + 1) * place.all_warps, ",
            ),
        },
    ),
    *mutations(
        "csrc/cuda/select.h",
        "tests/kernels/test_filters.py tests/kernels/test_parity.py -k cuda",
        {
            "cuda-histogram-counted-while-it-is-cleared": ("sums.clear();\n      simt::sync_block();", "sums.clear();"),
            "cuda-bound-one-too-high": ("if (rank == k - 1)", "if (rank == (k > 1 ? k - 2 : 0))"),
        },
    ),
    *mutations(
        "csrc/cuda/speculative_step.h",
        "tests/kernels/test_parity.py -k cuda",
        {
            "cuda-rows-decided-before-they-are-measured": (
                "  simt::sync_cluster();\n  decide_step",
                "  simt::sync_block();\n  decide_step",
            ),
            "cuda-waits-where-it-has-not-arrived": (
                "  if (params.measures()) simt::arrive_only();\n",
                "",
            ),
            "cuda-race-in-position-and-offset": (
                "noise = {noise.seed, noise.position + noise.offset, 0};",
                "noise = {noise.seed, noise.position, 0};",
                "tests/kernels/test_parity.py -k 'cuda and coupled'",
            ),
        },
    ),
    *mutations(
        "csrc/cuda/verify.h",
        "tests/kernels/test_parity.py -k 'cuda and (listed or reduced)'",
        {
            "cuda-listed-q-read-while-it-is-subtracted": ("q_of(at)));\n  }\n  simt::sync_warp();", "q_of(at)));\n  }"),
            "cuda-cutoff-of-a-draft-row-with-a-fault": (
                "    const int64_t k = s.params.num_drafts_max;\n",
                "    const int64_t k = s.params.num_drafts_max;\n    s.q_of(j);\n",
                "tests/simt/test_simt.py -k no_cutoff",
            ),
        },
    ),
    *mutations(
        "csrc/cuda/bins.h",
        "tests/kernels/test_filters.py tests/kernels/test_parity.py -k cuda",
        {
            "cuda-one-bin-too-many": ("scale = (kBins - 1) / width", "scale = kBins / width"),
            "cuda-lanes-add-to-one-copy": (
                "(bin * copies + simt::thread() % copies)",
                "bin * copies",
                "tests/simt/test_simt.py -k flat",
            ),
        },
    ),
    *mutations(
        "csrc/cuda/tree_rows.h",
        "tests/kernels/test_trees.py -k 'parity and cuda'",
        {
            "cuda-trees-keep-the-rejected-child-in-q": (
                "simt::read(&visit->removed) + 1, block, q);",
                "simt::read(&visit->removed), block, q);",
            ),
        },
    ),
    *mutations(
        "csrc/cuda/tree_rules.h",
        "tests/kernels/test_trees.py -k 'parity and cuda'",
        {
            "cuda-trees-draw-from-the-residual-before": (
                "now.residual = 1 - now.residual;",
                "now.residual = now.residual;",
            ),
        },
    ),
    *mutations(
        "csrc/cuda/draws.h",
        "tests/kernels/test_parity.py -k 'cuda and coupled'",
        {
            "cuda-likely-losers-never-race": ("weight * 0x1.01p33f >= score", "weight * 0x1.01p2f >= score"),
            "cuda-race-of-the-last-block-alone": (
                "  Candidate best = before;\n#pragma unroll\n  for (int i = 0; i < kEach; i += 4) {",
                "  Candidate best = 0;\n#pragma unroll\n  for (int i = 0; i < kEach; i += 4) {",
            ),
        },
    ),
    *mutations(
        "csrc/cuda/row_draws.h",
        "tests/simt/test_simt.py -k anywhere",
        {
            "cuda-slots-without-the-granule-that-a-shift-needs": ("(aligned(rows) ? 0 : kGranule)", "0"),
        },
    ),
    *mutations(
        "csrc/cuda/sequence.h",
        "tests/kernels/test_parity.py -k cuda",
        {
            "cuda-q-from-the-row-before": (
                "return {params.draft.row(b, j),",
                "return {params.draft.row(b, j > 0 ? j - 1 : j),",
            ),
            "cuda-masks-count-beside-a-table-only": (
                "return params.sampling.has_table || params.allowed.words != nullptr;",
                "return params.sampling.has_table;",
                "tests/kernels/test_allowed.py -k cuda",
            ),
        },
    ),
    *mutations(
        "csrc/cuda/rows.h",
        "tests/kernels/test_penalties.py tests/kernels/test_parity.py -k cuda",
        {
            "cuda-penalties-twice-for-a-draft-that-is-listed": ("return before ? -1 : id;", "return id;"),
        },
    ),
    *mutations(
        "csrc/cuda/recurrence.h",
        "tests/simt/test_recurrent_kernels.py",
        {
            "cuda-recurrent-state-that-stays-has-one-more": ("if (i + 1 == kept) tile", "if (i == kept) tile"),
            "cuda-recurrent-state-stored-before-others-read-it": (
                "    if (tree && first) simt::sync_block();  // all have read the state before one of them writes it\n",
                "",
            ),
            "cuda-recurrent-leaves-begin-before-what-stays": (
                "      if (committed > 0) stands.begin = stands.commit;\n",
                "",
            ),
            "cuda-recurrent-inputs-of-a-tree-by-rank": ("feed.parents != nullptr ? column : before", "before"),
        },
    ),
    *mutations(
        "csrc/cuda/delta_step.h",
        "tests/simt/test_recurrent_kernels.py",
        {
            "cuda-delta-reads-another-columns-change": (
                "const float own = simt::shuffle(added, lane % 16);",
                "const float own = added;",
            ),
        },
    ),
    *mutations(
        "csrc/cuda/conv_window.h",
        "tests/simt/test_recurrent_kernels.py",
        {
            "cuda-convolution-of-a-tree-as-a-chain": (
                "before >= 0 ? parent_of(feed, row, static_cast<int>(before)) : before - 1",
                "before - 1",
            ),
        },
    ),
]
