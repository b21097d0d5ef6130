"""Of the reference in PyTorch, and of the checks before all backends."""

from .mutation import Mutation, mutations

MUTATIONS: list[Mutation] = [
    *mutations(
        "specdec_kernels/backends/reference.py",
        "tests/kernels/test_exact.py tests/kernels/test_exact_rules.py",
        {
            "reference-residual-not-subtracted": (
                "torch.where(drafted[:, None], (p.probability - q).clamp(min=0.0), p.probability)",
                "p.probability",
            ),
            "reference-ratio-inverted": ("(log_p_x - log_q_x).exp()", "(log_q_x - log_p_x).exp()"),
            "reference-block-keeps-too-little": (
                "mass / (mass + 1 - w), 1.0), w)",
                "mass / (mass + 1 - w).clamp(min=1.0), 1.0), w)",
            ),
            "reference-block-joint-ratio-beyond-one": ("(w * ratio).clamp(max=1.0))", "w * ratio)"),
            "reference-block-keyed-by-position-alone": (
                "self.position, j, ACCEPT)",
                "self.position + j, 0, ACCEPT)",
                "tests/kernels/test_extreme_noise.py tests/kernels/test_exact_noise.py tests/kernels/test_randomness.py",
            ),
            "reference-masks-one-row-behind": (
                "else self.allowed[:, j]\n",
                "else self.allowed[:, max(j - 1, 0)]\n",
                "tests/kernels/test_exact.py -k allowed",
            ),
            "reference-u-in-the-closed-interval": (
                "return u.clamp(max=1 - 2.0**-24).double()",
                "return u.double()",
                "tests/kernels/test_extreme_noise.py tests/kernels/test_exact_noise.py tests/kernels/test_randomness.py",
            ),
        },
    ),
    *mutations(
        "specdec_kernels/backends/reference_distribution.py",
        "tests/kernels/test_filters.py -k reference",
        {
            "reference-top-p-before-top-k": ("    weight = torch.where(falling >= by_k[:, None], weight, 0.0)\n", ""),
            "reference-top-p-of-raw-logits": (
                "((falling - largest[:, None]) / temperature[:, None]).exp()",
                "(falling - largest[:, None]).exp()",
            ),
            "reference-tie-dropped": (
                "torch.where(x >= cutoff.double()[:, None]",
                "torch.where(x > cutoff.double()[:, None]",
            ),
            "reference-drafts-not-counted": (
                "count = count + (columns == drafts[:, i : i + 1])",
                "pass",
                "tests/kernels/test_penalties.py -k reference",
            ),
            "reference-ends-of-the-first-row": (
                "early = position + drafts.shape[1] <",
                "early = position <",
                "tests/kernels/test_penalties.py -k reference",
            ),
        },
    ),
    *mutations(
        "specdec_kernels/backends/reference_tree.py",
        "tests/kernels/test_trees.py -k 'reference or number'",
        {
            "tree-reference-p-is-not-updated-between-siblings": (
                "p = torch.where(rejected[:, None], residual / whole[:, None], p)",
                "p = torch.where(there[:, None] & ~rejected[:, None], residual / whole[:, None], p)",
                "tests/kernels/test_trees_exact.py",
            ),
            "tree-reference-sampled-children-are-the-likely-ones": (
                "(weights / -torch.log1p(-u)).sort(",
                "(weights / -torch.log1p(-u).mean()).sort(",
                "tests/kernels/test_trees_chi_square.py::test_whole_texts -k reference",
            ),
            "tree-reference-block-forgets-the-joint-ratio": (
                "h * p_x / q_x, 0.0)",
                "p_x / q_x, 0.0)",
                "tests/kernels/test_trees_exact.py",
            ),
            "tree-reference-recovery-shares-the-childrens-noise": (
                "(chain.RECOVER_BLOCK, chain.RECOVER_TOKEN)",
                "(chain.RECOVER_BLOCK, chain.DRAFT_TOKEN)",
            ),
            "tree-reference-walks-with-the-steps-position": (
                "self.seed, self.position + len(self.nodes[row]))",
                "self.seed, self.position)",
            ),
            "tree-reference-faults-off-the-path-are-told": (
                "self.status = torch.where(where, flags, self.status)",
                "self.status = self.status | flags",
            ),
        },
    ),
    *mutations(
        "specdec_kernels/backends/native.py",
        "tests/kernels/test_instruction_sets.py",
        {
            "instruction-set-ignored": ("        extension.use_instruction_set(asked)\n", ""),
            "architecture-letter-ignored": ("(later and not exact)", "later", "tests/kernels/test_imports.py"),
        },
    ),
    *mutations(
        "specdec_kernels/validation.py",
        "tests/kernels/test_validation.py",
        {
            "d2t-may-hold-V": ("d2t[-1] >= vocabulary", "d2t[-1] > vocabulary"),
            "tree-a-node-may-be-its-own-parent": (
                "(parents >= torch.arange(nodes))",
                "(parents > torch.arange(nodes))",
                "tests/kernels/test_trees_validation.py",
            ),
        },
    ),
]
