"""Of drafters: what they draw, hand over and propose."""

from .mutation import Mutation, mutations

MUTATIONS: list[Mutation] = [
    *mutations(
        "python/specdec/drafters/drawing.py",
        "tests/loop/test_handed_over_q.py",
        {
            "loop-withdraws-unlikely-drafts": (
                'Drafts(column("tokens"), ',
                'Drafts(column("tokens").masked_fill(column("log_q") < -2.0, -1), ',
                "tests/loop/test_sampled_texts.py tests/loop/test_settings.py",
            ),
            "loop-keeps-q-in-bfloat16": (
                "logits=torch.stack(self.rows, 1),",
                "logits=torch.stack(self.rows, 1).bfloat16(),",
            ),
            "loop-hands-over-statistics-of-the-first-draft": (
                'stats=(column("cutoff"), column("lse"))',
                'stats=(column("cutoff"), column("lse")[:, :1].repeat(1, len(self.draws)))',
            ),
            "growth-draws-a-child-twice": (
                "logits = logits.scatter(1, column, -torch.inf)",
                "logits = logits.clone()",
                "tests/drafters/test_tree_growth.py -k 'drawn or shape or distribution'",
            ),
        },
    ),
    *mutations(
        "python/specdec/drafters/draft_window.py",
        "tests/drafters/test_draft_window.py -k missed",
        {
            "window-reads-what-it-has-from-the-wrong-place": (
                "max(start - gone, SINKS)",
                "start",
            ),
        },
    ),
    *mutations(
        "python/specdec/drafters/model.py",
        "tests/serving/test_serving_faults.py",
        {
            "drafter-leaves-a-row-as-it-was": (
                "self.cache.begin(row, 0 if self.parts is None else self.parts.begin(row))",
                "pass",
            ),
            "draft-models-state-is-copied": (
                "0 if self.cache.recurrent else count",
                "count",
                "tests/serving/test_prefix_reuse.py -k anew",
            ),
            "exit-catches-up": (
                "        if self.is_shared:\n            return\n        # The host",
                "        # The host",
                "tests/drafters/test_early_exit.py",
            ),
            "short-draft-is-fed-the-position-after-its-last": (
                "there = step.slots < end",
                "there = step.slots <= end",
                "tests/drafters/test_short_drafts.py",
            ),
            "short-draft-proposes-past-its-end": (
                "drafts.tokens.masked_fill(depths > allowed[:, None], -1)",
                "drafts.tokens",
                "tests/drafters/test_short_drafts.py -k perfect",
            ),
            "short-draft-reads-past-its-end": (
                "[: self.num_positions] for row in rows]",
                " for row in rows]",
                "tests/drafters/test_short_drafts.py -k shares",
            ),
            "model-moves-keys-one-slot-late": (
                "        cache.lengths = root\n",
                "        cache.lengths = root + 1\n",
                "tests/drafters/test_tree_growth.py -k 'probable or drawn'",
            ),
        },
    ),
    *mutations(
        "python/specdec/drafters/translation.py",
        "tests/drafters/test_universal.py",
        {
            "translation-repeats-the-seam": ("else tokens[end:]", "else tokens[end - 1 :]"),
            "translation-reads-half-characters": (
                "if not text.endswith(INCOMPLETE):\n                self._r",
                "if True:\n                self._r",
            ),
        },
    ),
    *mutations(
        "python/specdec/drafters/universal.py",
        "tests/drafters/test_universal.py",
        {
            "universal-trusts-a-key-that-was-not-stored": ("known[b] + drafted[b][:-1]", "known[b] + drafted[b]"),
        },
    ),
    *mutations(
        "python/specdec/drafters/tree_growth.py",
        "tests/drafters/test_tree_growth.py -k 'probable or plain_heads or shape'",
        {
            "growth-sees-another-nodes-ancestors": (
                "torch.cat((_rows(self.ancestors, parents), itself), 2)",
                "torch.cat((_rows(self.ancestors, parents.flip(1)), itself), 2)",
            ),
            "growth-offset-of-the-node-before": (
                "paths, offset=level.numbers + 1).tokens",
                "paths, offset=level.numbers.clamp(min=0)).tokens",
                "tests/drafters/test_tree_growth.py -k 'drawn or shape or distribution'",
            ),
            "growth-attention-reads-too-few-slots": (
                "return visible_slots(step.visible + more, capacity)",
                "return step.visible - 32",
                "tests/drafters/test_tree_growth.py",
            ),
        },
    ),
    *mutations(
        "python/specdec/drafters/tree_paths.py",
        "tests/drafters/test_product_trees.py -k 'paths or probabilities'",
        {
            "product-tree-scores-the-token-alone": (
                "_best(scores[:, self.prefix] + log_q[:, depth, self.rank], nodes)",
                "_best(log_q[:, depth, self.rank].where(scores[:, self.prefix] > -torch.inf, -torch.inf), nodes)",
            ),
            "static-paths-of-the-first-marginal": ("tokens[:, self._depth, ", "tokens[:, 0 * self._depth, "),
        },
    ),
    *mutations(
        "python/specdec/drafters/product_tree.py",
        "tests/drafters/test_product_trees.py -k 'drawn or chain'",
        {
            "product-trees-without-a-chain": ("BestPaths(nodes, device, nodes // 2)", "BestPaths(nodes, device)"),
            "sampled-tree-with-q-of-another-depth": (
                "[marginals[depth] for depth",
                "[marginals[max(depth - 1, 0)] for depth",
            ),
        },
    ),
    *mutations(
        "python/specdec/drafters/copying.py",
        "tests/loop/test_tree_step.py",
        {
            "branches-share-equal-tokens-alone": (
                "self._children.get((node, token))",
                "self._children.get((-1, token))",
            ),
        },
    ),
    *mutations(
        "python/specdec/drafters/suffix.py",
        "tests/drafters/test_suffix.py",
        {
            "suffix-memory-for-all-by-default": (
                "        self.memory, self.min_match,",
                '        memory = memory or globals().setdefault("everyone", SuffixMemory())\n        self.memory, self.min_match,',
            ),
            "suffix-reads-while-another-writes": ("memory is None else memory.reading", "True else memory.reading"),
        },
    ),
    *mutations(
        "python/specdec/drafters/heads/eagle3.py",
        "tests/drafters/test_head_formats.py -k 'official or specforge or speculators or two or tied or test_eagle or medusa'",
        {
            "eagle3-skips-fc": ("        return self.fc(states)", "        return states[..., : self.width]"),
        },
    ),
    *mutations(
        "python/specdec/drafters/heads/mtp.py",
        "tests/drafters/test_mtp.py",
        {
            "mtp-feature-before-embedding": ("if self.hidden_first else parts", "if not self.hidden_first else parts"),
        },
    ),
    *mutations(
        "python/specdec/drafters/heads/mtp_files.py",
        "tests/drafters/test_mtp_layouts.py",
        {
            "mtp-layers-share-a-place": ("decoder_layer(own_config, k) for", "decoder_layer(own_config, 0) for"),
        },
    ),
    *mutations(
        "python/specdec/drafters/heads/mtp_nemotron.py",
        "tests/drafters/test_mtp_layouts.py",
        {
            "mtp-projection-of-any-block": (" in _FIRST and block == 0", " in _FIRST"),
        },
    ),
    *mutations(
        "python/specdec/drafters/heads/mtp_files.py",
        "tests/drafters/test_mtp.py -k layouts",
        {
            "mtp-of-speculators-is-mimos": ("hidden_first = mimo and any(", "hidden_first = any("),
        },
    ),
    *mutations(
        "python/specdec/drafters/heads/dflash_files.py",
        "tests/drafters/test_head_formats.py -k other_kinds",
        {
            "dflash-of-speculators-takes-the-scale": ("scaled=not ours", "scaled=True"),
        },
    ),
    *mutations(
        "python/specdec/drafters/heads/drafter.py",
        "tests/drafters/test_dflash_walks.py",
        {
            # The first draft of which the head is not sure is verified if it is one that it likes.
            "confidence-looks-at-what-was-drawn": (
                "(sure >= self.confidence).cumprod(1)",
                "((sure >= self.confidence) | (drafts.tokens % 2 == 0)).cumprod(1)",
            ),
        },
    ),
    *mutations(
        "python/specdec/drafters/heads/drafter.py",
        "tests/drafters/test_tree_growth.py -k 'heads or chain'",
        {
            "heads-grow-one-place-late": ("root = step.lengths - 1 ", "root = step.lengths "),
            "heads-draft-one-place-early": (
                "step.positions[:, 1:count], ",
                "step.positions[:, : count - 1], ",
                "tests/drafters/test_head_formats.py -k 'official or specforge or speculators or two or tied or test_eagle or medusa'",
            ),
        },
    ),
    *mutations(
        "python/specdec/drafters/heads/drafter.py",
        "tests/serving/test_prefix_reuse.py -k head",
        {
            "head-keeps-what-another-token-followed": ("max(count - 1 - self.head.lookahead, 0)", "count"),
        },
    ),
    *mutations(
        "python/specdec/drafters/composite.py",
        "tests/drafters/test_composite.py",
        {
            # The drafter that agrees with the copy is left to draft: who drafts then depends on a drawn token.
            "composite-looks-at-what-was-drawn": (
                "        return replaced(drafts, proposals)._replace(copies=copies, share=share)",
                "        drafts = self.other.propose(step)\n"
                "        proposals = {row: copies.tokens[row] for row, first in enumerate(drafts.tokens[:, 0].tolist())\n"
                "                     if copies.tokens[row] and first != copies.tokens[row][0]}\n"
                "        return replaced(drafts, proposals)._replace(copies=copies, share=share)",
                "tests/drafters/test_composite.py -k sampled_texts",
            ),
        },
    ),
    *mutations(
        "python/specdec/drafters/beside.py",
        "tests/drafters/test_predicted.py",
        {
            "predicted-model-sees-its-own-drafts-only": (
                "for row in apart if any(allowed)",
                "for row in () if any(allowed)",
            ),
        },
    ),
    *mutations(
        "python/specdec/drafters/beside.py",
        "tests/serving/test_prefix_reuse.py -k predicted",
        {
            "predicted-model-hears-of-no-copies": (
                "            self.other.copy_rows(sources, rows, count)",
                "            pass",
            )
        },
    ),
]
