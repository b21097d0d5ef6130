"""What the forwards of a step cost alone: the draft's share c, what a step spends in models, what attention adds."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch
from loop_methods import Cell
from measure import Method, first_line, interleave, summary, synchronize
from specdec import SpeculativeDecoder
from specdec.models.attention import BLOCK
from specdec.models.cached_model import CachedModel
from specdec.models.kv_cache import StaticKVCache, visible_slots

SHORT = 64  # tokens of a context that costs nothing to attend to


class Forwards:
    """Decoding forwards of one model over a filled cache, as the loop makes them."""

    def __init__(self, model: CachedModel, batch: int, capacity: int):
        self.model, self.batch = model, batch
        self.cache: StaticKVCache = model.new_cache(batch, capacity)

    def of(self, context: int, width: int) -> Callable[[], object]:
        """A forward of ``width`` tokens a sequence after ``context`` stored ones."""
        places = torch.arange(context, context + width, device=self.model.device).expand(self.batch, -1).contiguous()
        layout = self.model.layout(places, places, visible_slots(context + width, self.cache.capacity))
        tokens = places % self.model.vocab_size
        return lambda: self.model(tokens, self.cache, layout)

    def slots_read(self, filled: int) -> int:
        """What attention is given to read of each sequence."""
        if self.model.reads_only_filled:
            return -(-filled // BLOCK) * BLOCK
        return visible_slots(filled, self.cache.capacity)

    def filled_bytes(self, context: int) -> int:
        """Of keys and values after so many tokens."""
        stored = [states for layer in self.cache.layers for states in (layer.keys, layer.values)]
        return sum(s.shape[1] * s.shape[3] * s.element_size() for s in stored) * self.batch * context


def timed(
    calls: dict[str, Callable[[], object]], device: torch.device, graphs: bool, seconds: float
) -> dict[str, dict[str, float | int]]:
    """Summaries of seconds a call, in interleaved rounds; ``graphs``: as CUDA graphs, on the device's clock."""
    methods = []
    for name, call in calls.items():
        method = Method(name, lambda i, call=call: call())
        for _ in range(3):  # compiles, allocates
            method.sample()
        synchronize(device)
        methods.append(method.captured("cold") if graphs else method)
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
    target, draft = (Forwards(m, cell.batch, capacity) for m in (decoder.target, decoder.drafter.model))
    first, other, verify = draft.of(context, 2), draft.of(context, 1), target.of(context, k + 1)

    def step() -> None:
        first()
        for _ in range(k - 1):
            other()
        verify()

    calls = {
        "target 1": target.of(context, 1),
        f"target {k + 1}": verify,
        f"target {k + 1}, short": target.of(min(SHORT, context), k + 1),
        "draft 1": other,
        "draft 2": first,
        "step": step,
    }
    found = timed(calls, decoder.target.device, graphs, seconds)
    whole, short = (found[f"target {k + 1}{suffix}"]["median"] for suffix in ("", ", short"))
    after = context + k + 1
    attention = {
        "seconds": whole - short,
        "filled_bytes": target.filled_bytes(after) - target.filled_bytes(min(SHORT, context) + k + 1),
        "slots_over_filled": target.slots_read(after) / after,
    }
    return {"seconds": found, "c": found["draft 1"]["median"] / found["target 1"]["median"], "attention": attention}


def costs_of(decoder: SpeculativeDecoder, cell: Cell, graphs: bool, seconds: float) -> dict[str, object]:
    """``step_costs``, or {"unavailable": why}."""
    try:
        return step_costs(decoder, cell, graphs, seconds)
    except Exception as error:
        return {"unavailable": first_line(error)}
    finally:
        free(decoder.target.device)


def free(device: torch.device) -> None:
    """Gives back what nobody holds any more."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
