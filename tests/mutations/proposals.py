"""Of drafters without a model: what they remember, find and propose."""

from .mutation import Mutation, mutations

LOOKUP = "tests/drafters/test_prompt_lookup.py"
PREDICTED = "tests/drafters/test_predicted.py"
SUFFIX = "tests/drafters/test_suffix.py"
SUFFIX_TREES = "tests/drafters/test_suffix_trees.py -k 'likeliest or examples'"
PRODUCTS = "tests/drafters/test_product_trees.py"
PATHS = f"{PRODUCTS} -k 'paths or probabilities'"

MUTATIONS: list[Mutation] = [
    *mutations(
        "python/specdec/drafters/prompt_lookup.py",
        LOOKUP,
        {
            "lookup-finds-the-end-itself": (
                "for end in range(max(first, n), known):",
                "for end in range(max(first, n), known + 1):",
            ),
            "lookup-misses-what-came-without-drafts": ("max(first, n), known)", "max(first, n, known - 5), known)"),
            "lookup-drafts-more-than-allowed": ("propose(text, most) if", "propose(text, step.num_drafts) if"),
        },
    ),
    *mutations(
        "python/specdec/drafters/copying.py",
        LOOKUP,
        {
            "lookup-drafts-after-an-end": ("if token in ends", "if token in ()"),
            "lookup-leaves-the-end-out": ("enumerate(proposal, 1) if", "enumerate(proposal) if"),
        },
    ),
    *mutations(
        "python/specdec/drafters/suffix_automaton.py",
        SUFFIX,
        {
            "automaton-shares-transitions-of-split-states": ("transitions[old].copy()", "transitions[old]"),
            "automaton-separates-alike": ("self._separators += 1", "self._separators = 1"),
            "cursor-sees-what-came-later": (" and first_end[longer] <= limit", ""),
        },
    ),
    *mutations(
        "python/specdec/drafters/suffix.py",
        SUFFIX,
        {
            "suffix-memory-for-all-by-default": (
                "        self.memory, self.min_match,",
                '        memory = memory or globals().setdefault("everyone", SuffixMemory())\n'
                "        self.memory, self.min_match,",
            ),
            "suffix-goes-on-into-the-next-text": ("lambda token: token >= 0", "lambda token: True"),
            "suffix-memory-without-bound": ("if self._size <= self.max_tokens:", "if True:"),
            "suffix-memory-rebuilt-while-in-use": (
                "        automaton = SuffixAutomaton()\n",
                "        automaton = self._automaton\n        automaton.__init__()\n",
            ),
            "suffix-serves-nobody-by-a-memory": (
                "        if owner is None:\n            return None\n",
                "",
                f"{SUFFIX} -k owner",
            ),
            "suffix-memories-are-one": (
                "self._memories.setdefault(owner, ",
                "self._memories.setdefault(0, ",
                f"{SUFFIX} -k owner",
            ),
            "suffix-forgets-who-came-first": (
                "            self._memories.move_to_end(owner)\n",
                "",
                f"{SUFFIX} -k owner",
            ),
            "suffix-feeds-the-next-owner": (
                "memory, self.memories[row] = self.memories[row], None",
                "memory = self.drafter.memory_of(next(filter(None, self.owners), None))",
                f"{SUFFIX} -k owner",
            ),
            "suffix-reads-while-another-writes": ("memory is None else memory.reading", "True else memory.reading"),
        },
    ),
    *mutations(
        "python/specdec/drafters/predicted.py",
        PREDICTED,
        {
            "predicted-q-is-the-models": (
                "logits = drafts.logits.index_fill(0, rows, -torch.inf)",
                "logits = drafts.logits.clone()",
            ),
            "predicted-q-has-the-models-statistics": ("_replace(logits=logits, stats=None)", "_replace(logits=logits)"),
            "predicted-q-in-another-column": ("ids if d2t is None else torch.searchsorted(d2t, ids)", "ids"),
            "predicted-compact-q-is-the-models": (
                "drafts.compact[1].index_fill(0, rows, -torch.inf)",
                "drafts.compact[1].clone()",
            ),
            "predicted-drafts-without-a-column": ("[*takewhile(known.__contains__, own)]", "own"),
            "predicted-rows-shifted": (
                "rows = drafts.widened(columns), torch.tensor([*proposals]",
                "rows = drafts.widened(columns), torch.tensor([*range(len(proposals))]",
            ),
            "predicted-model-misses-tokens": ("if step.allowed[row] and row not in proposals}", "if False}"),
            "predicted-model-sees-its-own-drafts-only": (
                "for row in proposals if any(allowed)",
                "for row in () if any(allowed)",
            ),
            "predicted-model-shown-too-little": ("min(start, self._behind.get(row, start))", "start"),
            "predicted-steps-run-ahead": ("return bool(self.places or self._behind) or other", "return other"),
            "predicted-stays-where-it-was": (
                "                return self._last\n        length, end",
                "                pass\n            return self._last\n        length, end",
            ),
            "predicted-finds-the-first-place": ("range(max(self._last + 1, end), ", "range(end, "),
            "predicted-is-sure-of-any-token": ("SURE = 2", "SURE = 1"),
            "predicted-counts-the-prompt": ("Place(prediction, len(prompt))", "Place(prediction, 0)"),
        },
    ),
    *mutations(
        "python/specdec/drafters/suffix_automaton.py",
        SUFFIX_TREES,
        {
            "automaton-counts-of-split-states-begin-anew": ("count.append(count[old])", "count.append(1)"),
            "cursor-follows-what-came-later": ("if t >= 0 and first_end[after] <= self._limit]", "if t >= 0]"),
            "suffix-branches-end-with-the-text": (
                "        if state == self._last:\n            state = self._link[state]\n        if state",
                "        if state",
            ),
        },
    ),
    *mutations(
        "python/specdec/drafters/suffix_branches.py",
        SUFFIX_TREES,
        {
            "suffix-branches-count-kinds": (
                "weight=match.weight * n / whole)",
                "weight=match.weight / len(following))",
            ),
            "suffix-branches-score-the-token-alone": ("weight=match.weight * n / whole)", "weight=n / whole)"),
            "suffix-branches-are-longer-than-allowed": ("if depth < match.most:", "if depth < 4:"),
        },
    ),
    *mutations(
        "python/specdec/drafters/suffix.py",
        SUFFIX_TREES,
        {"suffix-tree-changes-within-a-step": ("        if (made := ", "        if False and (made := ")},
    ),
    *mutations(
        "python/specdec/drafters/tree_paths.py",
        PATHS,
        {
            "product-tree-scores-the-token-alone": (
                "_best(scores[:, self.prefix] + log_q[:, depth, self.rank], nodes)",
                "_best(log_q[:, depth, self.rank].where(scores[:, self.prefix] > -torch.inf, -torch.inf), nodes)",
            ),
            "product-tree-parents-one-off": ("+ self.prefix[order])", "+ self.prefix[order] - 1)"),
            "product-tree-of-another-marginal": ("log_q[:, depth, self.rank]", "log_q[:, 0, self.rank]"),
            "product-tree-tokens-of-another-depth": ("tokens[:, depth].gather", "tokens[:, 0].gather"),
            "product-tree-with-too-few-pairs": ("min(nodes // (i + 1), ", "min(max(nodes // (i + 1) - 1, 1), "),
            "product-tree-holds-another-chain": (": self.chain * nodes : nodes]", "1 : self.chain * nodes : nodes]"),
            "product-tree-child-before-its-parent": ("self.nodes, log_q.clamp(max=0)", "self.nodes, log_q"),
            "static-paths-of-the-first-marginal": ("tokens[:, self._depth, ", "tokens[:, 0 * self._depth, "),
        },
    ),
    *mutations(
        "python/specdec/drafters/product_tree.py",
        f"{PRODUCTS} -k 'drawn or chain'",
        {
            "product-trees-without-a-chain": ("BestPaths(nodes, device, nodes // 2)", "BestPaths(nodes, device)"),
            "walked-trees-are-drawn-by-another-race": (
                "                    position=step.position + depth,\n",
                "                    position=step.position + depth + 1,\n",
            ),
            "sampled-tree-siblings-share-noise": ('"offset": row,', '"offset": 0,'),
            "sampled-tree-with-q-of-another-depth": (
                "[marginals[depth] for depth",
                "[marginals[max(depth - 1, 0)] for depth",
            ),
        },
    ),
    *mutations(
        "python/specdec/models/kv_cache.py",
        f"{PRODUCTS} -k given_paths",
        {"features-of-nodes-stay-where-they-were": ("self.features.move(old, new)", "pass")},
    ),
    *mutations(
        "python/specdec/models/features.py",
        f"{PRODUCTS} -k features",
        {
            "features-move-without-their-tokens": (
                "(self.features.flatten(0, 1), self.tokens.view(-1))",
                "(self.features.flatten(0, 1),)",
            )
        },
    ),
]
