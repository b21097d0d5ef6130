"""A drafter may fail; a generation goes on without it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TypeVar

import torch

from . import Drafter, Drafts, DraftSession, Generation, Step

T = TypeVar("T")


class GuardedSession:
    """A drafter's session, until it raises or answers with what are no drafts: then it is dropped with a warning.

    Attributes:
        error: why it was dropped; None: it was not.
    """

    def __init__(self, drafter: Drafter, generation: Generation):
        self.error: str | None = None
        self._session: DraftSession | None = None
        self._session = self._guarded(lambda: drafter.start(generation))

    @property
    def alive(self) -> bool:
        return self._session is not None

    def draft(self, step: Step) -> Drafts | None:
        """None: there are none, and no other call will bring any."""
        session = self._session
        if session is None:
            return None

        def checked() -> Drafts:
            drafts = session.draft(step)
            _check(drafts, step)
            return drafts

        return self._guarded(checked)

    def finish(self, outputs: list[list[int]]) -> None:
        if (session := self._session) is not None:
            self._guarded(lambda: session.finish(outputs))

    def _guarded(self, call: Callable[[], T]) -> T | None:
        try:
            return call()
        except Exception as error:  # whatever a drafter does: the text does not need it
            self._session, self.error = None, f"{type(error).__name__}: {error}"
            warnings.warn(f"the drafter failed and is dropped, decoding goes on: {self.error}", RuntimeWarning, 3)
            return None


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
