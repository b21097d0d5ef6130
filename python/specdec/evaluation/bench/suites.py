"""The published sets of questions that ``specdec bench --suite`` asks, and how each of them counts.

Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

OVERALL = "overall"
MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")


@dataclass(frozen=True)
class Suite:
    """
    Attributes:
        max_new_tokens: of each answer, as its own programs have it.
        merged: categories that it counts as one, by the name of the group.
        first: groups in the order of its own tables; others follow in the order of the questions.
        by_question: whether its mean of accepted tokens is that of the questions' means, or of all steps.
        needs_template: whether its turns are messages for a chat template in any case.
    """

    name: str
    max_new_tokens: int
    merged: tuple[str, tuple[str, ...]] | None = None
    first: tuple[str, ...] = ()
    by_question: bool = False
    needs_template: bool = False

    def group(self, category: str) -> str:
        name, categories = self.merged or (category, ())
        return name if category in categories else category

    def groups(self, categories: Iterable[str]) -> list[str]:
        """Those that questions of these categories are in, and at the end all of them."""
        there = dict.fromkeys(self.group(category) for category in categories)
        return [*(name for name in self.first if name in there), *(n for n in there if n not in self.first), OVERALL]

    def mean_accepted(self, questions: Sequence[tuple[int, int]]) -> float | None:
        """The mean of the tokens that a step emitted, which is our tau. None: there was no step.

        Args:
            questions: of each question its tokens and its steps.
        """
        counted = [(tokens, steps) for tokens, steps in questions if steps]
        if not counted:
            return None
        if self.by_question:
            return sum(tokens / steps for tokens, steps in counted) / len(counted)
        return sum(tokens for tokens, _ in counted) / sum(steps for _, steps in counted)


SUITES = {
    suite.name: suite
    for suite in (
        # github.com/hemingkx/Spec-Bench, evaluation/eval.py and speed.py
        Suite(
            "spec-bench",
            1024,
            merged=("mt_bench", MT_BENCH),
            first=("mt_bench", "translation", "summarization", "qa", "math_reasoning", "rag"),
        ),
        # NVIDIA's Model-Optimizer, examples/specdec_bench: run.py and metrics/specbench.py; arXiv 2604.09557
        Suite("speed-bench", 4096, by_question=True, needs_template=True),
    )
}
