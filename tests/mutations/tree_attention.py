"""Of trees in the cache and in steps: what nodes see, where they stand, what moves when a path is accepted, what a step
counts."""

from .mutation import Mutation, mutations

TREES = "tests/models/test_tree_attention.py"
MASKS = "tests/models/test_attention.py"
PLAN = "tests/models/test_cache_plan.py"
STEPS = "tests/loop/test_tree_step.py"

MUTATIONS: list[Mutation] = [
    *mutations(
        "python/specdec/models/tree.py",
        TREES,
        {
            "tree-misses-distant-ancestors": (
                "range(max(nodes - 1, 0).bit_length())",
                "range(max(nodes - 1, 0).bit_length() - 1)",
            ),
            "tree-has-positions-by-order": ("first + self.depths, 0)", "first + index, 0)"),
            "tree-pads-into-slot-0": ("first + index, trash)", "first + index, 0)"),
        },
    ),
    *mutations(
        "python/specdec/models/attention.py",
        f"{MASKS} {TREES}",
        {
            "tree-sees-siblings": (" & (tree.ancestors[own, i, token] | ~in_tree)", ""),
            "tree-window-counts-slots": (
                "torch.where(in_tree, root + tree.depths[own, token], slot)",
                "torch.where(in_tree, slot.minimum(position), slot)",
            ),
            "tree-of-the-first-sequence-for-all": ("own = b if tree.depths.shape[0] > 1 else b * 0", "own = b * 0"),
            "tree-reads-up-to-the-last-position": (
                "last = torch.where(positions > 0, slots, 0).amax(1)",
                "last = positions.amax(1)",
            ),
        },
    ),
    *mutations(
        "python/specdec/models/kv_cache.py",
        TREES,
        {
            "cache-accepts-the-node-before": ("accepted, root + 1 + path,", "accepted, root + path,"),
            "cache-accepts-into-the-root": ("torch.arange(1, path.shape[1] + 1,", "torch.arange(path.shape[1],"),
            "cache-overwrites-accepted-nodes": (
                "flat.index_copy_(0, target, flat.index_select(0, source))",
                "[flat[to].copy_(flat[at]) for to, at in reversed([*zip(target, source)])]",
            ),
            "cache-leaves-accepted-values": (
                "for states in self.storage():\n            heads,",
                "for states in self.storage()[::2]:\n            heads,",
            ),
        },
    ),
    *mutations(
        "python/specdec/models/cached_model.py",
        TREES,
        {
            "trees-without-positions": ("return None if self._takes_positions else", "return None if True else"),
            "trees-are-masked-as-chains": (
                "self._mask(positions, visible, tree), tree)",
                "self._mask(positions, visible), tree)",
            ),
        },
    ),
    *mutations(
        "python/specdec/models/supported.py",
        TREES,
        {"trees-are-not-tried-first": ("if cached.lacks_trees is not None or _is_known(cached.model):", "if True:")},
    ),
    *mutations(
        "python/specdec/models/cache_plan.py",
        PLAN,
        {"plan-has-no-room-for-nodes": ("step * step - nodes - 1", "step * step - 1")},
    ),
    *mutations(
        "python/specdec/loop/tree_step.py",
        STEPS,
        {
            "tree-step-leaves-accepted-keys": ("        g.target_cache.compact(out.path)\n", ""),
            "tree-step-stops-short-of-the-room": ("(tree.depths[:, 1:] <= step", "(tree.depths[:, 1:] < step"),
            "tree-step-without-the-table": ("table=step.table,", "table=None,"),
            "tree-step-repeats-its-noise": ("position=step.position,", "position=step.position * 0,"),
            "tree-step-counts-what-is-no-token": (" | (drafts.tokens >= self.target.vocab_size)", ""),
            "tree-step-counts-below-what-is-no-token": (
                "below = (tree.ancestors[:, 1:, 1:] & none[:, None]).any(-1)",
                "below = none",
            ),
        },
    ),
    *mutations(
        "python/specdec/loop/step_report.py",
        STEPS,
        {
            "tree-report-tests-nothing-below-the-path": ("((parents == last) & counts).any(1)", "0"),
            "tree-report-counts-nodes-for-depths": (
                "tree.depths[:, 1:] * counts, (1, 0)).amax(1)",
                "counts.long(), (1, 0)).sum(1)",
            ),
        },
    ),
    *mutations(
        "python/specdec/loop/batch.py",
        STEPS,
        {"tree-step-sees-too-few-slots": ("max(num_drafts, self.config.nodes)", "num_drafts")},
    ),
    *mutations(
        "python/specdec/decoder.py",
        STEPS,
        {
            "tree-has-no-slots": ("self.target.capacity(longest, self._tree_slots)", "self.target.capacity(longest)"),
            "tree-falls-back-to-another-rule": (
                "rule or (Rule.COUPLED if self._takes_trees else Rule.TOKEN)",
                "rule or Rule.TOKEN",
            ),
        },
    ),
    *mutations(
        "python/specdec/drafters/branching.py",
        STEPS,
        {"branches-share-equal-tokens-alone": ("self._children.get((node, token))", "self._children.get((-1, token))")},
    ),
    *mutations(
        "python/specdec/drafters/prompt_lookup.py",
        STEPS,
        {
            "lookup-branches-from-short-ngrams": ("sorted(self._ends, reverse=True)", "sorted(self._ends)"),
            "lookup-branches-from-the-last-occurrence-alone": ("end = self._before[n].get(end)", "end = None"),
        },
    ),
]
