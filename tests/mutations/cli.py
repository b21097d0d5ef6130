"""Of the command line: options that do not arrive where they are to, and what is measured or told instead."""

from .mutation import Mutation, mutations

TREES = "tests/cli/test_cli_trees.py"

MUTATIONS: list[Mutation] = [
    *mutations(
        "python/specdec/cli/generate.py",
        TREES + " -k decoders",
        {"generate-drafts-chains": ("proposer, lengths, tree=nodes)", "proposer, lengths)")},
    ),
    *mutations(
        "python/specdec/cli/drafters.py",
        TREES + " -k draft_model",
        {"a-tree-of-the-draft-model-is-a-chain": ('TREE_NODES if tree is None and name == "tree" else tree', "tree")},
    ),
    *mutations(
        "python/specdec/cli/drafting.py",
        TREES + " -k 'decoders or go_together'",
        {
            "trees-are-verified-by-token": ('"token" if nodes is None else "coupled"', '"token"'),
            "embedded-heads-for-any-target": ("if target is not None and (ours", "if target is None and (ours"),
        },
    ),
    *mutations(
        "python/specdec/cli/job.py",
        TREES + " -k job",
        {
            "jobs-draft-chains": (
                "decoder = SpeculativeDecoder(loaded.target, drafter, k, tree=drafting.tree)\n    return",
                "decoder = SpeculativeDecoder(loaded.target, drafter, k)\n    return",
            ),
            "jobs-go-on-with-other-trees": ("{} if d.tree is None else", "{} if True else"),
        },
    ),
    *mutations(
        "python/specdec/cli/models.py",
        TREES + " -k job",
        {"jobs-go-on-with-other-embedded-heads": ("if drafter in EMBEDDED_HEADS:", "if drafter in ():")},
    ),
    *mutations(
        "python/specdec/cli/chat_commands.py",
        TREES + " -k chat",
        {
            "chat-forgets-the-tree-of-another-drafter": (
                "self._use_drafter(name, exit_layers, self.settings.tree)",
                "self._use_drafter(name, exit_layers, None)",
            ),
        },
    ),
    *mutations(
        "python/specdec/cli/show.py",
        TREES + " -k told",
        {
            "accepted-of-those-drafted": (
                "zip(stats.accepted_by_position, stats.tested_by_position",
                "zip(stats.accepted_by_position, stats.drafted_by_position",
            ),
        },
    ),
    *mutations(
        "python/specdec/evaluation/compare.py",
        TREES + " -k compare",
        {
            "chains-are-compared-with-chains": (
                "settings, settings.tree, compile) for k in depths",
                "settings, compile=compile) for k in depths",
            ),
            "wrong-trees-are-not-ours": ("any(name.startswith(OURS)", "any(name == OURS"),
        },
    ),
    *mutations(
        "python/specdec/drafters/heads/embedded.py",
        "tests/drafters/test_embedded_heads.py",
        {
            "embedded-heads-check-themselves": ("target, check=False)", "target)"),
            "embedded-heads-for-targets-of-one-size": ("if any(getattr", "if all(getattr"),
        },
    ),
]
