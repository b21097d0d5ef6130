"""Of trees in the cache and in steps: what nodes see, where they stand, what moves when a path is accepted, what a step
counts."""

from .mutation import Mutation, mutations

TREES = "tests/models/test_tree_attention.py"
MASKS = "tests/models/test_attention.py"
PLAN = "tests/models/test_cache_plan.py"
STEPS = "tests/loop/test_tree_step.py"
CHAINS = "tests/loop/test_sampled_trees.py -k 'chain or path'"

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
        "python/specdec/models/compaction.py",
        "tests/models/test_tree_attention.py::test_one_launch_moves_all_layers",
        {
            "compaction-moves-the-root": ("tl.load(lengths + row) + 1", "tl.load(lengths + row)"),
            "compaction-of-the-first-head": ("row * count + column // size", "row * count"),
            "compaction-moves-some-storages": ("torch.tensor([s.shape[1] for s in", "torch.tensor([1 for s in"),
            "compaction-of-the-first-part": ("tl.program_id(0) * BLOCK", "0 * BLOCK"),
        },
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
            "tree-step-without-the-table": (
                "table=step.table,\n                depth",
                "table=None,\n                depth",
            ),
            "tree-step-repeats-its-noise": ('"position": step.position,', '"position": step.position * 0,'),
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
            "tree-report-tests-nothing-below-the-path": (
                "((torch.atleast_2d(drafts.parents) == last) & counts).any(1)",
                "0",
            ),
            "tree-report-counts-nodes-for-depths": (
                "tree.depths[:, 1:] * counts, (1, 0)).amax(1)",
                "counts.long(), (1, 0)).sum(1)",
            ),
        },
    ),
    *mutations(
        "python/specdec/loop/tree_step.py",
        CHAINS,
        {
            "tree-step-tests-by-another-rule": (
                "drafts.logits is None else g.rule,",
                "drafts.logits is None else 'token',",
            ),
            "tree-log-probs-of-the-next-step": (
                "        log_probs = self.log_probs(plan, step, logits, processed, out) if plan.log_probs else None\n"
                "        emitted = self.rows.advance(out)\n",
                "        emitted = self.rows.advance(out)\n"
                "        log_probs = self.log_probs(plan, step, logits, processed, out) if plan.log_probs else None\n",
            ),
            "tree-log-probs-before-processors": (
                "step, on_path(processed, out.path), tokens)",
                "step, on_path(logits, out.path), tokens)",
            ),
            "tree-raw-log-probs-after-processors": (
                "on_path(logits, out.path), out",
                "on_path(processed, out.path), out",
            ),
            "tree-log-probs-without-earlier-tokens": ("drafts=tokens[:, :depth],", "drafts=tokens[:, :depth] * 0,"),
        },
    ),
    *mutations(
        "python/specdec/loop/step_report.py",
        CHAINS,
        {
            "tree-rows-of-the-parents": ("pad(path[:, :-1] + 1, (1, 0))", "pad(path[:, :-1], (1, 0))"),
            "tree-logits-of-the-first-nodes": ("if isinstance(self.out, TreeStep):", "if False:"),
            "tree-report-forgets-bad-drafts": (
                "columns.append(drafts.status * inner)",
                "columns.append(drafts.status * inner * 0)",
                "tests/loop/test_sampled_trees.py -k bad",
            ),
            "tree-report-counts-depths-for-nodes": (
                "torch.stack((counts.sum(1), drafted,",
                "torch.stack((drafted, drafted,",
                STEPS,
            ),
        },
    ),
    *mutations(
        "python/specdec/loop/typical.py",
        "tests/loop/test_typical.py -k 'row or path or refused'",
        {
            "typical-trusts-sharp-distributions": (
                "(-torch.special.entr(p).sum(-1))",
                "(torch.special.entr(p).sum(-1))",
            ),
            "typical-takes-the-first-of-longest-paths": (
                "depths[:, 1:] + 0.5 * of_path.exp()",
                "depths[:, 1:].float()",
            ),
            "typical-takes-the-most-likely-path": ("depths[:, 1:] + 0.5 * of_path.exp()", "of_path.exp()"),
            "typical-accepts-below-what-is-unlikely": ("~(above & ~likely[:, None]).any(-1)", "likely"),
            "typical-draws-with-the-noise-of-the-step": (
                "(position[:, None] + depths)",
                "(position[:, None] + 0 * depths)",
            ),
            "typical-ignores-filters": ("~one_hot, logits < cutoff[:, :, None])", "~one_hot, False)"),
            "typical-tells-of-faults-of-drafts": (
                "status.gather(1, best) // _DRAFT_TO_TARGET",
                "status.gather(1, best)",
            ),
        },
    ),
    *mutations(
        "python/specdec/decoder.py",
        "tests/loop/test_typical.py",
        {
            "typical-is-for-chains-too": ("            if not self.nodes:\n", "            if False:\n"),
            "typical-ignores-penalties": ("(penalised or entry.bias", "(entry.bias"),
        },
    ),
    *mutations(
        "python/specdec/evaluation/contenders.py",
        "tests/loop/test_typical.py -k refused",
        {"compare-takes-lossy-rules": ("        Rule(self.rule)  #", "        str(self.rule)  #")},
    ),
    *mutations(
        "python/specdec/sampling/processors.py",
        CHAINS,
        {
            "tree-processors-see-no-ancestors": (
                "paths[node] = [*paths[parent], token]",
                "paths[node] = [*text, token]",
            ),
            "tree-processors-change-the-parents-row": (
                "self._process(logits, b, node + 1, paths[node])",
                "self._process(logits, b, parent + 1, paths[node])",
            ),
        },
    ),
    *mutations(
        "python/specdec/drafters/guard.py",
        "tests/loop/test_sampled_trees.py -k fit",
        {"tree-q-is-not-checked": ("_check_rows(rows, (tree.logits, None, None, tree.d2t), tree, generation)", "pass")},
    ),
    *mutations(
        "python/specdec/loop/saved_costs.py",
        "tests/loop/test_sampled_trees.py -k learned",
        {"costs-of-trees-are-those-of-chains": ('**({"nodes": nodes} if nodes else {}),', "")},
    ),
    *mutations(
        "python/specdec/hf/speculate.py",
        "tests/hf/test_speculate.py -k trees",
        {"speculate-drops-the-tree": ("tree=self._tree,", "")},
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
            "tree-rules-without-samples": ('not getattr(self.drafter, "samples_trees", False):', "False:"),
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
