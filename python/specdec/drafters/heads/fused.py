"""Heads whose attention, in forwards of few tokens, is the kernel that stores these and attends to what is stored."""

from __future__ import annotations

import copy
from typing import Any, cast

from specdec_layers import has_fused_attention

from ...models.exchanged.native_setting import is_wanted
from ...models.forward.attention import with_attention
from ...models.forward.attention_choice import why_its_own
from ...models.forward.cached_model import CachedModel
from .interface import Head


def with_fused_attention(head: Head, device: str = "cuda") -> Head:
    """Returns a copy of ``head``, with the same weights, whose layouts of few tokens say slots instead of masks
    (``Head.layout``); ``head`` itself if its format takes masks alone, it is not on a device of this type, Triton does
    not run there, or the environment has ``SPECDEC_NATIVE=0``.

    Raises:
        ValueError: ``SPECDEC_NATIVE`` is neither 0 nor 1.
    """
    if not (is_wanted() and head.can_fuse and head.weight.device.type == device and has_fused_attention(device)):
        return head
    # Layers of transformers' classes find their attention by a name in their configuration.
    fast = cast(Head, copy.copy(with_attention(cast(Any, head), "fused")))
    fast.fuses = True
    return fast


def layers_can_fuse(target: CachedModel) -> bool:
    """Whether layers of the target's class can have that attention. Soft caps and sinks are not among what they have in
    forwards of more tokens."""
    capped = getattr(target.config, "attn_logit_softcapping", None)
    return why_its_own(target.model, target.device.type) is None and not capped
