"""What a draft would have to reach that does not exist yet: some of the target's layers, as ``specdec distill`` trains
them. An early exit that was measured says what they take; from which alpha on they pay follows, for this target and for
larger ones."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from ..theory import expected_tau, speedup_of_steps
from .prediction import MARGIN, Tried

LAYERS = 2  # of the draft
LARGER = (2.0, 5.0, 10.0, 50.0)  # times the target's size
GOOD_ALPHA = 0.7  # of a draft that was trained for its target
LARGEST = 1000.0  # times the target's size: where it does not pay there, it pays nowhere
HALVINGS = 20


@dataclass(frozen=True)
class NewDraft:
    """
    Attributes:
        layers, of_layers: how many of the target's it has.
        c: the time of its forward over one token, over that of the target's.
        pays_from: the alpha from which on it pays; None: it never does.
        larger: the same beside targets of so many times the size.
        pays_at: the smallest size, as a multiple of the target's, at which GOOD_ALPHA pays; None: at none.
        parameters: of the target.
    """

    layers: int
    of_layers: int
    c: float
    pays_from: float | None
    larger: dict[float, float | None]
    pays_at: float | None
    parameters: int


def new_draft(early_exit: Tried, exit_layers: int, of_layers: int, parameters: int) -> NewDraft:
    """
    Args:
        early_exit: what was measured with drafts by the first ``exit_layers`` of the target's ``of_layers``.
        parameters: of the target.
    """
    whole = early_exit.plain_forward
    part = statistics.median(of_step["draft_forwards"] / k for k, of_step in early_exit.parts.items())
    layer = max(whole - part, 0.0) / max(of_layers - exit_layers, 1)
    layers = min(LAYERS, exit_layers)
    seconds = max(part - layer * (exit_layers - layers), layer * layers)
    return NewDraft(
        layers,
        of_layers,
        seconds / whole if whole else 0.0,
        pays_from(early_exit, seconds),
        {size: pays_from(early_exit, seconds, size) for size in LARGER},
        _pays_at(early_exit, seconds),
        parameters,
    )


def pays_from(tried: Tried, draft: float, size: float = 1.0) -> float | None:
    """Returns the alpha from which on drafts pay that take ``draft`` seconds each, with the best K; None: at alpha 1
    they do not. The target's forwards take ``size`` times what was measured, all else what it took: on a CPU the bytes
    of weights decide over a forward, while the loop and the draft stay as they are."""
    if _speedup(tried, 1.0, draft, size) < MARGIN:
        return None
    low, high = 0.0, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if _speedup(tried, middle, draft, size) >= MARGIN else (middle, high)
    return high


def _pays_at(tried: Tried, draft: float) -> float | None:
    def enough(size: float) -> bool:
        return _speedup(tried, GOOD_ALPHA, draft, size) >= MARGIN

    if enough(1.0):
        return 1.0
    if not enough(LARGEST):
        return None
    low, high = 1.0, LARGEST
    for _ in range(HALVINGS):
        middle = (low * high) ** 0.5
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def _speedup(tried: Tried, alpha: float, draft: float, size: float) -> float:
    """With the best K."""
    found = [
        speedup_of_steps(
            expected_tau(alpha, k),
            p.step - tried.parts[k]["draft_forwards"] + (size - 1) * tried.parts[k]["target_forwards"] + k * draft,
            p.plain + (size - 1) * tried.plain_forward,
        )
        for k, p in tried.steps.items()
    ]
    return max(found)


def describe(new: NewDraft) -> list[str]:
    """In sentences."""
    made = (
        "No draft model was tried. A smaller model of the same family can be one, and specdec distill makes one: of "
        f"{new.layers} of the target's {new.of_layers} layers it would take {new.c:.2f} times the target's time (c, as "
        "the early exit tells), and "
    )
    if new.pays_from is None:
        made += "would not pay here, even if all of its drafts were accepted."
    else:
        made += f"would pay from alpha {new.pays_from:.2f} on. {GOOD_ALPHA} is a good one."
    sizes = ", ".join(
        f"{size:g} times the size ({_count(size * new.parameters)}): {'never' if alpha is None else f'{alpha:.2f}'}"
        for size, alpha in new.larger.items()
    )
    if new.pays_at is None:
        end = f"with alpha {GOOD_ALPHA} it would pay beside none"
    elif new.pays_at == 1:
        end = f"alpha {GOOD_ALPHA} is enough at this size"
    else:
        end = f"with alpha {GOOD_ALPHA} it would pay from about {_count(new.pays_at * new.parameters)} parameters on"
    return [
        made,
        f"The same draft beside a larger target on this machine would pay from alpha, by size: {sizes}; {end} "
        "(predicted: the target's forwards take longer in proportion, all else stays).",
    ]


def _count(parameters: float) -> str:
    return f"{parameters / 1e9:.1f}B" if parameters >= 1e9 else f"{parameters / 1e6:.0f}M"
