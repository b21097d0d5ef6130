"""Theory beside measurement: the speed-up by theorem 3.8 for the alpha and the c that ``specdec bench`` measured, the
measured speed-up, and the factors between the two.

    measured / predicted = (tau / predicted tau) x (predicted step / measured step)

The first factor is below 1 where drafts are not accepted independently with one probability: later positions of a step
fare worse, and texts have easy and hard parts. The second is below 1 where a target forward over K + 1 tokens takes
longer than one over a single token, and for the time of a step that neither model takes. What remains is noise, and
what prompts and ends of texts cost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from .theory import best_k, expected_speedup, expected_tau

MOST_DRAFTS = 16  # up to which the best K is predicted
GROUP = ("method", "rule", "tree", "temperature", "batch", "top_k", "top_p", "min_p")
SAME_TEXTS = GROUP[3:]  # of a cell and the plain cell that it is compared with


@dataclass(frozen=True)
class Row:
    """A cell with a fixed K, predicted and measured.

    Attributes:
        c: time of one draft forward over that of a plain step's target forward.
        tau, speedup: by equation (1) and theorem 3.8 from alpha and c.
        width: the target's forward of a step, over that of a plain step: 1 in the theorem.
        overhead: time of a step outside both models, over the target's forward of a plain step: 0 in the theorem.
        refined: the speed-up from the predicted tau and from what the step took, with ``width`` and ``overhead``.
        measured_speedup: the median of the rounds.
    """

    cell: str
    num_drafts: int
    alpha: float
    c: float
    tau: float
    measured_tau: float
    speedup: float
    width: float
    overhead: float
    refined: float
    measured_speedup: float

    @property
    def predicted(self) -> dict[str, float]:
        """As results.json has it."""
        return {"c": self.c, "tau": self.tau, "speedup": self.speedup}

    @property
    def reasons(self) -> dict[str, float]:
        """Factors whose product is measured over predicted speed-up: ``tau``, ``width`` and ``loop`` in the order of
        the module's text, and ``rest``."""
        step, with_width = self.num_drafts * self.c + 1, self.num_drafts * self.c + self.width
        factors = {
            "tau": self.measured_tau / self.tau,
            "width": step / with_width,
            "loop": self.refined / (self.tau / with_width),
        }
        known = factors["tau"] * factors["width"] * factors["loop"]
        return factors | {"rest": self.measured_speedup / self.speedup / known}

    def to_dict(self) -> dict[str, object]:
        return asdict(self) | {"reasons": self.reasons}


@dataclass(frozen=True)
class Best:
    """The best K of the cells that differ in nothing else.

    Attributes:
        predicted: of theorem 3.8, up to MOST_DRAFTS, by the mean alpha and c of these cells.
        refined: of the K that were measured, by ``Row.refined``.
        found: of the K that were measured, by ``Row.measured_speedup``; 0: plain decoding is faster than all.
    """

    group: dict[str, Any]
    predicted: int
    refined: int
    found: int
    tried: list[int]


def rows_of(cells: Iterable[Mapping[str, Any]]) -> list[Row]:
    """Returns a row for each cell of results.json with a fixed K, chains only, whose alpha and shares are known and
    that has a plain cell with the same settings."""
    every = list(cells)
    plain = {_key(c, SAME_TEXTS): c for c in every if c["method"] == "plain" and c.get("shares")}
    found = []
    for cell in every:
        base, k = plain.get(_key(cell, SAME_TEXTS)), cell.get("num_drafts")
        known = cell.get("shares") and cell.get("alpha") is not None and cell.get("tau") and cell.get("speedup")
        if base is not None and known and isinstance(k, int) and k > 0 and cell.get("tree") is None:
            found.append(_row(cell, base, k))
    return found


def _row(cell: Mapping[str, Any], plain: Mapping[str, Any], k: int) -> Row:
    step, plain_step = _step_seconds(cell), _step_seconds(plain)
    forward = plain["shares"]["target"] * plain_step
    shares, alpha = cell["shares"], cell["alpha"]
    c = shares["draft"] * step / k / forward
    tau = expected_tau(alpha, k)
    return Row(
        cell=cell["id"],
        num_drafts=k,
        alpha=alpha,
        c=c,
        tau=tau,
        measured_tau=cell["tau"],
        speedup=expected_speedup(alpha, c, k),
        width=shares["target"] * step / forward,
        overhead=(shares["kernels"] + shares["loop"]) * step / forward,
        refined=tau * plain_step / step,
        measured_speedup=cell["speedup"]["over_plain"]["median"],
    )


def _step_seconds(cell: Mapping[str, Any]) -> float:
    """Seconds of all rounds' steps, without the prompts, over steps. A step of a batch counts once for each of its
    sequences, in both cells."""
    rounds = cell["rounds"]
    seconds = sum(taken for r in rounds for part, taken in r["seconds_by_part"].items() if part != "prefill")
    return seconds / sum(r["steps"] for r in rounds)


def best_of(cells: Sequence[Mapping[str, Any]]) -> list[Best]:
    """Returns the best K of each group of cells that differ in K alone."""
    rows, groups = {row.cell: row for row in rows_of(cells)}, dict[tuple, list[Row]]()
    for cell in cells:
        if cell["id"] in rows:
            groups.setdefault(_key(cell, GROUP), []).append(rows[cell["id"]])
    found = []
    for key, own in groups.items():
        alpha, c = (sum(getattr(row, name) for row in own) / len(own) for name in ("alpha", "c"))
        fastest = max(own, key=lambda row: row.measured_speedup)
        found.append(
            Best(
                group=dict(zip(GROUP, key, strict=True)),
                predicted=best_k(alpha, c, MOST_DRAFTS),
                refined=max(own, key=lambda row: row.refined).num_drafts,
                found=fastest.num_drafts if fastest.measured_speedup > 1 else 0,
                tried=sorted(row.num_drafts for row in own),
            )
        )
    return found


def _key(cell: Mapping[str, Any], names: Sequence[str]) -> tuple:
    return tuple(cell.get(name) for name in names)


HEAD = ("cell", "alpha", "c", "tau", "measured", "speed-up", "with width and loop", "measured", "mostly because of")
REASONS = {
    "tau": "acceptance that is not the same everywhere",
    "width": "the target's forward over K + 1 tokens",
    "loop": "time outside the models",
    "rest": "the prompts, ends of texts, and noise",
}


def lines_of(rows: Iterable[Row]) -> list[list[str]]:
    """Cells of a table with the columns HEAD."""
    found = []
    for row in rows:
        why, factor = max(row.reasons.items(), key=lambda reason: abs(reason[1] - 1))
        numbers = (row.alpha, row.c, row.tau, row.measured_tau, row.speedup, row.refined, row.measured_speedup)
        reason = "-" if abs(factor - 1) < 0.02 else f"{REASONS[why]} (x {factor:.2f})"
        found.append([row.cell, *(f"{n:.2f}" for n in numbers), reason])
    return found


def words_of(best: Best) -> str:
    """One line about the best K."""
    group = {name: value for name, value in best.group.items() if value is not None}
    about = ", ".join(str(value) if name == "method" else f"{name} {value}" for name, value in group.items())
    found = f"K = {best.found} was the fastest" if best.found else "none was faster than plain decoding"
    tried = ", ".join(map(str, best.tried))
    return f"{about}: of K = {tried} {found}; with measured steps it should be {best.refined}; theorem 3.8 says " + (
        f"{best.predicted}." if best.predicted else "not to draft."
    )
