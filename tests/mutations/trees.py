"""Mutations of the tree operations: above all the ways in which trees of other projects have been biased."""

from .mutation import Mutation, mutations

EXACT = "tests/kernels/test_trees_exact.py"
TREES = "tests/kernels/test_trees.py"
TEXTS = "tests/kernels/test_trees_chi_square.py"

MUTATIONS: list[Mutation] = [
    *mutations(
        "specdec_kernels/backends/reference_tree.py",
        EXACT,
        {
            # TensorRT-LLM: siblings are tested against the same p.
            "tree-reference-p-is-not-updated-between-siblings": (
                "p = torch.where(rejected[:, None], residual / whole[:, None], p)",
                "p = torch.where(there[:, None] & ~rejected[:, None], residual / whole[:, None], p)",
            ),
            "tree-reference-q-is-not-renormalised": (
                "rest = rest / rest.sum(-1, keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)",
                "rest = rest / 1.0",
            ),
            "tree-reference-q-keeps-the-rejected-child": ("rest = q.scatter(1, x, 0.0)", "rest = q.clone()"),
            # The most likely children are verified as if they were sampled.
            "tree-reference-sampled-children-are-the-likely-ones": (
                "(weights / -torch.log1p(-u)).sort(",
                "(weights / -torch.log1p(-u).mean()).sort(",
                f"{TEXTS}::test_one_step",
            ),
            # Anticipation: what was sampled is dropped because of its own probability.
            "tree-reference-unlikely-children-are-dropped": (
                "nothing = (column < 0) | bad[:, None]",
                "nothing = (column < 0) | bad[:, None]\n"
                "    nothing = nothing | (q.probability.gather(1, column.clamp(min=0)) < 0.2)",
            ),
            # q of a reduced vocabulary, scattered to the target's as logits of 0 instead of -inf.
            "tree-reference-reduced-q-has-the-whole-vocabulary": (
                "    return fault, whole, q.margin",
                "    return fault, (whole + (len(ids) < self.vocabulary) / self.vocabulary) / 2, q.margin",
                f"{EXACT}::test_special_cases",
            ),
            "tree-reference-block-forgets-the-joint-ratio": ("h * p_x / q_x, 0.0)", "p_x / q_x, 0.0)"),
            "tree-reference-block-keeps-the-ratio-after-a-rejection": (
                "h, h_error = torch.where(rejected, new_h, h), torch",
                "h, h_error = torch.where(rejected, h, h), torch",
            ),
            "tree-reference-children-of-rejected-nodes": (
                "below = self.visit(1 + child, passed, h",
                "below = self.visit(1 + child, there, h",
            ),
            "tree-reference-penalties-of-siblings": (
                "x = adjusted(self.target[:, row], self.sampling, self.position, self.drafts[:, self.nodes[row]])",
                "x = adjusted(self.target[:, row], self.sampling, self.position, self.drafts[:, :len(self.nodes[row])])",
                f"{EXACT}::test_trees",
            ),
        },
    ),
    *mutations(
        "specdec_kernels/backends/reference_tree.py",
        f"{TREES} -k 'reference or number'",
        {
            "tree-reference-recovery-shares-the-childrens-noise": (
                "(chain.RECOVER_BLOCK, chain.RECOVER_TOKEN)",
                "(chain.RECOVER_BLOCK, chain.DRAFT_TOKEN)",
            ),
            "tree-reference-noise-by-depth": (
                "self.position, node, chain.ACCEPT)",
                "self.position, len(self.nodes[node + 1]) - 1, chain.ACCEPT)",
            ),
            "tree-reference-noise-by-absolute-position": (
                "self.position, node, chain.ACCEPT)",
                "self.position + len(self.nodes[node + 1]) - 1, 0, chain.ACCEPT)",
            ),
            "tree-reference-walks-with-the-steps-position": (
                "self.seed, self.position + len(self.nodes[row]))",
                "self.seed, self.position)",
            ),
            "tree-reference-num-nodes-ignored": ("looking & (child < self.num_nodes)", "looking & (child >= 0)"),
            "tree-reference-faults-off-the-path-are-told": (
                "self.status = torch.where(where, flags, self.status)",
                "self.status = self.status | flags",
            ),
        },
    ),
    *mutations(
        "specdec_kernels/validation.py",
        "tests/kernels/test_trees_validation.py",
        {
            "tree-a-node-may-be-its-own-parent": (
                "(parents >= torch.arange(nodes))",
                "(parents > torch.arange(nodes))",
            ),
        },
    ),
]
