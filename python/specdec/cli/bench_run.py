"""One run of ``specdec bench``: from its options to the files in its folder."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from . import bench_methods, models
from .bench_methods import short_name
from .drafters import parts_of
from .job import tell_end
from .progress_bar import duration, progress
from .show import print_drafter_error
from .show_bench import print_log
from .terminal import remark
from .user_errors import refuse

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..drafters.protocol import Drafter
    from ..evaluation.bench.folder import Folder
    from ..evaluation.bench.grid import Grid
    from ..evaluation.bench.measure import BenchPrompt
    from ..evaluation.bench.session import BenchSettings, Maker, Session
    from ..evaluation.bench.suite_session import SuiteSession
    from ..jobs.questions import Question
    from ..jobs.signals import Signals
    from .bench_options import MethodOptions, QuestionOptions, ResultOptions

BUG = 1  # exit code
_SAME = ("cpu", "gpu", "threads", "device", "dtype", "torch", "transformers")  # of the environment, in all rounds


@dataclass(frozen=True)
class BenchRun:
    """The options, checked."""

    at: models.ModelOptions
    methods: Sequence[str]
    axes: bench_methods.Axes
    measured: MethodOptions
    questions: Sequence[Question]
    given: QuestionOptions
    settings: BenchSettings
    results: ResultOptions

    def run(self, signals: Signals) -> tuple[int, dict | None]:
        """Measures what is not there yet. Returns the exit code and the contents of results.json, if there is a
        round."""
        from ..evaluation.bench.folder import Folder
        from ..jobs.signals import Stopped
        from ..line_file import WriteError

        folder: Folder | None = None
        grid: Grid | None = None
        code, whole = 0, None
        try:
            try:
                folder = Folder(self.results.output)
                with progress("loading models") as show:
                    loaded = models.load(self.at, bench_methods.drafters_of(self.methods))
                    drafters = self._drafters(loaded)
                    known = {*drafters, bench_methods.ASSISTED} if self._assists(loaded) else {*drafters}
                    methods = [name for name in self.methods if name in known]
                    grid = self.axes.grid(methods, drafters, self.at.alone)
                    session = self._session(loaded, drafters, grid, folder)
                    session.warm_up(show)
                self._measure(session, folder, signals)
            except (WriteError, Stopped) as error:
                signals.ignore()
                code = tell_end(error)
            finally:
                signals.ignore()
            if folder is not None and grid is not None and folder.header is not None:
                try:
                    whole = _write(folder, grid)
                except WriteError as error:
                    not_written = tell_end(error)
                    code = code or not_written
            if code:
                rounds = 0 if folder is None else len(folder.rounds)
                remark(f"{rounds} rounds are in {str(self.results.output)!r}; the same command goes on from there")
        finally:
            if folder is not None:
                folder.close()
        if whole is not None and not code and any(d["verdict"] == "bug" for d in _ours(whole)):
            code = BUG
        return code, whole

    def _assists(self, loaded: models.Models) -> bool:
        from ..evaluation.contenders import assists

        return bench_methods.ASSISTED in self.methods and assists(loaded.target, remark)

    def _drafters(self, loaded: models.Models) -> dict[str, Drafter | None]:
        """By their names, without an early exit that nobody asked for from a model that cannot be left early."""
        found: dict[str, Drafter | None] = {}
        asked = bool(self.measured.method) or self.measured.exit_layers is not None
        for name in bench_methods.drafters_of(self.methods):
            try:
                found[name] = loaded.drafter(
                    name, self.measured.exit_layers if parts_of(name)[-1] == "early-exit" else None
                )
            except ValueError:
                if asked or name != "early-exit":
                    raise
        return found

    def _session(self, loaded: models.Models, drafters: Mapping[str, Any], grid: Grid, folder: Folder) -> Session:
        from ..evaluation.bench.session import Maker, Session

        assistant: PreTrainedModel | Literal["lookup"] = "lookup"
        if loaded.draft is not None and loaded.same_size:  # transformers takes no assistant with another vocabulary
            assistant = loaded.draft
        short = {short_name(name): drafter for name, drafter in drafters.items()}
        settings = self.settings
        maker = Maker(loaded.target, short.__getitem__, assistant, settings.max_new_tokens)
        done = [(each["setting"], each["round"]) for each in folder.rounds]
        if self.given.suite is not None:
            session: Session = self._suite_session(self.given.suite, loaded, maker, grid, done)
        else:
            session = Session(loaded.target, maker.make, grid, self._prompts(loaded), settings, done)
        session.fit(self.given.cut_prompts)
        folder.begin(self._header(loaded, drafters, grid, session))
        return session

    def _suite_session(
        self, suite: str, loaded: models.Models, maker: Maker, grid: Grid, done: Sequence[tuple[str, int]]
    ) -> SuiteSession:
        from ..evaluation.bench.suite_session import SuiteSession
        from ..evaluation.bench.talks import SuiteQuestion, TalkFormat
        from ..jobs.questions import TurnsQuestion

        form, questions = TalkFormat(loaded.tokenizer), []
        for q in self.questions:
            assert isinstance(q, TurnsQuestion)
            first = form.prompt(q.turns[:1], ())
            questions.append(SuiteQuestion(str(q.id), q.category, first, q.turns, q.id, q.sub_category))
        return SuiteSession(loaded.target, maker.make, grid, suite, questions, self.settings, form, done)

    def _measure(self, session: Session, folder: Folder, signals: Signals) -> None:
        if not session.units:
            remark(f"all rounds are in {str(folder.path)!r}: nothing to measure; another --output measures again")
            return
        if folder.rounds:
            remark(f"{len(folder.rounds)} rounds are in {str(folder.path)!r}: going on")
        _warn_of_threads(session)
        takes = about(session.seconds)
        remark(f"{len(session.units)} rounds of {session.cells} ways to decode{takes}")
        before = len(folder.rounds)
        with progress("measuring") as show:
            for line in session.rounds(show, print_log if self.results.log else None):
                with signals.held():
                    folder.append(line)
        if (left := len(session.units) - (len(folder.rounds) - before)) > 0:
            remark(f"the time is over: {left} rounds are left, which the same command measures")

    def _prompts(self, loaded: models.Models) -> list[BenchPrompt]:
        from ..evaluation.bench.measure import BenchPrompt

        found = []
        for question in self.questions:
            if not (tokens := question.tokens(loaded.tokenizer)):
                refuse("PROMPT", f"prompt {question.id!r}, of which the tokenizer makes no token", "at least one token")
            found.append(BenchPrompt(str(question.id), question.category, tokens))
        return found

    def _header(self, loaded: models.Models, drafters: Mapping[str, Any], grid: Grid, session: Session) -> dict:
        """What holds for all rounds; "grid" has what must be the same for rounds to be of one benchmark."""
        from specdec_kernels import __version__

        from ..evaluation.bench.result_files import describe, described_head
        from ..evaluation.bench.suite_session import SuiteSession
        from ..evaluation.compare import environment
        from ..jobs.manifest import fingerprints

        at, settings, measured = self.at, self.settings, environment(loaded.target)
        paths = at.paths("model")
        for name in drafters:
            if head := at.paths(name).get("head"):
                paths[f"head {short_name(name)}"] = head
        prompts = json.dumps(session.what).encode()
        heads = {short_name(name): drafter for name, drafter in drafters.items() if f"head {short_name(name)}" in paths}
        return {
            "grid": {
                "specdec": __version__,
                "methods": [short_name(name) for name in self.methods],
                **{name: value for name, value in self.axes._asdict().items() if name != "filters"},
                **self.axes.filters,
                **{"exit_layers": self.measured.exit_layers, **self.at.all_bits},
                **{"max_new_tokens": settings.max_new_tokens, "seed": settings.seed},
                "prompts": hashlib.blake2b(prompts, digest_size=16).hexdigest(),
                **fingerprints(paths),
                **{name: measured[name] for name in _SAME},
            },
            "environment": {**measured, "specdec": __version__, "memory": session.peak.what},
            "models": {
                "target": describe(loaded.target, at.target or "embedded target"),
                "draft": None if loaded.draft is None else describe(loaded.draft, at.draft or "embedded draft"),
                "heads": {name: described_head(drafter) for name, drafter in heads.items()},
            },
            "settings": {
                **dataclasses.asdict(settings),
                **self.at.all_bits,
                "chat": any(question.chat for question in self.questions),  # given as messages; of a suite, see there
            },
            "prompts": [{"id": p.id, "category": p.category, "tokens": len(p.tokens)} for p in session.prompts],
            **({"suite": session.described()} if isinstance(session, SuiteSession) else {}),
        }


def about(seconds: float | None) -> str:
    """The end of a sentence: how long rounds take; nothing for None, where only the progress can tell."""
    if seconds is None:
        return ""
    return f" will take about {duration(seconds) if seconds >= 60 else f'{max(seconds, 1):.0f} s'}"


def _warn_of_threads(session: Session) -> None:
    """A forward on a CPU waits for its slowest thread: with more of them than CPUs, it measures the scheduler."""
    from ..evaluation.machine import machine, thread_hints

    if session.device.type == "cpu":
        here: dict[str, Any] = machine()
        for hint in thread_hints(here["cpus"]["usable"], here["threads"], here["load"]):
            remark(f"Warning: {hint}", "red")


def _write(folder: Folder, grid: Grid) -> dict | None:
    """Writes the results of the rounds so far."""
    from ..evaluation.bench.answers import file_name, to_text
    from ..evaluation.bench.result_files import cells_csv, log_csv, results
    from ..evaluation.bench.suite_table import answer_files

    assert folder.header is not None
    if not folder.rounds:
        return None
    whole = results(folder.header, grid, folder.rounds)
    tables = {"results.csv": cells_csv(whole), "log.csv": log_csv(whole)}
    files = {"results.json": json.dumps(whole, indent=1) + "\n", **tables}
    if "suite" in folder.header:
        answers = answer_files(folder.header, grid, folder.rounds)
        files |= {f"answers/{file_name(cell.id)}": to_text(lines) for cell, lines in answers.items()}
    folder.write(files)
    for cell in whole["cells"]:
        for trouble in {each["trouble"] for each in cell["rounds"] if "trouble" in each}:
            print_drafter_error(f"{cell['id']}: {trouble}")
    return whole


def _ours(whole: dict) -> list[dict]:
    """The differences of our own texts."""
    theirs = ("transformers", "assisted")
    return [d for d in whole["greedy"]["differences"] if d["methods"][1].split()[0] not in theirs]
