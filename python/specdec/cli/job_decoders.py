"""What decodes the lines of a job in this process; ``ray_job.py`` has what decodes them elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from . import models
from .drafting import read_num_drafts

if TYPE_CHECKING:
    from ..jobs.lines import JobLine
    from ..serving.scheduler import Scheduler
    from .drafting import GenerateDrafts
    from .options import SchedulingOptions


class Here:
    """Decodes in this process."""

    def __init__(self, at: models.ModelOptions, drafts: GenerateDrafts, options: SchedulingOptions):
        self._scheduler, self._loaded = scheduler_of(at, drafts, options)

    @property
    def drafter_error(self) -> str | None:
        """Why the drafter was dropped: then texts are right, but come more slowly. None: it was not."""
        return self._scheduler.drafter_error

    @property
    def load(self) -> str:
        """How much is decoded at a time, in words."""
        return f"rows busy {self._scheduler.usage.busy:.0%}"

    def decode(self, lines: Iterator[JobLine]) -> Iterator[dict]:
        """Yields their results, in any order."""
        from ..jobs.run import RequestMaker, decode_lines

        loaded = self._loaded
        make = RequestMaker(loaded.tokenizer, loaded.tail, self._scheduler.decoder.grammar_compiler)
        return decode_lines(self._scheduler, lines, loaded.tokenizer, make)

    def close(self) -> None:
        self._scheduler.close()


def scheduler_of(
    at: models.ModelOptions, drafts: GenerateDrafts, options: SchedulingOptions
) -> tuple[Scheduler, models.Models]:
    """Loads the models, and makes the scheduler of a job."""
    from ..serving.scheduler import Scheduler

    loaded = models.load(at, [drafts.drafter])
    drafter = drafts.made(loaded)
    num_drafts = read_num_drafts(drafts.num_drafts, nodes=drafts.nodes)
    decoder = loaded.decoder(drafter, num_drafts, drafts.nodes)
    return Scheduler(decoder, rule=drafts.accept_rule, **options.scheduling()), loaded
