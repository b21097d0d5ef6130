"""Guards a batch against a drafter that fails: decoding continues without it."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from specdec_kernels import check_drafts

from ..checks import refuse
from ..models.compiled import NotCompiled
from ..result import error_text
from .protocol import Drafter, Drafts, DraftSession, DraftTree, Generation, Step

D = TypeVar("D", Drafts, DraftTree)


class GuardedSession:
    """A drafter's session, which is dropped with a warning when it raises or returns invalid drafts.

    Args:
        isolate: an error that one row's sequence causes stops the drafts of this sequence only. After an error,
            ``draft`` is called again, first for all rows and then with one row left out at a time. If the call for all
            rows succeeds, no row is blamed.

    Attributes:
        error: why the session was dropped; None: it was not dropped.
        failed_rows: row -> the error there; the loop clears it after reading.
        reads_texts: whether a step needs the texts that only the host knows.
        takes_fewer_rows: whether a step may have the first rows of the batch only.
        raising: True while a step is captured as a graph: errors are then raised to the capturing code.
    """

    def __init__(self, drafter: Drafter, generation: Generation, isolate: bool = False):
        self.error: str | None = None
        self.failed_rows: dict[int, Exception] = {}
        self.raising, self._isolate, self._generation = False, isolate, generation
        self._session: DraftSession | None = None
        try:
            self._session = drafter.start(generation)
        except Exception as error:  # a drafter can raise anything, and the text does not need it
            self._drop(error)

    @property
    def alive(self) -> bool:
        return self._session is not None

    @property
    def reads_texts(self) -> bool:
        return getattr(self._session, "reads_texts", True)

    @property
    def takes_fewer_rows(self) -> bool:
        return self._session is None or getattr(self._session, "takes_fewer_rows", False)

    def admit(self, prompts: Mapping[int, list[int]]) -> None:
        if self._session is None:
            return
        try:
            self._session.admit(prompts)
        except Exception as error:
            if not self._isolate:
                self._drop(error)
            self.failed_rows.update(dict.fromkeys(prompts, error))

    def show(self, texts: Mapping[int, list[int]], starts: Mapping[int, int]) -> None:
        """Shows the session the texts of rows as far as it has not seen them, if it wants them: from ``starts`` on."""
        show = getattr(self._session, "show", None)
        if show is None or not texts:
            return
        try:
            show(texts, starts)
        except Exception as error:
            if not self._isolate:
                self._drop(error)
            elif len(texts) == 1:
                self.failed_rows.update(dict.fromkeys(texts, error))
            else:  # one row at a time, since the error may concern one of them only
                for row, text in texts.items():
                    self.show({row: text}, starts)

    def draft(self, step: Step) -> Drafts | None:
        """Returns the step's drafts; None if the session was dropped, now or before."""
        return self._guarded(self._chain, step)

    def draft_tree(self, step: Step) -> DraftTree | None:
        """Returns the step's tree; None if the session was dropped, now or before."""
        return self._guarded(self._tree, step)

    def compact(self, path: torch.Tensor) -> None:
        """Tells the session which nodes of its tree were accepted, if it wants to know."""
        compact = getattr(self._session, "compact", None)
        if compact is None:
            return
        try:
            compact(path)
        except Exception as error:
            if self.raising:
                raise
            self._drop(error)

    def _guarded(self, ask: Callable[[Step], D], step: Step) -> D | None:
        if self._session is None:
            return None
        try:
            return ask(step)
        except Exception as error:
            if self.raising or isinstance(error, NotCompiled):
                raise
            drafts = self._asked_again(ask, step, error) if self._isolate else None
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
            else:  # the row's next sequence does not depend on this one
                warnings.warn(f"the drafter failed to release a row: {error_text(error)}", RuntimeWarning, 4)

    def _chain(self, step: Step) -> Drafts:
        assert self._session is not None
        drafts = self._session.draft(step)
        _check(drafts, step, self._generation)
        return drafts

    def _tree(self, step: Step) -> DraftTree:
        session: Any = self._session  # the decoder asks only drafters that propose trees
        tree = session.draft_tree(step)
        _check_tree(tree, step, self._generation)
        return tree

    def _asked_again(self, ask: Callable[[Step], D], step: Step, error: Exception) -> D | None:
        """Asks again for all rows, then without one row at a time, and returns the first valid drafts. The row that was
        left out is recorded as failed. None: every call failed."""
        for row in [None, *(row for row, allowed in enumerate(step.allowed) if allowed)]:
            allowed = [0 if r == row else n for r, n in enumerate(step.allowed)]
            try:
                drafts = ask(dataclasses.replace(step, allowed=allowed))
            except Exception:  # caused by another row, or by all of them
                continue
            if row is not None:  # the session may have returned drafts for this row all the same
                self.failed_rows[row] = error
                drafts = drafts._replace(tokens=drafts.tokens.clone())
                drafts.tokens[row] = -1
            return drafts
        return None

    def _drop(self, error: Exception) -> None:
        self._session, self.error = None, error_text(error)
        warnings.warn(f"the drafter failed and is dropped, decoding goes on: {self.error}", RuntimeWarning, 4)


