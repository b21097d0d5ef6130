"""Of drafters without a model: what they remember, find and propose."""

from .mutation import Mutation, mutations

LOOKUP = "tests/drafters/test_prompt_lookup.py"
SUFFIX = "tests/drafters/test_suffix.py"

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
            "suffix-reads-while-another-writes": ("memory is None else memory.reading", "True else memory.reading"),
        },
    ),
]
