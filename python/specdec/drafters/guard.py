"""A drafter may fail; a batch goes on without it."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping

import torch

from ..compiled import NotCompiled
from . import Drafter, Drafts, DraftSession, Generation, Step


class GuardedSession:
    """A drafter's session, until it raises or answers with what are no drafts: then it is dropped with a warning.

    Args:
        isolate: where leaving out one row helps, only that row drafts no more.

    Attributes:
        error: why it was dropped; None: it was not.
        failed_rows: row -> what went wrong there, since somebody looked.
        reads_texts: whether a step needs what the host knows.
        raising: while a step is captured: an error is the capture's, and goes through.
    """

    def __init__(self, drafter: Drafter, generation: Generation, isolate: bool = False):
        self.error: str | None = None
        self.failed_rows: dict[int, Exception] = {}
        self.raising, self._isolate = False, isolate
        self._session: DraftSession | None = None
        try:
            self._session = drafter.start(generation)
        except Exception as error:  # whatever a drafter does: the text does not need it
            self._drop(error)

    @property
    def alive(self) -> bool:
        return self._session is not None

    @property
    def reads_texts(self) -> bool:
        return getattr(self._session, "reads_texts", True)

    def admit(self, prompts: Mapping[int, list[int]]) -> None:
        if self._session is None:
            return
        try:
            self._session.admit(prompts)
        except Exception as error:
            if not self._isolate:
                self._drop(error)
            self.failed_rows.update(dict.fromkeys(prompts, error))

    def draft(self, step: Step) -> Drafts | None:
        """None: there are none, and no other call will bring any."""
        if self._session is None:
            return None
        try:
            return self._checked(step)
        except Exception as error:
            if self.raising or isinstance(error, NotCompiled):
                raise
            drafts = self._without_one_row(step, error) if self._isolate else None
            if drafts is None:
                self._drop(error)
            return drafts

    def release(self, row: int, output: list[int]) -> None:
        if self._session is None:
            return
        try:
            self._session.release(row, output)
        except Exception as error:
            self._drop(error)

    def _checked(self, step: Step) -> Drafts:
        drafts = self._session.draft(step)
        _check(drafts, step)
        return drafts

    def _without_one_row(self, step: Step, error: Exception) -> Drafts | None:
        """The drafts of the others, where a single row is to blame."""
        for row in [row for row, allowed in enumerate(step.allowed) if allowed]:
            allowed = [0 if r == row else n for r, n in enumerate(step.allowed)]
            try:
                drafts = self._checked(dataclasses.replace(step, allowed=allowed))
            except Exception:  # another row's, or everybody's
                continue
            self.failed_rows[row] = error
            return drafts
        return None

    def _drop(self, error: Exception) -> None:
        self._session, self.error = None, f"{type(error).__name__}: {error}"
        warnings.warn(f"the drafter failed and is dropped, decoding goes on: {self.error}", RuntimeWarning, 4)


def _check(drafts: Drafts, step: Step) -> None:
    """The shapes that are wrong in ways which verification would blame on the target."""
    if not isinstance(drafts, Drafts):
        raise TypeError(f"draft() returned {type(drafts).__name__}, allowed: Drafts")
    batch, device = step.position.shape[0], step.position.device
    tokens = drafts.tokens
    fits = tokens.dim() == 2 and tokens.shape[0] == batch and tokens.shape[1] <= step.num_drafts
    if tokens.dtype != torch.int64 or not fits or tokens.device != device:
        given = f"{tokens.dtype} of shape {list(tokens.shape)} on {tokens.device}"
        raise ValueError(
            f"tokens: got {given}, allowed: int64 of shape [{batch}, at most {step.num_drafts}] on {device}"
        )
    parts = {"logits": drafts.logits, "status": drafts.status}
    for name in ("stats", "compact"):
        parts |= {f"{name}[{i}]": part for i, part in enumerate(getattr(drafts, name) or ())}
    for name, part in parts.items():
        if part is not None and part.shape[:2] != tokens.shape:
            raise ValueError(f"{name}: got shape {list(part.shape)}, allowed: {list(tokens.shape)} and more")
