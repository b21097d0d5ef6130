"""``specdec bench --suite --url``: the questions of a suite, asked of somebody's server."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import typer

from .job import tell_end
from .option_groups import given as given_options
from .progress_bar import progress
from .show_suite import print_served
from .terminal import remark
from .user_errors import option_name, refuse

if TYPE_CHECKING:
    from ..evaluation.bench.folder import Folder
    from ..evaluation.bench.served import ServedSettings
    from ..evaluation.server_connection import ServerConnection
    from ..jobs.questions import TurnsQuestion
    from .bench_options import MeasuredServer, QuestionOptions, ResultOptions, RoundOptions, SettingOptions

TAKEN = (
    *("suite", "category", "per_category", "temperature", "max_new_tokens", "seed"),
    *("repeats", "warm_up", "output", "log", "as_json"),
)


def refuse_others(*groups: object) -> None:
    """Refuses options that say how models of ours decode, or what of it is told."""
    for group in groups:
        for name, (option, _) in given_options(group).items():
            if name not in TAKEN:
                shown = ", ".join("--json" if each == "as_json" else option_name(each) for each in TAKEN)
                refuse(option, "it with --url", f"none: the server chooses how it decodes. Beside --url go {shown}")


@dataclass(frozen=True)
class ServedRun:
    """The options, of which ``refuse_others`` has seen all."""

    of: MeasuredServer
    given: QuestionOptions
    settings: SettingOptions
    rounds: RoundOptions
    results: ResultOptions

    def run(self, prompt: Sequence[str] | None) -> int:
        """Measures what is not there yet, and prints it. Returns the exit code."""
        settings, questions = self._settings(), self.given.of_suite(prompt)
        from ..evaluation.bench.folder import Folder
        from ..evaluation.bench.served import ServedQuestion, served_rounds
        from ..evaluation.server_connection import ServerConnection
        from ..jobs.signals import Signals, Stopped
        from ..line_file import WriteError

        server = ServerConnection(self.of.url or "", self.of.api_key, self.of.model, self.of.timeout)
        code, folder = 0, Folder(self.results.output)
        try:
            with Signals() as signals:
                try:
                    folder.begin(self._header(server, questions, settings))
                    asked = [ServedQuestion(q.id, q.category, q.turns) for q in questions]
                    done = [each["round"] for each in folder.rounds]
                    on_talk = _log if self.results.log else None
                    with progress("asking the server") as show:
                        for line in served_rounds(server, asked, settings, done, show, on_talk):
                            with signals.held():
                                folder.append(line)
                except (WriteError, Stopped) as error:
                    signals.ignore()
                    code = tell_end(error)
                    rounds = f"{len(folder.rounds)} rounds are in {str(folder.path)!r}"
                    remark(f"{rounds}; the same command goes on from there")
                if folder.header is not None and folder.rounds:
                    self._tell(folder)
        finally:
            folder.close()
        return code

    def _settings(self) -> ServedSettings:
        from ..evaluation.bench.served import ServedSettings

        if self.given.asked is None:
            refuse("--url", "it without --suite", "it with --suite, whose questions are asked")
        temperatures = self.settings.temperature or [0.0]
        if len(temperatures) > 1 or not temperatures[0] >= 0:
            refuse("--temperature", f"{', '.join(map(str, temperatures))} with --url", "one number >= 0")
        new = self.settings.max_new_tokens or self.given.asked.max_new_tokens
        return ServedSettings(new, temperatures[0], self.settings.seed, self.rounds.repeats, self.rounds.warm_up)

    def _header(
        self, server: ServerConnection, questions: Sequence[TurnsQuestion], settings: ServedSettings
    ) -> dict[str, Any]:
        from specdec_kernels import __version__

        said = json.dumps([[q.id, q.category, q.turns] for q in questions]).encode()
        of_texts = {name: getattr(settings, name) for name in ("max_new_tokens", "temperature", "seed")}
        prompts = hashlib.blake2b(said, digest_size=16).hexdigest()
        same = {"url": server.url, "model": server.model, "suite": self.given.suite, "prompts": prompts}
        return {
            "grid": {"specdec": __version__, **same, **of_texts},
            "models": {"target": {"name": server.model}},
            "settings": dataclasses.asdict(settings),
            "suite": {
                "name": self.given.suite,
                "questions": [{"id": q.id, "category": q.category, "turns": len(q.turns)} for q in questions],
            },
        }

    def _tell(self, folder: Folder) -> None:
        """Writes the files of all rounds, and prints them."""
        from ..evaluation.bench.answers import file_name, to_text
        from ..evaluation.bench.served import SERVED, served_results

        assert folder.header is not None
        whole, lines = served_results(folder.header, folder.rounds)
        answers = f"answers/{file_name(SERVED)}"
        folder.write({"results.json": json.dumps(whole, indent=1) + "\n", answers: to_text(lines)})
        if self.results.as_json:
            typer.echo(json.dumps(whole))
        else:
            print_served(whole)
            remark(f"{folder.path}: results.json, rounds.jsonl, {answers} (for specdec report)", err=False)


def _log(number: int, talk: dict) -> None:
    tokens, seconds = sum(talk["new_tokens"]), sum(talk["wall_time"])
    named = f"round {number + 1}: {talk['question_id']} ({talk['category']})"
    remark(f"{named}: {tokens} tokens in {seconds:.3f} s, {tokens / seconds:.1f} tokens/s", err=False)
