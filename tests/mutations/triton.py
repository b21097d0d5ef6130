"""Of the Triton kernels."""

from .mutation import Mutation, mutations

MUTATIONS: list[Mutation] = [
    *mutations(
        "specdec_kernels/backends/triton/core.py",
        "tests/kernels/test_triton.py tests/kernels/test_parity.py -k 'triton and not compiles'",
        {
            "triton-residual-not-subtracted": ("difference = p - q\n", "difference = p\n"),
            "triton-tree-residuals-forget-earlier-siblings": (
                "return of_child / (of_child / scale + mass)",
                "return of_child / mass",
                "tests/kernels/test_trees_triton.py::test_many_are_rejected tests/kernels/test_trees_triton.py::test_rules",
            ),
        },
    ),
    *mutations(
        "specdec_kernels/backends/triton/elementwise.py",
        "tests/kernels/test_elementwise.py -k triton",
        {
            "triton-norms-round-after-weights-alone": ("(rounded(y, y_ptr) if ROUND_FIRST else y)", "y"),
            "triton-rotation-the-other-way": ("- rounded(b * sin, y_ptr)", "+ rounded(b * sin, y_ptr)"),
        },
    ),
    *mutations(
        "specdec_kernels/backends/triton/draft_children.py",
        "tests/kernels/test_trees_triton.py::test_several_blocks tests/kernels/test_trees_triton.py::test_as_many_children_as_allowed",
        {
            "triton-tree-sampled-children-are-the-likely-ones": (
                "arrival = w / exponential(uniform(bits))",
                "arrival = w / exponential(uniform(bits * 0))",
            ),
            "triton-tree-ties-are-lost": ("| ((score == head) & (ids > token))", ""),
        },
    ),
    *mutations(
        "specdec_kernels/backends/triton/draft_step.py",
        "tests/kernels/test_parity.py::test_drafts_of_a_reduced_vocabulary -k triton",
        {
            "triton-drafts-at-d2t-ids-lost": (
                "        token = target_ids(rows, token)\n    store_draft",
                "    store_draft",
            ),
            "triton-q-of-raw-logits": (
                "log_q = log_probability(logit, inverse(temperature), lse, cutoff)",
                "log_q = log_probability(raw, inverse(temperature), lse, cutoff)",
                "tests/kernels/test_triton.py::test_q_of_a_draft_is_of_processed_logits",
            ),
            "triton-coupled-draft-of-the-first-block": (
                "        race_block(rows, b, j, block, score_ptr, winner_ptr)",
                "        race_block(rows, b, j, block * 0, score_ptr, winner_ptr)",
                "tests/kernels/test_triton.py::test_several_blocks",
            ),
        },
    ),
    *mutations(
        "specdec_kernels/backends/triton/rows.py",
        "tests/kernels/test_penalties.py -k triton",
        {
            "triton-ends-of-the-first-sequence": (
                "sampling.ends_ptr + b * sampling.num_ends + i",
                "sampling.ends_ptr + i",
            ),
            "triton-tree-q-of-first-children-only": (
                "        return found > 0",
                "        return found == i",
                "tests/kernels/test_trees_triton.py::test_rules",
            ),
        },
    ),
    *mutations(
        "specdec_kernels/backends/triton/siblings.py",
        "tests/kernels/test_trees_triton.py::test_many_are_rejected tests/kernels/test_trees_triton.py::test_rules",
        {
            "triton-tree-q-keeps-the-rejected-child": (
                "q = tl.where(ids == missing, 0.0, q)",
                "q = tl.where(ids == missing, q, q)",
            ),
            "triton-tree-recovers-from-what-was-weighed-last": (
                "& (weighed != scale)",
                "& (weighed < 0.0)",
                "tests/kernels/test_trees_triton.py::test_the_residual_of_an_earlier_rejection",
            ),
        },
    ),
    *mutations(
        "specdec_kernels/backends/triton/tree.py",
        "tests/kernels/test_trees_triton.py::test_rules[walk]",
        {
            "triton-tree-walks-with-the-steps-position": (
                "tl.load(sampling.position_ptr + b) + level",
                "tl.load(sampling.position_ptr + b)",
            ),
            "triton-tree-races-in-the-first-blocks-only": (
                "for group in range(0, tl.cdiv(rows.num_blocks, GROUP)):",
                "for group in range(0, 1):",
                "tests/kernels/test_trees_triton.py::test_several_blocks[walk]",
            ),
        },
    ),
    *mutations(
        "specdec_kernels/backends/triton/verify.py",
        "tests/kernels/test_triton.py tests/kernels/test_parity.py -k 'triton and not compiles'",
        {
            "triton-one-hot-q-is-empty": (
                "return tl.where(ids == x, 0.0, -INFINITY)",
                "return tl.where(ids == x, -INFINITY, -INFINITY)",
            ),
        },
    ),
    *mutations(
        "specdec_kernels/backends/triton/examined.py",
        "tests/kernels/test_corners.py -k triton",
        {
            "triton-zero-q-accepted": (
                "kept = drafted & (log_q != -INFINITY)",
                "kept = drafted",
            ),
        },
    ),
    *mutations(
        "specdec_kernels/backends/triton/filters.py",
        "tests/kernels/test_triton.py tests/kernels/test_filters.py -k 'triton and not compiles'",
        {
            "triton-top-p-before-top-k": (
                "total, above, below = weigh(rows, b, j, low, low, largest",
                "all = low * 0 + LOWEST\n        total, above, below = weigh(rows, b, j, all, all, largest",
            ),
        },
    ),
    *mutations(
        "specdec_kernels/backends/triton/speculative_step.py",
        "tests/kernels/test_triton.py -k 'last or scratch'",
        {
            "triton-unneeded-rows-do-not-arrive": (
                "arrives_last(arrivals_ptr, b, limit + 1)",
                "arrives_last(arrivals_ptr, b, num_rows)",
            ),
            "triton-block-tests-with-the-next-number": (
                "accept_noise(seed, position, j - 1)",
                "accept_noise(seed, position, j)",
                "tests/kernels/test_triton.py tests/kernels/test_parity.py -k 'triton and not compiles'",
            ),
        },
    ),
]