def _check(drafts: Drafts, step: Step, generation: Generation) -> None:
    """Raises for drafts that verification would refuse, since its error would end all sequences."""
    if not isinstance(drafts, Drafts):
        raise TypeError(f"draft() returned {type(drafts).__name__}, allowed: Drafts")
    tokens = drafts.tokens
    _check_integers("tokens", tokens, step, step.num_drafts)
    _check_rows(tokens, (drafts.logits, drafts.stats, drafts.compact, drafts.d2t), drafts, generation)


def _check_tree(tree: DraftTree, step: Step, generation: Generation) -> None:
    """Raises for a tree that verification would refuse, or that is larger than the cache has room for."""
    if not isinstance(tree, DraftTree):
        raise TypeError(f"draft_tree() returned {type(tree).__name__}, allowed: DraftTree")
    _check_integers("tokens", tree.tokens, step, generation.nodes)
    nodes, parents = tree.tokens.shape[1], tree.parents
    if isinstance(parents, torch.Tensor) and parents.dim() == 1:
        parents = parents.expand(len(tree.tokens), -1)
    _check_integers("parents", parents, step, nodes)
    allowed = f"for each of {nodes} nodes a node before it, or -1"
    if parents.shape[1] != nodes:
        refuse("parents", f"shape {list(parents.shape)}", allowed)
    if _out_of_order(parents):
        refuse("parents", parents.tolist(), allowed)
    rows = step.position[:, None].expand(-1, nodes + 1)  # children are drawn from the root's row and those of nodes
    _check_rows(rows, (tree.logits, None, None, tree.d2t), tree, generation)


def _out_of_order(parents: torch.Tensor) -> bool:
    """Whether a parent does not come before its child. Not looked at on a GPU, which would have to be waited for; there
    such a node is in no tree."""
    return parents.device.type == "cpu" and bool(((parents < -1) | (parents >= torch.arange(parents.shape[1]))).any())


def _check_rows(rows: torch.Tensor, q: tuple, drafts: Drafts | DraftTree, generation: Generation) -> None:
    """Raises for a q or a status that does not fit the rows from which tokens were drawn.

    Args:
        rows: [B, n] int64, whose values say nothing.
        q: logits, statistics, compact q and d2t.
    """
    g, status = generation, drafts.status
    check_drafts(rows, *q, vocabulary=g.processors.vocab_size, rule=g.rule, backend=g.backend)
    if status is not None and (not isinstance(status, torch.Tensor) or status.shape != rows.shape):
        refuse("status", getattr(status, "shape", type(status).__name__), f"a tensor of shape {list(rows.shape)}")
    if status is not None and (status.dtype not in (torch.int32, torch.int64) or status.device != rows.device):
        refuse("status", f"{status.dtype} on {status.device}", f"int32 or int64 on {rows.device}")
    if not isinstance(drafts.forwards, int):
        refuse("forwards", repr(drafts.forwards), "an integer")


def _check_integers(name: str, values: torch.Tensor, step: Step, most: int) -> None:
    batch, device = step.position.shape[0], step.position.device
    if not isinstance(values, torch.Tensor):
        refuse(name, type(values).__name__, "a tensor")
    fits = values.dim() == 2 and values.shape[0] == batch and values.shape[1] <= most
    if values.dtype != torch.int64 or not fits or values.device != device:
        given = f"{values.dtype} of shape {list(values.shape)} on {values.device}"
        refuse(name, given, f"int64 of shape [{batch}, at most {most}] on {device}")
