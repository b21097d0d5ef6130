"""What a measured cell means: ours over the others, how much of what forwards allow, and which goals are reached."""

from __future__ import annotations

from loop_efficiency import allowed_speedup, of_allowed, outside
from loop_methods import Cell
from measure import ratios, summary

# Of Llama-3.1-8B's shape at batch 1 on an H200; its bandwidth allows 299 tokens a second of plain decoding.
PLAIN_SPEED = 220.0
OVER_PLAIN, OVER_ASSISTED = 1.8, 3.0
OF_ALLOWED, OUTSIDE, ATTENTION = 0.80, 0.03, 1.10


def fastest(methods: dict[str, list[float]], *words: str) -> str | None:
    """Of the methods in whose name these words are; by the median of tokens a second."""
    named = [n for n in methods if {*words} <= {*n.replace("+", " ").split()}]
    return max(named, key=lambda n: summary(methods[n])["median"], default=None)


def judged(row: dict, speeds: dict[str, list[float]], cell: Cell, reading: float | None) -> dict[str, object]:
    """What the fastest of ours are over the others, and how much of what their forwards allow.

    Args:
        row: with ``methods`` and ``forwards``.
        speeds: tokens a second by method and window.
        reading: bytes a second of this machine; None: not measured.
    """
    about = {m["name"]: m for m in row["methods"]}
    best = {"plain": fastest(speeds, "plain"), "compiled plain": fastest(speeds, "plain", "compiled")}
    mine = best["specdec"] = fastest(speeds, "specdec")
    best["assisted"] = fastest(speeds, "assisted")
    found: dict[str, object] = {"fastest": best}
    if mine is None:
        return found
    baseline = best["compiled plain"] or best["plain"]
    others = {"baseline": baseline, "transformers": fastest(speeds, "transformers"), "assisted": best["assisted"]}
    over = {name: ratios(speeds[mine], speeds[other]) for name, other in others.items() if other is not None}
    found |= {"baseline": baseline, "times": over}
    k, tau = cell.num_drafts, about[mine]["tau"]
    mode = "+".join(w for w in mine.split()[-1].split("+") if w != "deferred") or "eager"
    costs = row["forwards"].get(mode, {})
    if "c" not in costs:
        return found
    step = cell.batch * tau / summary(speeds[mine])["median"]  # seconds
    attention, filled = costs["attention"], costs["attention"]["filled_bytes"]
    return found | {
        "c": costs["c"],
        "step_seconds": step,
        "outside_models": outside(step, costs["seconds"]["step"]["median"]),
        "allowed_speedup": allowed_speedup(about[mine]["alpha"], k, costs["c"]),
        "of_allowed": of_allowed(over["baseline"]["median"], tau, k, costs["c"]) if "baseline" in over else None,
        "attention_over_filled": attention["seconds"] * reading / filled if reading and filled else None,
    }


def goals(found: dict, speeds: dict[str, list[float]]) -> dict[str, bool | None]:
    """Which are reached; None: not measured, or not against what the goal names."""
    plain, times = found["fastest"]["plain"], found.get("times", {})
    compiled = found["fastest"]["compiled plain"] is not None

    def at_least(value: float | None, least: float) -> bool | None:
        return None if value is None else value >= least

    def at_most(value: float | None, most: float) -> bool | None:
        return None if value is None else value <= most

    def median(name: str) -> float | None:
        return times[name]["median"] if name in times else None

    return {
        f"plain {PLAIN_SPEED:g} tokens/s": None if plain is None else summary(speeds[plain])["median"] >= PLAIN_SPEED,
        f"{OVER_PLAIN:g} times compiled plain": at_least(median("baseline"), OVER_PLAIN) if compiled else None,
        f"{OVER_ASSISTED:g} times assisted": at_least(median("assisted"), OVER_ASSISTED),
        f"{OF_ALLOWED:g} of what c allows": at_least(found.get("of_allowed"), OF_ALLOWED) if compiled else None,
        f"{OUTSIDE:.0%} of a step outside models": at_most(found.get("outside_models"), OUTSIDE),
        f"attention {ATTENTION:g} times its bytes": at_most(found.get("attention_over_filled"), ATTENTION),
    }
