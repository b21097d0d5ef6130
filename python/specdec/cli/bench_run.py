"""One run of ``specdec bench``: from its options to the files in its folder."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import typer

from . import bench_methods, models
from .drafters import is_head
from .options import refuse
from .progress import duration, progress
from .show import print_drafter_error
from .show_bench import print_log
from .terminal import remark

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from ..evaluation.bench.folder import Folder
    from ..evaluation.bench.grid import Grid
    from ..evaluation.bench.measure import BenchPrompt
    from ..evaluation.bench.session import BenchSettings, Session
    from ..jobs.questions import Question
    from ..jobs.signals import Signals

BUG, NOT_WRITTEN = 1, 4  # exit codes


@dataclass(frozen=True)
class ModelsAt:
    target: str | None
    draft: str | None
    adapter: str | None
    device: str | None
    dtype: str | None
    bits: Literal[4, 8] | None


@dataclass(frozen=True)
class Command:
    """The options, checked."""

    models: ModelsAt
    methods: Sequence[str]
    axes: Mapping[str, Any]  # of the grid, as bench_methods.read_grid takes them
    exit_layers: int | None
    compile: bool
    questions: Sequence[Question]
    chat: bool
    cut_prompts: bool
    settings: BenchSettings
    output: Path
    log: bool


def run(command: Command, signals: Signals) -> tuple[int, dict | None]:
    """Measures what is not there yet. Returns the exit code and the contents of results.json, if there is a round."""
    from ..evaluation.bench.folder import Folder
    from ..jobs.signals import Stopped
    from ..line_file import OutputError, WriteError

    folder: Folder | None = None
    grid: Grid | None = None
    code, whole = 0, None
    try:
        try:
            folder = Folder(command.output)
            with progress("loading models") as show:
                loaded = _load(command)
                drafters = {
                    name: loaded.drafter(name, command.exit_layers if name == "early-exit" else None)
                    for name in bench_methods.drafters_of(command.methods)
                }
                grid = bench_methods.read_grid(command.methods, drafters, **command.axes)
                session = _session(command, loaded, drafters, grid, folder)
                session.warm_up(show)
            _measure(command, session, folder, signals)
        except OutputError as error:
            raise typer.BadParameter(str(error), param_hint="--output") from error
        except (WriteError, Stopped) as error:
            signals.ignore()
            code = error.exit_code if isinstance(error, Stopped) else NOT_WRITTEN
            remark(f"stopped by {error}" if isinstance(error, Stopped) else f"Error: {error}", "red")
        finally:
            signals.ignore()
        if folder is not None and grid is not None and folder.header is not None:
            try:
                whole = _write(folder, grid)
            except WriteError as error:
                remark(f"Error: {error}", "red")
                code = code or NOT_WRITTEN
        if code:
            rounds = 0 if folder is None else len(folder.rounds)
            remark(f"{rounds} rounds are in {str(command.output)!r}; the same command goes on from there")
    finally:
        if folder is not None:
            folder.close()
    if whole is not None and not code and any(d["verdict"] == "bug" for d in _ours(whole)):
        code = BUG
    return code, whole


def _load(command: Command) -> models.Models:
    at = command.models
    names = bench_methods.drafters_of(command.methods)
    return models.load(at.target, at.draft, names, at.device, at.dtype, at.adapter, at.bits)


def _session(
    command: Command, loaded: models.Models, drafters: Mapping[str, Any], grid: Grid, folder: Folder
) -> Session:
    from ..evaluation.bench.session import Maker, Session

    assistant: PreTrainedModel | Literal["lookup"] = "lookup"
    if loaded.draft is not None and loaded.same_size:  # transformers takes no assistant with another vocabulary
        assistant = loaded.draft
    short = {_short(name): drafter for name, drafter in drafters.items()}
    settings = command.settings
    maker = Maker(loaded.target, short.__getitem__, assistant, settings.max_new_tokens, command.compile)
    done = [(each["setting"], each["round"]) for each in folder.rounds]
    prompts = _prompts(command, loaded)
    session = Session(loaded.target, maker.make, grid, prompts, settings, done)
    session.fit(command.cut_prompts)
    folder.begin(_header(command, loaded, drafters, grid, session))
    return session


def _measure(command: Command, session: Session, folder: Folder, signals: Signals) -> None:
    if not session.units:
        remark(f"all rounds are in {str(folder.path)!r}: nothing to measure; another --output measures again")
        return
    if folder.rounds:
        remark(f"{len(folder.rounds)} rounds are in {str(folder.path)!r}: going on")
    _warn_of_threads(session)
    about = duration(session.seconds)
    remark(f"{len(session.units)} rounds of {session.cells} ways to decode will take about {about}")
    before = len(folder.rounds)
    with progress("measuring") as show:
        for line in session.rounds(show, print_log if command.log else None):
            with signals.held():
                folder.append(line)
    if (left := len(session.units) - (len(folder.rounds) - before)) > 0:
        remark(f"the time is over: {left} rounds are left, which the same command measures")


def _warn_of_threads(session: Session) -> None:
    """A forward on a CPU waits for its slowest thread: with more of them than CPUs, it measures the scheduler."""
    from ..evaluation.machine import machine, thread_hints

    if session.device.type == "cpu":
        here: dict[str, Any] = machine()
        for hint in thread_hints(here["cpus"]["usable"], here["threads"], here["load"]):
            remark(f"Warning: {hint}", "red")


def _write(folder: Folder, grid: Grid) -> dict | None:
    """Writes what the rounds so far come to."""
    from ..evaluation.bench.result_files import cells_csv, log_csv, results

    assert folder.header is not None
    if not folder.rounds:
        return None
    whole = results(folder.header, grid, folder.rounds)
    folder.write(
        {
            "results.json": json.dumps(whole, indent=1) + "\n",
            "results.csv": cells_csv(whole),
            "log.csv": log_csv(whole),
        }
    )
    for cell in whole["cells"]:
        for trouble in {each["trouble"] for each in cell["rounds"] if "trouble" in each}:
            print_drafter_error(f"{cell['id']}: {trouble}")
    return whole


def _ours(whole: dict) -> list[dict]:
    """The differences of our own texts."""
    theirs = ("transformers", "assisted")
    return [d for d in whole["greedy"]["differences"] if d["methods"][1].split()[0] not in theirs]


def _prompts(command: Command, loaded: models.Models) -> list[BenchPrompt]:
    from ..evaluation.bench.measure import BenchPrompt

    found = []
    for question in command.questions:
        try:
            tokens = question.tokens(loaded.tokenizer, command.chat)
        except ValueError as error:
            refuse("--chat", f"--chat for prompt {question.id!r}", str(error))
        if not tokens:
            refuse("PROMPT", f"prompt {question.id!r}, of which the tokenizer makes no token", "at least one token")
        found.append(BenchPrompt(str(question.id), question.category, tokens))
    return found


def _short(name: str) -> str:
    return Path(name).name if is_head(name) else name


def _header(command: Command, loaded: models.Models, drafters: Mapping[str, Any], grid: Grid, session: Session) -> dict:
    """What holds for all rounds; "grid" has what must be the same for rounds to be of one benchmark."""
    from specdec_kernels import __version__

    from ..evaluation.bench.result_files import describe, described_head
    from ..evaluation.compare import environment
    from ..jobs.manifest import fingerprints

    at, settings, measured = command.models, command.settings, environment(loaded.target)
    paths = models.paths(at.target, at.draft, "model", at.adapter)
    for name in drafters:
        if head := models.paths(at.target, at.draft, name).get("head"):
            paths[f"head {_short(name)}"] = head
    prompts = json.dumps([[p.id, p.category, p.tokens] for p in session.prompts]).encode()
    heads = {_short(name): drafter for name, drafter in drafters.items() if f"head {_short(name)}" in paths}
    return {
        "grid": {
            "specdec": __version__,
            "methods": [_short(name) for name in command.methods],
            **{name: command.axes[name] for name in command.axes if name != "filters"},
            **command.axes["filters"],
            **{"exit_layers": command.exit_layers, "compile": command.compile, "bits": at.bits},
            **{"max_new_tokens": settings.max_new_tokens, "seed": settings.seed},
            "prompts": hashlib.blake2b(prompts, digest_size=16).hexdigest(),
            **fingerprints(paths),
            **{name: measured[name] for name in ("cpu", "gpu", "threads", "device", "dtype", "torch", "transformers")},
        },
        "environment": {**measured, "specdec": __version__, "memory": session.peak.what},
        "models": {
            "target": describe(loaded.target, at.target or "embedded target"),
            "draft": None if loaded.draft is None else describe(loaded.draft, at.draft or "embedded draft"),
            "heads": {name: described_head(drafter) for name, drafter in heads.items()},
        },
        "settings": {
            **dataclasses.asdict(settings),
            **{"compile": command.compile, "bits": at.bits, "chat": command.chat},
        },
        "prompts": [{"id": p.id, "category": p.category, "tokens": len(p.tokens)} for p in session.prompts],
    }
