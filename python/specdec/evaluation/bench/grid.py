"""What is measured: methods x accept rules x K, under temperatures x batch sizes x filters, without what would be the
same twice."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Drafts = int | Literal["auto"]
TRANSFORMERS, PLAIN, ASSISTED = "transformers", "plain", "assisted"
BASELINES = (TRANSFORMERS, PLAIN)  # always measured: ratios to the first alone flatter
FILTERS = ("top_k", "top_p", "min_p")

# K of methods where the caller names none. A draft model is swept over, since its best K is what users ask for; what
# the others propose costs little, so there the number is chosen by the text.
DEFAULT_DRAFTS: Mapping[str, tuple[Drafts, ...]] = {ASSISTED: (2, "auto"), "model": (1, 2, 4, 8, "auto")}
OTHER_DRAFTS: tuple[Drafts, ...] = ("auto",)


@dataclass(frozen=True)
class Setting:
    """What the texts are drawn from, and how many at a time. Speeds are compared within a setting."""

    temperature: float = 0.0
    batch: int = 1
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None

    @property
    def filters(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in FILTERS}

    @property
    def name(self) -> str:
        given = [f"{name}={value:g}" for name, value in self._given]
        return " ".join([f"t={self.temperature:g}", f"b={self.batch}", *given])

    @property
    def words(self) -> str:
        warmth = f"temperature {self.temperature:g}" if self.temperature else "greedy"
        rows = "one sequence at a time" if self.batch == 1 else f"{self.batch} sequences at a time"
        return ", ".join((warmth, rows, *(f"{name} {value:g}" for name, value in self._given)))

    @property
    def file_name(self) -> str:
        parts = (f"t{self.temperature:g}", f"b{self.batch}", *(f"{name}{value:g}" for name, value in self._given))
        return "-".join(parts)

    @property
    def _given(self) -> list[tuple[str, float]]:
        return [(name.replace("_", "-"), value) for name, value in self.filters.items() if value is not None]


@dataclass(frozen=True)
class BenchCell:
    """One method with one K and rule, in one setting.

    Attributes:
        method: of BASELINES, "assisted", or the name of a drafter.
        rule: of specdec's methods that draft; None: there is nothing to accept.
        num_drafts: K, or "auto", which adapts; of "assisted": transformers' own way to choose it. Of a tree the most
            nodes of a path. None: nothing is drafted.
        tree: the nodes of the tree that a step verifies; None: a chain.
    """

    method: str
    setting: Setting
    rule: str | None = None
    num_drafts: Drafts | None = None
    tree: int | None = None

    @property
    def id(self) -> str:
        parts = [self.method, self.rule, None if self.tree is None else f"tree={self.tree}"]
        parts += [None if self.num_drafts is None else f"k={self.num_drafts}", self.setting.name]
        return " ".join(part for part in parts if part is not None)

    @property
    def ours(self) -> bool:
        """Whether specdec decodes it."""
        return self.method not in (TRANSFORMERS, ASSISTED)

    def to_dict(self) -> dict:
        return {
            "id": self.id,
            **{"method": self.method, "rule": self.rule, "num_drafts": self.num_drafts, "tree": self.tree},
            **dataclasses.asdict(self.setting),
        }


@dataclass(frozen=True)
class Method:
    """A method, and which drafts it may have."""

    name: str
    trees: tuple[int | None, ...] = (None,)  # nodes; None: chains
    rule: str = "token"  # of chains, where none is asked for
    tree_rule: str = "coupled"  # of trees likewise

    @property
    def drafts(self) -> bool:
        return self.name not in BASELINES


@dataclass(frozen=True)
class Grid:
    """Everything that is asked for; each tuple has one entry at least, and none twice.

    Attributes:
        num_drafts, rules: None: those of DEFAULT_DRAFTS, and of the methods.
        tree_drafts: K of trees where ``num_drafts`` is None.
    """

    methods: tuple[Method, ...]
    temperatures: tuple[float, ...] = (0.0,)
    batches: tuple[int, ...] = (1,)
    num_drafts: tuple[Drafts, ...] | None = None
    rules: tuple[str, ...] | None = None
    filters: Mapping[str, tuple[float | int | None, ...]] = field(default_factory=dict)
    tree_drafts: int = 6

    def settings(self) -> list[Setting]:
        """Greedy texts have no filters, so these make no other setting at temperature 0."""
        found = []
        for temperature, batch in itertools.product(self.temperatures, self.batches):
            for values in itertools.product(*(self.filters.get(name, (None,)) for name in FILTERS)):
                filters: dict[str, Any] = dict(zip(FILTERS, values, strict=True)) if temperature > 0 else {}
                found.append(Setting(temperature, batch, **filters))
        return list(dict.fromkeys(found))

    def cells(self, setting: Setting) -> list[BenchCell]:
        """The baselines first. At temperature 0 every rule accepts alike, so only the first one is measured; and
        transformers assists one text at a time, so larger batches have no cell of it."""
        found = [BenchCell(name, setting) for name in BASELINES]
        for method in self.methods:
            if not method.drafts or (method.name == ASSISTED and setting.batch > 1):
                continue
            for tree in method.trees:
                default = (self.tree_drafts,) if tree is not None else DEFAULT_DRAFTS.get(method.name, OTHER_DRAFTS)
                rules: Sequence[str | None] = self.rules or (method.rule if tree is None else method.tree_rule,)
                rules = (None,) if method.name == ASSISTED else rules[:1] if setting.temperature == 0 else rules
                for rule, k in itertools.product(rules, self.num_drafts or default):
                    found.append(BenchCell(method.name, setting, rule, k, tree))
        return found

    def all_cells(self) -> list[BenchCell]:
        return [cell for setting in self.settings() for cell in self.cells(setting)]
