"""Of ``specdec bench``: numbers that would flatter, verdicts about noise, and rounds that are lost or mixed."""

from .mutation import Mutation, mutations

CELLS = "tests/evaluation/test_bench_cells.py"
SESSION = "tests/evaluation/test_bench_session.py"
ROUNDS = "tests/evaluation/test_compare.py -k 'turns or batch'"

MUTATIONS: list[Mutation] = [
    *mutations(
        "python/specdec/evaluation/bench/verdicts.py",
        CELLS,
        {
            "bench-calls-noise-a-winner": ("[0] <= 1 + SAME]", "[0] <= 0]"),
            "bench-takes-a-hair-for-a-difference": ("[0] <= 1 + SAME]", "[0] <= 1]"),
            "bench-says-more-than-the-sign-test": ("    cut = max(cut - 1, 0)\n", ""),
            "bench-judges-too-few-rounds": ("FEWEST = 5", "FEWEST = 4"),
        },
    ),
    *mutations(
        "python/specdec/evaluation/bench/measure.py",
        CELLS,
        {
            "bench-counts-the-first-piece-twice": ("for arrival in text[1:])", "for arrival in text)"),
            "bench-divides-batches-evenly": (
                "(tokens / run.emitted if run.emitted else 1 / len(batch))",
                "(1 / len(batch))",
            ),
        },
    ),
    *mutations(
        "python/specdec/evaluation/bench/results.py",
        CELLS,
        {
            "bench-takes-texts-of-assisted-for-ours": (
                "for cell in grid.all_cells() if cell.ours}",
                "for cell in cells}",
            ),
            "bench-counts-drafts-that-were-not-there": (
                "[a / d for a, d in zip(accepted, drafted, strict=True) if d]",
                "[a / max(drafted) for a in accepted]",
            ),
        },
    ),
    *mutations(
        "python/specdec/evaluation/bench/session.py",
        SESSION,
        {
            "bench-samples-the-same-text-every-round": (" + number * len(self.prompts)", ""),
            "bench-measures-again-what-is-there": (" if (s.name, r) not in {*done}", ""),
            "bench-goes-on-when-the-time-is-over": ("if i > 0 and self._too_late(setting):", "if False:"),
            "bench-cuts-prompts-at-their-end": ("prompt.tokens[new - most :]", "prompt.tokens[: most - new]"),
        },
    ),
    *mutations(
        "python/specdec/evaluation/bench/folder.py",
        SESSION,
        {"bench-mixes-grids": ('differences(self.header["grid"], header["grid"])', "[]")},
    ),
    *mutations(
        "python/specdec/evaluation/rounds.py",
        ROUNDS,
        {"methods-keep-their-order": ("at = (first + i + turn) % len(methods)", "at = turn")},
    ),
    *mutations(
        "python/specdec/evaluation/contenders.py",
        ROUNDS,
        {
            "padding-of-a-row-that-ended-counts": ("return row[: end + 1]", "return row"),
            "a-batch-counts-the-steps-of-one-row": ("            steps = emitted\n", "            pass\n"),
        },
    ),
]
