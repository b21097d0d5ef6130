"""The methods of ``specdec bench`` by their names, and the grid that its options ask for.

Nothing here imports torch before a command runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from . import drafters, drafting
from .options import read_sampling
from .user_errors import check_counts, option_name, refuse

if TYPE_CHECKING:
    from ..drafters.protocol import Drafter
    from ..evaluation.bench.grid import Drafts, Grid, Method
    from .models import ModelOptions

BASELINES, ASSISTED = ("transformers", "plain"), "assisted"
# name -> what it is; the baselines are always measured
NAMES = {
    "transformers": "transformers' generate",
    "plain": "specdec without drafts",
    ASSISTED: "transformers' assisted generation",
    **{name: what for name, what in drafters.NAMES.items() if name != "none"},
}


def read_methods(given: Sequence[str] | None, at: ModelOptions, exit_layers: int | None) -> list[str]:
    """Returns the names of what is measured beside the baselines. Checks all that can be checked before models are
    loaded."""
    names = list(given or _default(at, exit_layers))
    for name in names:
        if name not in NAMES and (name == "none" or not drafters.is_drafter(name)):
            refuse("--method", repr(name), f"{', '.join(NAMES)}, {drafters.HEAD}, or {drafters.COMBINED}")
    if len({*names}) < len(names):
        refuse("--method", ", ".join(names), "each once")
    needed = [name for name in names if name not in (*BASELINES, ASSISTED)]
    if (
        ASSISTED in names
        and (at.draft is not None or at.target is None)
        and not {p for n in needed for p in drafters.parts_of(n)} & {*drafters.NEED_DRAFT}
    ):
        needed.append("model")  # assisted generation alone takes the draft, too
    drafting.check_drafters(needed, at, exit_layers, option="--method")
    return [name for name in names if name not in BASELINES]


def _default(at: ModelOptions, exit_layers: int | None) -> list[str]:
    of_draft = ["model"] if at.target is None or at.draft is not None else []
    others = ["eagle3"] if at.target is None else ["suffix"]
    early = ["early-exit"] if at.alone or exit_layers is not None else []
    return [ASSISTED, *of_draft, "lookup", *others, *early]


def drafters_of(names: Sequence[str]) -> list[str]:
    """Those of the names that are drafters."""
    return [name for name in names if name != ASSISTED]


class Axes(NamedTuple):
    """What the grid is to have, as the options say it; None: the default."""

    num_drafts: Sequence[str] | None
    rules: Sequence[str] | None
    trees: Sequence[int] | None
    temperatures: Sequence[float]
    batches: Sequence[int]
    filters: Mapping[str, Sequence[float] | None]

    def check(self) -> None:
        """Checks every value alone, before models are loaded."""
        read_drafts(self.num_drafts or ())
        for nodes in self.trees or ():
            check_counts(1, tree=nodes)
        for size in self.batches:
            check_counts(1, batch_size=size)
        drawn = [("token", {"temperature": temperature}) for temperature in self.temperatures]
        drawn += [(rule, {"temperature": 1.0}) for rule in self.rules or ()]
        drawn += [("token", {"temperature": 1.0, name: v}) for name, vs in self.filters.items() for v in vs or ()]
        for rule, params in drawn:
            read_sampling(rule, **params)

    def grid(self, methods: Sequence[str], of_methods: Mapping[str, Drafter | None], alone: bool) -> Grid:
        """
        Args:
            of_methods: their drafters, by name.
            alone: whether there is a target without a draft.
        """
        from ..evaluation.bench.grid import FILTERS, Grid

        grid = Grid(
            tuple(_method(name, of_methods.get(name), self.trees, alone) for name in methods),
            _each_once("--temperature", self.temperatures),
            _each_once("--batch-size", self.batches),
            None if self.num_drafts is None else tuple(read_drafts(self.num_drafts)),
            None if self.rules is None else _each_once("--rule", self.rules),
            {name: _each_once(option_name(name), given) for name in FILTERS if (given := self.filters[name])},
            drafters.TREE_DRAFTS,
        )
        if self.trees and not any(nodes is not None for method in grid.methods for nodes in method.trees):
            refuse("--tree", ", ".join(map(str, self.trees)), "with a --method that proposes trees")
        if grid.filters and not any(temperature > 0 for temperature in grid.temperatures):
            refuse(option_name(next(iter(grid.filters))), "a filter with temperature 0 alone", "a temperature > 0")
        return grid


def read_drafts(given: Sequence[str]) -> list[Drafts]:
    """K as the grid has it: numbers and "auto"."""
    _each_once("--num-drafts", given)
    read = [drafting.read_num_drafts(each, 1) for each in given]
    return [each if isinstance(each, int) else "auto" for each in read]


def _method(name: str, drafter: Drafter | None, trees: Sequence[int] | None, alone: bool) -> Method:
    from ..evaluation.bench.grid import Method

    short = short_name(name)
    nodes: tuple[int, ...] = () if trees is None else _each_once("--tree", trees)
    if name == "tree":
        return Method(short, nodes or (drafters.TREE_NODES,))
    takes = name not in (*drafters.NO_TREES, ASSISTED, "model") and drafter is not None and drafter.trees
    # As ``generate`` has it for a target alone: K adapts to sampled texts, too, so what is not accepted costs little.
    rule = "coupled" if alone and {*drafters.parts_of(name)} <= {*drafters.ALONE} else "token"
    return Method(short, (None, *nodes) if takes else (None,), rule)


def short_name(name: str) -> str:
    """What results call a method: of the folder of a head, its last part."""
    return "+".join(Path(part).name if drafters.is_head(part) else part for part in drafters.parts_of(name))


def _each_once(option: str, values: Sequence) -> tuple:
    if len({*values}) < len(values):
        refuse(option, ", ".join(map(str, values)), "each once")
    return tuple(values)
