"""Mutations of the tree operations: above all the ways in which trees of other projects have been biased."""

from .mutation import Mutation, mutations

EXACT = "tests/kernels/test_trees_exact.py"
TREES = "tests/kernels/test_trees.py"
TEXTS = "tests/kernels/test_trees_chi_square.py"
PARITY = f"{TREES} -k 'parity or chain'"
CORNERS = "tests/kernels/test_trees_corners.py -k cpu"

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
                f"{TEXTS}::test_whole_texts -k reference",
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
            "tree-reference-no-mass-rejects": (
                "(mass == 0) & (h == 1) & (p_x > 0)",
                "(mass < 0) & (h == 1) & (p_x > 0)",
                "tests/kernels/test_trees_corners.py::test_a_residual_without_mass -k reference",
            ),
            "tree-reference-num-nodes-ignored": ("looking & (child < self.num_nodes)", "looking & (child >= 0)"),
            "tree-reference-faults-off-the-path-are-told": (
                "self.status = torch.where(where, flags, self.status)",
                "self.status = self.status | flags",
            ),
        },
    ),
    *mutations(
        "csrc/core/tree.h",
        PARITY,
        {
            "tree-p-is-not-updated-between-siblings": (
                "ratio(log_p, log_q) - 1.0f / siblings.scale;",
                "ratio(log_p, log_q);",
            ),
            "tree-p-is-not-renormalised": ("* siblings.left / siblings.mass;", "* siblings.left;"),
            "tree-q-is-not-renormalised": ("beyond * siblings.left / siblings.mass", "beyond / siblings.mass"),
            "tree-block-keeps-the-ratio-after-a-rejection": ("if (joint) after.h", "if (false) after.h"),
            "tree-residuals-forget-earlier-siblings": (
                "return h / (h / siblings.scale + siblings.mass);",
                "return h / siblings.mass;",
            ),
            "tree-residuals-ignore-what-is-left-of-q": (
                "const float h = siblings.h * siblings.left;",
                "const float h = siblings.h;",
            ),
        },
    ),
    *mutations(
        "csrc/cpu/verify_tree.cpp",
        PARITY,
        {
            "tree-q-keeps-the-rejected-child": ("changed |= patch->logit == -INFINITY;", "changed = false;"),
            "tree-what-is-left-of-q-is-a-difference-from-one": (
                "mass, left_of(place), joint_);",
                "mass, place.siblings.left - expf(place.read.q.log_probability(place.rejected.back())), joint_);",
                f"{TEXTS}::test_second_children_of_a_peaked_q",
            ),
            "tree-a-rejected-token-may-come-again": (
                "rejected ? -INFINITY : place",
                "false ? -INFINITY : place",
                CORNERS,
            ),
            "tree-reduced-q-loses-another-token": ("column = id - ids;", "column = ids - ids;"),
            "tree-siblings-share-noise": (
                "const Noise noise = noise_of(b, node);",
                "const Noise noise = noise_of(b, 0);",
            ),
            "tree-recovers-with-the-roots-noise": (
                "const Noise noise = noise_of(sequence.b, row);",
                "const Noise noise = noise_of(sequence.b, 0);",
            ),
            "tree-walks-with-the-steps-position": ("  noise.position += depth;\n", "  noise.position += 0 * depth;\n"),
            "tree-a-node-below-is-kept-only-if-its-parent-passes": ("if (u < ratio || below)", "if (u < ratio)"),
            "tree-block-tests-with-the-first-ratio": ("place.siblings.h = sequence.h;", "place.siblings.h = 1.0f;"),
            "tree-penalties-forget-the-node": (
                "for (size_t j = 1; j < sequence.places.size(); ++j)",
                "for (size_t j = 1; j + 1 < sequence.places.size(); ++j)",
            ),
            "tree-recovers-from-p": (
                "place.rejected.empty() ? draw(",
                "place.rejected.size() < 99 ? draw(",
            ),
            "tree-no-mass-rejects": ("mass == 0.0f && place.siblings.h == 1.0f", "mass < 0.0f", CORNERS),
            "tree-faults-off-the-path-are-told": (
                "      sequence.places.pop_back();",
                "      params_.status[sequence.b] |= place.read.flags;\n      sequence.places.pop_back();",
                CORNERS,
            ),
            "tree-draft-fault-unseen": (
                "if (const int32_t fault = row_fault(place.q.max)) {",
                "if (const int32_t fault = 0 * row_fault(place.q.max)) {",
                CORNERS,
            ),
        },
    ),
    *mutations(
        "csrc/cpu/tree.h",
        PARITY,
        {
            "tree-num-nodes-is-ignored": ("std::min(params.num_nodes[b], params.nodes);", "params.nodes;"),
            "tree-depth-is-one-less": ("level[row] >= params.depth)", "level[row] + 1 >= params.depth)"),
            "tree-siblings-in-reverse": (
                "(last[row] < 0 ? first_[row] : next_[last[row]]) = node;",
                "next_[node] = first_[row], first_[row] = node;",
            ),
        },
    ),
    *mutations(
        "csrc/cpu/draft_children.cpp",
        PARITY,
        {
            "tree-children-share-noise-between-nodes": (
                "static_cast<uint32_t>(params_.offset[b])};",
                "static_cast<uint32_t>(0 * params_.offset[b])};",
            ),
            "tree-unlikely-children-are-dropped": (
                "const bool there = i < static_cast<int64_t>(tokens.size());",
                "const bool there = i < static_cast<int64_t>(tokens.size()) && log_q(row, stats, tokens[i]) > -2.0f;",
            ),
            "tree-children-in-draft-ids": ("there ? target_id(tokens[i])", "there ? tokens[i]"),
            "tree-likely-children-of-a-greedy-sequence": (
                "task.temperature = 1.0f;",
                "task.temperature = 0.0f;",
            ),
        },
    ),
    *mutations(
        "csrc/cpu/block_draws.h",
        PARITY,
        {
            "tree-sampled-children-are-the-likely-ones": (
                "scores[i] /= exponential(uniform(words[i]));",
                "scores[i] /= exponential(uniform(words[0]));",
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
