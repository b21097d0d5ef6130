"""A drafter may fail; a batch goes on without it."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping

import torch

from specdec_kernels import check_drafts

from ..checks import refuse
from ..models.compiled import NotCompiled
from ..result import error_text
from .protocol import Drafter, Drafts, DraftSession, Generation, Step


class GuardedSession:
    """A drafter's session, until it raises or answers with what are no drafts: then it is dropped with a warning.

    Args:
        isolate: what one row's sequence causes is its own: it drafts no more, the others go on. An error in ``draft``
            is asked about again, and then without one row after the other; what passes at the second time was nobody's.

    Attributes:
        error: why it was dropped; None: it was not.
        failed_rows: row -> what went wrong there, since somebody looked.
        reads_texts: whether a step needs what the host knows.
        raising: while a step is captured: an error is the capture's, and goes through.
    """

    def __init__(self, drafter: Drafter, generation: Generation, isolate: bool = False):
        self.error: str | None = None
        self.failed_rows: dict[int, Exception] = {}
        self.raising, self._isolate, self._generation = False, isolate, generation
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
            drafts = self._asked_again(step, error) if self._isolate else None
            if drafts is None:
                self._drop(error)
            return drafts

    def release(self, row: int, output: list[int]) -> None:
        if self._session is None:
            return
        try:
            self._session.release(row, output)
        except Exception as error:
            if not self._isolate:
                self._drop(error)
            else:  # the row's next sequence begins anew
                warnings.warn(f"the drafter failed to release a row: {error_text(error)}", RuntimeWarning, 4)

    def _checked(self, step: Step) -> Drafts:
        assert self._session is not None
        drafts = self._session.draft(step)
        _check(drafts, step, self._generation)
        return drafts

    def _asked_again(self, step: Step, error: Exception) -> Drafts | None:
        """The drafts of all rows but one that is to blame; None: there is not one."""
        for row in [None, *(row for row, allowed in enumerate(step.allowed) if allowed)]:
            allowed = [0 if r == row else n for r, n in enumerate(step.allowed)]
            try:
                drafts = self._checked(dataclasses.replace(step, allowed=allowed))
            except Exception:  # another row's, or everybody's
                continue
            if row is not None:  # what it says of that row all the same is not to be trusted
                self.failed_rows[row] = error
                drafts = drafts._replace(tokens=drafts.tokens.clone())
                drafts.tokens[row] = -1
            return drafts
        return None

    def _drop(self, error: Exception) -> None:
        self._session, self.error = None, error_text(error)
        warnings.warn(f"the drafter failed and is dropped, decoding goes on: {self.error}", RuntimeWarning, 4)


def _check(drafts: Drafts, step: Step, generation: Generation) -> None:
    """What verification would refuse, and so blame on all sequences."""
    if not isinstance(drafts, Drafts):
        raise TypeError(f"draft() returned {type(drafts).__name__}, allowed: Drafts")
    batch, device = step.position.shape[0], step.position.device
    tokens = drafts.tokens
    if not isinstance(tokens, torch.Tensor):
        refuse("tokens", type(tokens).__name__, "a tensor")
    fits = tokens.dim() == 2 and tokens.shape[0] == batch and tokens.shape[1] <= step.num_drafts
    if tokens.dtype != torch.int64 or not fits or tokens.device != device:
        given = f"{tokens.dtype} of shape {list(tokens.shape)} on {tokens.device}"
        refuse("tokens", given, f"int64 of shape [{batch}, at most {step.num_drafts}] on {device}")
    g, status = generation, drafts.status
    q = drafts.logits, drafts.stats, drafts.compact, drafts.d2t
    check_drafts(tokens, *q, vocabulary=g.processors.vocab_size, rule=g.rule, backend=g.backend)
    if status is not None and (not isinstance(status, torch.Tensor) or status.shape != tokens.shape):
        refuse("status", getattr(status, "shape", type(status).__name__), f"a tensor of shape {list(tokens.shape)}")
    if status is not None and (status.dtype not in (torch.int32, torch.int64) or status.device != device):
        refuse("status", f"{status.dtype} on {status.device}", f"int32 or int64 on {device}")
    if not isinstance(drafts.forwards, int):
        refuse("forwards", repr(drafts.forwards), "an integer")
