"""The options of ``specdec bench``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..evaluation.bench.suites import SUITES
from . import bench_methods, drafting, options
from .drafters import HEAD
from .given_prompts import MeasuredPrompts
from .option_groups import option
from .server_address import ServerAddress
from .terminal import remark
from .user_errors import check_counts, option_name, refuse

if TYPE_CHECKING:
    from ..evaluation.bench.suites import Suite
    from ..jobs.questions import Question, TurnsQuestion
    from .models import ModelOptions

NEW_TOKENS, SHORT_TEXTS = 64, 16  # the embedded pair's grid is to end in five minutes on two cores


@dataclass(frozen=True)
class MethodOptions:
    """What is measured"""

    method: list[str] | None = option(
        None,
        f"Repeatable: {', '.join(bench_methods.NAMES)}, or {HEAD}. transformers and plain are always there. Default: "
        "assisted, model if there is a draft, lookup, and suffix, or eagle3 of the embedded target; of a target alone "
        "early-exit, too.",
        show_default=False,
    )
    num_drafts: list[str] | None = option(
        None,
        "Repeatable: a number, or auto. Default: of model 1, 2, 4, 8 and auto; of assisted 2 and auto; of trees 6; of "
        "others auto.",
        *drafting.K,
        show_default=False,
    )
    rule: list[str] | None = option(
        None,
        "Repeatable: token, block, coupled. Default: token; coupled of trees, and of lookup, suffix and early-exit "
        "where there is no draft.",
    )
    tree: list[int] | None = option(
        None, "Repeatable: nodes of trees; of other methods than tree, beside their chains.", metavar="N"
    )
    exit_layers: int | None = option(*drafting.EXIT_LAYERS)


@dataclass(frozen=True)
class SettingOptions:
    """Settings"""

    temperature: list[float] | None = option(
        None, "Repeatable; 0 is greedy. Default: 0 and 1; of a suite 0.", show_default=False
    )
    batch_size: list[int] | None = option(None, "Repeatable: prompts at a time. Default: 1.", show_default=False)
    top_k: list[int] | None = option(None, "Repeatable; 0 is off. Of sampled texts.")
    top_p: list[float] | None = option(None, "Repeatable; 1 is off. Of sampled texts.")
    min_p: list[float] | None = option(None, "Repeatable; 0 is off. Of sampled texts.")
    max_new_tokens: int | None = option(
        None,
        f"Of each text. Default: {NEW_TOKENS}; of the embedded pair {SHORT_TEXTS}; of suites "
        f"{', '.join(f'{suite.max_new_tokens} ({name})' for name, suite in SUITES.items())}.",
    )
    seed: int = option(0, "Of the first text; text i uses seed + i.")

    def new_tokens(self, suite: Suite | None, at: ModelOptions) -> int:
        """Of each text."""
        usual = SHORT_TEXTS if at.target is None else NEW_TOKENS
        return self.max_new_tokens or (usual if suite is None else suite.max_new_tokens)

    def axes(self, methods: MethodOptions, suite: Suite | None) -> bench_methods.Axes:
        """Checked, as far as they can be without models."""
        if suite is not None and self.batch_size not in (None, [], [1]):
            given = ", ".join(map(str, self.batch_size or ()))
            refuse("--batch-size", f"{given} with --suite", "1: its conversations are one at a time")
        drawn = (self.temperature or ([0.0, 1.0] if suite is None else [0.0]), self.batch_size or [1])
        filters = {"top_k": self.top_k, "top_p": self.top_p, "min_p": self.min_p}
        axes = bench_methods.Axes(methods.num_drafts, methods.rule, methods.tree, *drawn, filters)
        axes.check()
        return axes


@dataclass(frozen=True)
class QuestionOptions(MeasuredPrompts):
    """Prompts"""

    suite: str | None = option(
        None,
        f"{', '.join(SUITES)}: the argument is its file of questions, which are asked turn by turn. docs/bench.md",
        show_default=False,
    )
    cut_prompts: bool = option(False, "Cut prompts that are too long at their beginning.", "--cut-prompts")

    of_embedded = "general"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.suite is None:
            return
        if self.suite not in SUITES:
            refuse("--suite", repr(self.suite), ", ".join(SUITES))
        for name in ("batch_file", "prompt_set", "chat"):
            if getattr(self, name) is not None:
                given = f"{option_name(name)} with --suite" if name != "chat" else "--chat or --no-chat with --suite"
                refuse(option_name(name), given, "neither: the suite's file and its format are the prompts")

    @property
    def asked(self) -> Suite | None:
        return None if self.suite is None else SUITES[self.suite]

    def questions(self, prompts: Sequence[str] | None, at: ModelOptions) -> list[Question]:
        """Also those of a suite, which have turns."""
        if self.asked is None:
            return super().questions(prompts, at)
        found, template = self.of_suite(prompts), bool(at.tokenizer.chat_template)
        if self.asked.needs_template and not template:
            refuse("--suite", f"{self.suite} for a target without a chat template", "a target with one, or spec-bench")
        if not template:
            remark("the target has no chat template: prompts are Vicuna's conversation, as FastChat has it", "dim")
        return [*found]

    def of_suite(self, prompts: Sequence[str] | None) -> list[TurnsQuestion]:
        """Those in its file, which is the one argument."""
        from ..jobs.questions import choose, read_suite

        files = [Path(each) for each in prompts or ()]
        if len(files) != 1:
            refuse("PROMPT", f"{len(files)} arguments with --suite {self.suite}", "one, the file of its questions")
        return choose(read_suite(files[0]), self.category, self.per_category)


@dataclass(frozen=True)
class MeasuredServer(ServerAddress):
    """Somebody's server"""

    url: str | None = option(
        None, "Measure what answers at this address by OpenAI's /v1/chat/completions, with a --suite. docs/bench.md"
    )


@dataclass(frozen=True)
class RoundOptions:
    """Rounds"""

    repeats: int = option(5, "Rounds; ratios are taken within each.")
    warm_up: int = option(1, "Prompts that each method continues before, unmeasured.")
    minutes: float | None = option(None, "Begin no round that would end later; the same command measures the rest.")

    def __post_init__(self) -> None:
        check_counts(1, repeats=self.repeats)
        check_counts(0, warm_up=self.warm_up)
        if self.minutes is not None and not self.minutes > 0:
            refuse("--minutes", self.minutes, "a number > 0")


@dataclass(frozen=True)
class ThreadOptions:
    """Threads"""

    threads: int | None = option(None, "Of torch, on a CPU.", show_default=False)

    def __post_init__(self) -> None:
        check_counts(1, threads=self.threads)


@dataclass(frozen=True)
class ResultOptions:
    """Results"""

    output: Path = option(
        Path("specdec-bench"), "A folder for the results. What it has of the same benchmark is not measured again."
    )
    report: bool | None = option(
        None, "Write report.html and plots/. Default: where there is matplotlib.", "--report/--no-report"
    )
    log: bool = option(False, "Print seconds and tokens of every call.", "--log")
    as_json: bool = options.as_json("Print results.json instead of tables.")

    @property
    def with_report(self) -> bool:
        """Raises ValueError where a report is asked for and cannot be written."""
        from ..evaluation.report import check_matplotlib

        try:
            check_matplotlib()
        except ValueError:
            if self.report:
                raise
            return False
        return self.report is not False
