"""Makes the model that was saved, in the form that was asked for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from transformers import PreTrainedModel

from ..exchanged.stored_weights import compute_in_float32
from .adapters import add_adapter, require_adapter
from .few_bits import by_bitsandbytes, round_weights
from .plan import Plan
from .pretrained import from_pretrained
from .reduced_head import load_reduced
from .saved_model import SavedModel


def build(saved: SavedModel, plan: Plan) -> PreTrainedModel:
    """Returns the model in evaluation mode. Raises OSError and ValueError as ``load_model``."""
    plan.check(saved)
    if saved.file is not None:
        from .gguf.model import gguf_model

        return gguf_model(saved.file, saved.config)
    if plan.tp is not None:
        from .load_sharded import load_sharded

        return load_sharded(saved, plan.dtype, plan.device, plan.tp)
    if plan.adapter is not None:
        require_adapter(plan.adapter)
    model = _in_bits(saved, plan) if plan.bits is not None else _as_saved(saved, plan.dtype, plan.device)
    nobody_chose = plan.dtype is None and plan.bits is None and saved.quantisation is None
    if nobody_chose and plan.on_cpu and model.dtype == torch.bfloat16:
        model = compute_in_float32(model)
    if plan.adapter is not None:
        add_adapter(model, plan.adapter)
    return model.eval()


def _in_bits(saved: SavedModel, plan: Plan) -> PreTrainedModel:
    assert plan.bits is not None
    if not plan.rounds:
        how = by_bitsandbytes(plan.bits)
        return from_pretrained(saved, plan.dtype, quantization_config=how, device_map={"": plan.device})
    # On a CPU, weights that are not rounded stay stored as they were saved, and compute in float32.
    whole = _as_saved(saved, None if plan.on_cpu else plan.dtype, torch.device("cpu"))
    if not plan.on_cpu:
        replace(plan, dtype=whole.dtype).check(saved)  # which nobody knew before, if nobody chose it
    return round_weights(whole, plan.bits, plan.device)


def _as_saved(saved: SavedModel, dtype: torch.dtype | None, device: torch.device) -> PreTrainedModel:
    model: Any
    if saved.is_reduced:
        with saved.at.loading():
            model = load_reduced(saved.at.folder, saved.config, dtype)
    else:
        # Most quantised weights are made for one device, so they are loaded there instead of moved.
        quantised = saved.quantisation is not None and device.type != "cpu"
        model = from_pretrained(saved, dtype, **({"device_map": {"": device}} if quantised else {}))
    with saved.at.loading():
        return model.to(device)
