"""What the forwards of a step cost alone, what they allow (Leviathan et al. 2023), and which goals the loop reaches."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from measure import Method, interleave, ratios, summary, synchronize
from specdec import SpeculativeDecoder
from specdec.models.cached_model import CachedModel
from specdec.models.kv_cache import StaticKVCache, visible_slots

if TYPE_CHECKING:
    from loop_cells import Cell

SHORT = 64  # tokens of a context that costs nothing to attend to
# Goals for Llama-3.1-8B's shape at batch 1 on an H200, whose bandwidth allows 299 tokens a second of plain decoding.
PLAIN_SPEED = 220.0
OVER_PLAIN, OVER_ASSISTED = 1.8, 3.0
OF_ALLOWED, OUTSIDE, ATTENTION = 0.80, 0.03, 1.10


def forward(model: CachedModel, cache: StaticKVCache, context: int, width: int) -> Callable[[], object]:
    """A forward of ``width`` tokens a sequence after ``context`` stored ones, as the loop makes it."""
    places = torch.arange(context, context + width, device=model.device).expand(len(cache.lengths), -1).contiguous()
    layout = model.layout(places, places, visible_slots(context + width, cache.capacity))
    tokens = places % model.vocab_size
    return lambda: model(tokens, cache, layout)


def timed(
    calls: dict[str, Callable[[], object]], device: torch.device, graphs: bool, seconds: float
) -> dict[str, dict[str, float | int]]:
    """Summaries of seconds a call, in interleaved rounds; ``graphs``: as CUDA graphs, on the device's clock."""
    methods = [Method(name, lambda i, call=call: call()) for name, call in calls.items()]
    for method in [*methods] * 3:  # compiles and allocates
        method.sample()
    synchronize(device)
    methods = [method.captured("cold") if graphs else method for method in methods]
    for method in methods:
        method.pace(device, seconds / (10 * len(methods)))
    samples = interleave(methods, device, seconds)
    return {m.name: summary(samples[m.key]) for m in methods}


@torch.inference_mode()
def step_costs(decoder: SpeculativeDecoder, cell: Cell, graphs: bool, seconds: float) -> dict[str, object]:
    """Summaries of seconds: of the target's and the draft's forwards by width, and of all forwards of a step together.

    ``attention``: what the target's forward of K + 1 tokens takes longer than after a short context, and the bytes of
    the filled cache.
    """
    k, capacity = cell.num_drafts, cell.context + cell.room + 1
    context = cell.context + cell.new_tokens * cell.windows // 2  # the middle of what the loop decodes
    models = decoder.target, decoder.drafter.model
    caches = [m.new_cache(cell.batch, capacity) for m in models]
    target, draft = (partial(forward, m, cache) for m, cache in zip(models, caches, strict=True))
    first, other, verify = draft(context, 2), draft(context, 1), target(context, k + 1)
    calls = {
        "target 1": target(context, 1),
        f"target {k + 1}": verify,
        f"target {k + 1}, short": target(min(SHORT, context), k + 1),
        "draft 1": other,
        "draft 2": first,
        "step": lambda: [call() for call in (first, *[other] * (k - 1), verify)],
    }
    found = timed(calls, decoder.target.device, graphs, seconds)
    whole, short = (found[f"target {k + 1}{suffix}"]["median"] for suffix in ("", ", short"))
    a_token = sum(s.nbytes // s.shape[2] for layer in caches[0].layers for s in (layer.keys, layer.values))
    attention = {"seconds": whole - short, "filled_bytes": a_token * (context - min(SHORT, context))}
    return {"seconds": found, "c": found["draft 1"]["median"] / found["target 1"]["median"], "attention": attention}


# ---- What forwards allow


def expected_tokens(alpha: float, num_drafts: int) -> float:
    """Of a step if every draft were accepted with this chance on its own (section 3.1): (1 - a^(K+1)) / (1 - a)."""
    return sum(alpha**i for i in range(num_drafts + 1))


def allowed_speedup(alpha: float, num_drafts: int, cost: float) -> float:
    """Theorem 3.8, with a draft's forward taking ``cost`` of a target's, whose width costs nothing."""
    return expected_tokens(alpha, num_drafts) / (num_drafts * cost + 1)


def of_allowed(speedup: float, tau: float, num_drafts: int, cost: float) -> float:
    """The loop's efficiency, speed-up over tau, as a part of what ``cost`` allows, 1 / (K cost + 1)."""
    return speedup / tau * (num_drafts * cost + 1)


def fastest(methods: dict[str, list[float]], *words: str) -> str | None:
    """By the median of tokens a second, of the methods whose names have all these words."""
    named = [n for n in methods if {*words} <= {*n.replace("+", " ").split()}]
    return max(named, key=lambda n: summary(methods[n])["median"], default=None)


def judged(row: dict, speeds: dict[str, list[float]], cell: Cell, reading: float | None) -> dict[str, object]:
    """Compares the fastest of ours with the others and with what its forwards allow.

    Args:
        row: with ``methods`` and ``forwards``.
        speeds: tokens a second by method and window.
        reading: bytes a second of this machine; None: not measured.
    """
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
    mode = "+".join(w for w in mine.split()[-1].split("+") if w != "deferred") or "eager"
    costs = row["forwards"].get(mode, {})
    if "c" not in costs:
        return found
    about = next(m for m in row["methods"] if m["name"] == mine)
    k, tau, attention = cell.num_drafts, about["tau"], costs["attention"]
    step = cell.batch * tau / summary(speeds[mine])["median"]  # seconds
    filled = attention["filled_bytes"]
    return found | {
        "c": costs["c"],
        "step_seconds": step,
        # Below 0 where measurements are less exact than that.
        "outside_models": 1 - costs["seconds"]["step"]["median"] / step,
        "allowed_speedup": allowed_speedup(about["alpha"], k, costs["c"]),
        "of_allowed": of_allowed(over["baseline"]["median"], tau, k, costs["c"]) if "baseline" in over else None,
        "attention_over_filled": attention["seconds"] * reading / filled if reading and filled else None,
    }


def goals(found: dict, speeds: dict[str, list[float]]) -> dict[str, bool | None]:
    """Which goals are reached; None: not measured, or not against what the goal names."""
    plain = found["fastest"]["plain"]
    compiled = found["fastest"]["compiled plain"] is not None
    times = {name: ratio["median"] for name, ratio in found.get("times", {}).items()}
    at_least = {
        f"plain {PLAIN_SPEED:g} tokens/s": (plain and summary(speeds[plain])["median"], PLAIN_SPEED),
        f"{OVER_PLAIN:g} times compiled plain": (times.get("baseline") if compiled else None, OVER_PLAIN),
        f"{OVER_ASSISTED:g} times assisted": (times.get("assisted"), OVER_ASSISTED),
        f"{OF_ALLOWED:g} of what c allows": (found.get("of_allowed") if compiled else None, OF_ALLOWED),
    }
    at_most = {
        f"{OUTSIDE:.0%} of a step outside models": (found.get("outside_models"), OUTSIDE),
        f"attention {ATTENTION:g} times its bytes": (found.get("attention_over_filled"), ATTENTION),
    }
    reached = {name: None if value is None else value >= least for name, (value, least) in at_least.items()}
    return reached | {name: None if value is None else value <= most for name, (value, most) in at_most.items()}
