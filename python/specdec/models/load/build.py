"""Makes the model that was saved, in the form that was asked for."""

from __future__ import annotations

from dataclasses import replace

import torch
from transformers import PreTrainedModel

from ..exchanged.stored_weights import compute_in_float32
from .adapters import add_adapter, require_adapter
from .few_bits import by_bitsandbytes, round_weights
from .plan import Plan
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
    if plan.bits is None:
        model = saved.load(plan.dtype, plan.device)
        # Nobody chose bfloat16, in which many CPUs are slow.
        if plan.dtype is None and plan.on_cpu and model.dtype == torch.bfloat16 and saved.quantisation is None:
            model = compute_in_float32(model)
    elif plan.rounds:
        # On a CPU, weights that are not rounded stay stored as they were saved, and compute in float32.
        model = saved.load(None if plan.on_cpu else plan.dtype, torch.device("cpu"))
        if not plan.on_cpu:
            replace(plan, dtype=model.dtype).check(saved)  # which nobody knew before, if nobody chose it
        model = round_weights(model, plan.bits, plan.device)
    else:
        how, where = by_bitsandbytes(plan.bits), {"": plan.device}
        model = saved.place(plan.dtype, quantization_config=how, device_map=where)
    if plan.adapter is not None:
        add_adapter(model, plan.adapter)
    return model.eval()
