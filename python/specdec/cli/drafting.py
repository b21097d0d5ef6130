"""The options about drafts: their checks, and defaults that depend on each other.

Nothing here imports torch before a command runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

from .drafters import (
    CHOICES,
    EMBEDDED_HEADS,
    NAMES,
    NEED_DRAFT,
    NO_TREES,
    TREE_DRAFTS,
    TREE_NODES,
    is_drafter,
    is_head,
    nodes_of,
    parts_of,
)
from .option_groups import option
from .terminal import remark
from .user_errors import check_counts, refuse

if TYPE_CHECKING:
    from ..drafters.protocol import Drafter
    from ..loop.draft_length import AdaptiveDrafts
    from .models import ModelOptions, Models

EXIT_LAYERS = (None, "Layers of the target that draft, with early-exit. Default: a quarter of them.")
WITHOUT_DRAFT = "suffix"  # drafts for a target alone: on real text it is faster than lookup
K = ("--num-drafts", "-k")
JOB_DRAFTS = "4"
TREE = (
    "Verify a tree of up to N drafts in each step, instead of one chain: several continuations, which share their "
    f"beginnings. For every drafter but {' and '.join(NO_TREES)}; --drafter tree has {TREE_NODES}."
)


@dataclass(frozen=True)
class DraftOptions:
    """Drafting"""

    drafter: str = option(
        "", f"Who proposes tokens: {CHOICES}. Default: model; {WITHOUT_DRAFT} for a target alone.", show_default=False
    )
    exit_layers: int | None = option(*EXIT_LAYERS)
    num_drafts: str | None = option(
        None,
        "K, drafted tokens a step; 0 decodes plainly; auto adapts it. Default: auto where no text depends on it, which "
        "is at temperature 0 and with --rule coupled; 4 elsewhere, and with --output. With a tree: the most tokens of "
        f"a path through it; default {TREE_DRAFTS}.",
        *K,
    )
    tree: int | None = option(None, TREE, metavar="N")
    rule: str | None = option(
        None,
        "token, block (accepts more), or coupled (the text depends on target and seed alone). Default: token; coupled "
        "with a tree, and for a target alone.",
    )

    def chosen(self, models: ModelOptions) -> Self:
        """Returns the options with a drafter where none was named. That of a target alone may have any K at any
        temperature: with ``coupled`` no text depends on it."""
        if self.drafter:
            return self
        if (name := default_drafter(models)) != WITHOUT_DRAFT:
            return replace(self, drafter=name)
        k = self.num_drafts if self.tree is not None else self.num_drafts or "auto"
        return replace(self, drafter=name, rule=self.rule or "coupled", num_drafts=k)

    def check(self, models: ModelOptions) -> None:
        """Checks all that can be checked before models are loaded."""
        check_drafters([self.drafter], models, self.exit_layers, self.tree)

    @property
    def nodes(self) -> int | None:
        """Of the trees; None: chains."""
        return nodes_of(self.drafter, self.tree)

    @property
    def accept_rule(self) -> str:
        return read_rule(self.rule, self.nodes)


@dataclass(frozen=True)
class GenerateDrafts(DraftOptions):
    """Drafting"""

    confidence: float = option(
        0.0,
        "After a token that the draft model finds less likely than this, no more are drafted; and none that a DSpark "
        "head with a confidence head finds less likely to be accepted.",
    )
    draft_window: int | None = option(
        None,
        "The draft model sees the first four tokens and the last N alone, which bounds its memory and time in long "
        "texts. Default: all of the text.",
        metavar="N",
    )

    def check(self, models: ModelOptions) -> None:
        super().check(models)
        if not 0 <= self.confidence < 1:
            refuse("--confidence", self.confidence, "a number from 0 (off) to below 1")
        if self.confidence and (last := parts_of(self.drafter)[-1]) != "model" and not is_head(last):
            allowed = "0, --drafter model, or the folder of a DSpark head"
            refuse("--confidence", f"{self.confidence} with --drafter {self.drafter}", allowed)
        check_counts(2, draft_window=self.draft_window)
        if self.draft_window is not None and (parts_of(self.drafter)[-1] != "model" or self.tree is not None):
            given = self.drafter if self.tree is None else f"{self.drafter} --tree {self.tree}"
            refuse(
                "--draft-window", f"{self.draft_window} with --drafter {given}", "none, or --drafter model, of chains"
            )

    def made(self, models: Models) -> Drafter | None:
        """The drafter, of models that were loaded for it."""
        return models.drafter(
            self.drafter, self.exit_layers, confidence=self.confidence, draft_window=self.draft_window
        )

    def for_a_job(self, models: ModelOptions) -> Self:
        """As :meth:`chosen`, with a K that no clock chooses where none was named."""
        drafts = self.chosen(models)
        return drafts if drafts.nodes is not None else replace(drafts, num_drafts=drafts.num_drafts or JOB_DRAFTS)


def default_drafter(models: ModelOptions) -> str:
    """The drafter where none was named. Says on stderr what a target alone has, and what would be better."""
    if not models.alone:
        return "model"
    better = "A smaller model of the family as --draft, or one made by specdec distill, may be faster"
    remark(
        f"No --draft, so the text itself drafts ({WITHOUT_DRAFT}). {better}: specdec advise {models.target} measures."
    )
    return WITHOUT_DRAFT


def check_drafters(
    names: Sequence[str],
    models: ModelOptions,
    exit_layers: int | None,
    tree: int | None = None,
    option: str = "--drafter",
) -> None:
    """Checks all that can be checked before models are loaded. ``option`` is what names them."""
    target, draft = models.target, models.draft
    for name in names:
        if not is_drafter(name):
            refuse(option, repr(name), CHOICES)
    if len({*names}) < len(names):
        refuse(option, ", ".join(names), "each once")
    if tree is not None and (without := [name for name in names if name in NO_TREES or len(parts_of(name)) > 1]):
        refuse("--tree", f"{tree} with {option} {without[0]}", "a drafter that proposes trees, or no --tree")
    names = [part for name in names for part in parts_of(name)]
    needed = [name for name in names if name in NEED_DRAFT]
    if target is not None and (ours := [name for name in names if name in EMBEDDED_HEADS]):
        allowed = "the folder of a head that was trained for this target; without --target, the embedded ones"
        refuse(option, f"{ours[0]!r}, a head of the embedded target, with --target {target}", allowed)
    if target is None and draft is not None:
        refuse("--target / --draft", "--draft without --target", "both, or neither (the embedded pair)")
    if target is None and models.adapter is not None:
        refuse("--adapter", "--adapter without --target", "both, or neither")
    if target is not None and draft is None and needed:
        others = ", ".join(name for name in NAMES if name not in (*NEED_DRAFT, *EMBEDDED_HEADS))
        allowed = f"both, neither (the embedded pair), or a {option} that needs no draft: {others}"
        refuse("--target / --draft", "--target without --draft", allowed)
    if draft is not None and not needed:
        refuse("--draft", f"a model with {option} {', '.join(names)}", f"none; with {' or '.join(NEED_DRAFT)} one")
    if models.draft_bits is not None and not needed:
        allowed = f"none: they are of draft models; with {' or '.join(NEED_DRAFT)} there is one"
        refuse("--draft-bits", f"{models.draft_bits} with {option} {', '.join(names)}", allowed)
    if exit_layers is not None and "early-exit" not in names:
        given = f"{exit_layers} with {option} {', '.join(names)}"
        refuse("--exit-layers", given, f"an integer >= 1 with {option} early-exit, and none with others")
    check_counts(1, exit_layers=exit_layers, tree=tree)


def read_num_drafts(given: str | None, smallest: int = 0, nodes: int | None = None) -> int | AdaptiveDrafts:
    """K, or how to choose it. None: the default, which is another one with a tree of ``nodes``."""
    from ..loop.draft_length import DEFAULT_DRAFTS, AdaptiveDrafts

    if given is None:
        return DEFAULT_DRAFTS if nodes is None else TREE_DRAFTS
    if given == "auto":
        return AdaptiveDrafts()
    try:
        count = int(given)
    except ValueError:
        count = smallest - 1
    if count < smallest:
        refuse("--num-drafts", given, f"an integer >= {smallest}, or auto")
    return count


def read_rule(given: str | None, nodes: int | None) -> str:
    """The accept rule. Trees of every drafter can be verified by ``coupled``."""
    return given or ("token" if nodes is None else "coupled")
