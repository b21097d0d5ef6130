"""Mutations of the tree operations in the Triton backend."""

from .mutation import Mutation, mutations

FOLDER = "specdec_kernels/backends/triton"
FILE = "tests/kernels/test_trees_triton.py"
RULES = f"{FILE}::test_rules"
REJECTED = f"{FILE}::test_many_are_rejected"

MUTATIONS: list[Mutation] = [
    *mutations(
        f"{FOLDER}/core.py",
        f"{REJECTED} {RULES}",
        {
            "triton-tree-p-is-not-updated-between-siblings": (
                "beyond = tl.exp(log_p - log_q) - 1.0 / scale",
                "beyond = tl.exp(log_p - log_q)",
            ),
            "triton-tree-residuals-forget-earlier-siblings": (
                "return of_child / (of_child / scale + mass)",
                "return of_child / mass",
            ),
        },
    ),
    *mutations(
        f"{FOLDER}/siblings.py",
        f"{REJECTED} {RULES}",
        {
            "triton-tree-q-keeps-the-rejected-child": (
                "q = tl.where(ids == missing, 0.0, q)",
                "q = tl.where(ids == missing, q, q)",
            ),
            "triton-tree-block-keeps-the-ratio-after-a-rejection": (
                "h = ratio_after_rejection(h, mass, weighed, total)",
                "h = h",
            ),
            "triton-tree-siblings-share-noise": (
                "enter = accept_noise(seed, position, child) < ratio",
                "enter = accept_noise(seed, position, row) < ratio",
            ),
            "triton-tree-recovers-with-the-roots-noise": (
                "token = recover(step, b, row, scale",
                "token = recover(step, b, row * 0, scale",
            ),
            "triton-tree-recovers-from-what-was-weighed-last": (
                "& (weighed != scale)",
                "& (weighed < 0.0)",
                f"{FILE}::test_the_residual_of_an_earlier_rejection",
            ),
        },
    ),
    *mutations(
        f"{FOLDER}/tree.py",
        f"{RULES}[walk]",
        {
            "triton-tree-walks-with-the-steps-position": (
                "tl.load(sampling.position_ptr + b) + level",
                "tl.load(sampling.position_ptr + b)",
            ),
            "triton-tree-num-nodes-is-ignored": (
                "counts, at = node < load_limit(step.num_drafts_ptr, b, step.num_drafts),",
                "counts, at = node < step.num_drafts,",
                f"{RULES} -k 'token or block'",
            ),
            "triton-tree-races-in-the-first-blocks-only": (
                "for group in range(0, tl.cdiv(rows.num_blocks, GROUP)):",
                "for group in range(0, 1):",
                f"{FILE}::test_several_blocks[walk]",
            ),
        },
    ),
    *mutations(
        f"{FOLDER}/rows.py",
        FILE,
        {
            "triton-tree-penalties-of-all-nodes-before": (
                "                node = parent_of(sampling, b, node)\n",
                "                node = node - 1\n",
                f"{FILE}::test_filters_and_penalties",
            ),
            "triton-tree-q-of-first-children-only": (
                "        return found > 0",
                "        return found == i",
                RULES,
            ),
        },
    ),
    *mutations(
        f"{FOLDER}/draft_children.py",
        f"{FILE}::test_several_blocks {FILE}::test_as_many_children_as_allowed",
        {
            "triton-tree-sampled-children-are-the-likely-ones": (
                "arrival = w / exponential(uniform(bits))",
                "arrival = w / exponential(uniform(bits * 0))",
            ),
            "triton-tree-a-block-has-one-child": (
                "heads = tl.where(blocks == its_block, tl.max(score, 0), heads)",
                "heads = tl.where(blocks == its_block, -INFINITY, heads)",
            ),
            "triton-tree-ties-are-lost": ("| ((score == head) & (ids > token))", ""),
        },
    ),
]
