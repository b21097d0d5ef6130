"""Guards a batch against a drafter that fails: it is dropped, with its error in the log, and decoding continues."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import TypeVar

import torch

from ..checks import is_failure, refuse
from ..result import error_text
from .protocol import BatchState, Copies, Drafter, Drafts, DraftSession, Step, proposed

T = TypeVar("T")
logger = logging.getLogger(__name__)


class GuardedSession:
    """A drafter's session. It is dropped when it raises, or returns drafts that verification refuses.

    Attributes:
        error: why the session was dropped; None: it was not dropped.
        raising: True while a step is captured as a graph: errors are then raised to the capturing code.
    """

    def __init__(self, drafter: Drafter, batch: BatchState):
        self.error: str | None = None
        self.raising, self._batch = False, batch
        self._seconds = 0.0
        self._session: DraftSession | None = None
        self._session = self._guarded(lambda: _started(drafter, batch))

    @property
    def alive(self) -> bool:
        return self._session is not None

    @property
    def needs_host(self) -> bool:
        """Whether a step needs what only the host knows."""
        return self._session is not None and self._session.needs_host

    def copy_rows(self, sources: Sequence[int], rows: Sequence[int], count: int) -> None:
        if (session := self._session) is not None:
            self._guarded(lambda: session.copy_rows(sources, rows, count))

    def begin(self, prompts: Mapping[int, list[int]]) -> None:
        if (session := self._session) is not None:
            self._guarded(lambda: session.begin(prompts))

    def observe(self, texts: Mapping[int, list[int]], starts: Mapping[int, int]) -> None:
        if (session := self._session) is not None:
            self._guarded(lambda: session.observe(texts, starts))

    def propose(self, step: Step) -> Drafts | None:
        """Returns the step's drafts, as many columns as are verified; None if the session was dropped, now or
        before."""
        if (session := self._session) is None:
            return None
        began = perf_counter()
        drafts = self._guarded(lambda: self._verified(proposed(session, step), step))
        self._seconds += perf_counter() - began
        return drafts

    def take_seconds(self) -> float:
        """Returns how long the host has taken to propose since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds

    def refused(self, error: ValueError) -> bool:
        """Drops the session because verification refused its drafts. Returns False if there is none, so that the error
        is not its own."""
        if self._session is None or self.raising:
            return False
        self._drop(error)
        return True

    def accepted(self, path: torch.Tensor) -> None:
        if (session := self._session) is not None:
            self._guarded(lambda: session.accepted(path))

    def end(self, row: int, output: list[int]) -> None:
        if (session := self._session) is not None:
            self._guarded(lambda: session.end(row, output))

    def release(self) -> None:
        if (session := self._session) is not None:
            self._guarded(session.release)

    def _guarded(self, call: Callable[[], T]) -> T | None:
        try:
            return call()
        except BaseException as error:  # a drafter can raise anything, and the text does not need it
            if self.raising or not is_failure(error):
                raise
            self._drop(error)
            return None

    def _drop(self, error: BaseException) -> None:
        self._session, self.error = None, error_text(error)
        # The error's own text is left to its traceback: it may quote a prompt, and a server's log leaves it out.
        logger.warning("the drafter failed and is dropped, decoding goes on", exc_info=error)

    def _verified(self, found: Drafts | Copies, step: Step) -> Drafts:
        """Returns what is verified of what was proposed."""
        columns = self._batch.nodes or step.num_drafts
        copies = found if isinstance(found, Copies) else found.copies
        if copies is not None:
            copies.check(len(step.allowed))
        if isinstance(found, Drafts) or self._batch.nodes:
            drafts = self._checked(found, step)
        else:
            found = found.up_to(step.allowed)
            if (count := step.cut(found)) is not None:
                columns = min(columns, count)
            if columns:
                drafts = Drafts.of([tokens[:columns] for tokens in found.tokens], step, found)
            else:
                drafts = Drafts.none(step, found)
        return drafts.widened(columns) if step.fixed_shape else drafts

    def _checked(self, drafts: Drafts | Copies, step: Step) -> Drafts:
        """Raises for drafts that the target could not be fed, or the report could not hold, since that error would end
        all sequences. What they were drawn from is checked by verification alone."""
        nodes = self._batch.nodes
        if isinstance(drafts, Copies):
            raise TypeError("propose() returned Copies, allowed: Drafts, as the batch verifies trees")
        tokens, parents, status = drafts.tokens, drafts.parents, drafts.status
        if (parents is not None) != (nodes > 0):
            wanted = "trees, as the batch verifies them" if nodes else "None: the batch verifies chains"
            refuse("parents", type(parents).__name__, wanted)
        _check_integers("tokens", tokens, step, nodes or step.num_drafts)
        shape = list(tokens.shape)
        if parents is not None:
            if isinstance(parents, torch.Tensor) and parents.dim() == 1:
                parents = parents.expand(len(tokens), -1)
            _check_integers("parents", parents, step, tokens.shape[1])
            if parents.shape != tokens.shape or _out_of_order(parents):
                allowed = f"for each of {tokens.shape[1]} nodes a node before it, or -1"
                refuse("parents", parents.tolist(), allowed)
            shape[1] += 1  # children are drawn from the root's row and those of nodes
        if status is not None and (not isinstance(status, torch.Tensor) or list(status.shape) != shape):
            refuse("status", getattr(status, "shape", type(status).__name__), f"a tensor of shape {shape}")
        if status is not None and (status.dtype not in (torch.int32, torch.int64) or status.device != tokens.device):
            refuse("status", f"{status.dtype} on {status.device}", f"int32 or int64 on {tokens.device}")
        if not isinstance(drafts.forwards, int):
            refuse("forwards", repr(drafts.forwards), "an integer")
        return drafts


def _started(drafter: Drafter, batch: BatchState) -> DraftSession:
    session = drafter.start(batch)
    if not isinstance(session, DraftSession):
        raise TypeError(f"start() returned {type(session).__name__}, allowed: DraftSession")
    return session


def _out_of_order(parents: torch.Tensor) -> bool:
    """Whether a parent does not come before its child. Not looked at on a GPU, which would have to be waited for; there
    such a node is in no tree."""
    return parents.device.type == "cpu" and bool(((parents < -1) | (parents >= torch.arange(parents.shape[1]))).any())


def _check_integers(name: str, values: torch.Tensor, step: Step, most: int) -> None:
    batch, device = step.position.shape[0], step.position.device
    if not isinstance(values, torch.Tensor):
        refuse(name, type(values).__name__, "a tensor")
    fits = values.dim() == 2 and values.shape[0] == batch and values.shape[1] <= most
    if values.dtype != torch.int64 or not fits or values.device != device:
        given = f"{values.dtype} of shape {list(values.shape)} on {values.device}"
        refuse(name, given, f"int64 of shape [{batch}, at most {most}] on {device}")
