"""Which hidden states of its target a head was trained on. Configurations say it in five conventions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...checks import refuse, shown
from ...models.cache.features import BEFORE_NORM


@dataclass(frozen=True)
class LayerIds:
    """Hidden states as transformers counts them: 0 is the embedding, i the output of layer i - 1 and the input of layer
    i; the number of layers is the final state, after the norm. Engines count the last layer's output, before the norm,
    with the same number, so that is what an entry means, and the other is in doubt.

    Attributes:
        source: what says so.
        doubts: other readings of the same entry.
        missing: whether nothing says so, and these are the format's usual ones.
    """

    states: tuple[int, ...]
    source: str
    doubts: tuple[tuple[int, ...], ...] = field(default=())
    missing: bool = False


def resolve(
    config: Mapping[str, Any], num_layers: int, override: Sequence[int] | None = None, block: int | None = None
) -> LayerIds:
    """Reads the ids of config.json.

    - speculators: ``eagle_aux_hidden_state_layer_ids`` or ``aux_hidden_state_layer_ids``, hidden states;
    - SpecForge: ``eagle_config.eagle_aux_hidden_state_layer_ids``, layers, whose outputs are meant; hidden states if
      one is L, as NVIDIA has it, and to vLLM always;
    - z-lab and DeepSpec: ``target_layer_ids``, ``dflash_config.target_layer_ids`` or ``dspark_target_layer_ids``,
      layers (but hidden states with model type deepseek_v41);
    - vLLM: ``dflash_config.layer_ids`` and ``eagle_config.layer_ids``, hidden states;
    - EAGLE: none, and states 2, L // 2 and L - 3 are meant.

    A top-level ``eagle_aux_hidden_state_layer_ids`` of unknown provenance means hidden states to vLLM, and layers to
    SGLang.

    Args:
        num_layers: L, of the target.
        override: hidden states that the user says are meant.
        block: the number of a DFlash draft's layers, for its usual ids; None: the head is no DFlash.

    Raises:
        ValueError: names the entry, what it has and what is allowed.
    """
    found = _read(config, num_layers, override, block)
    doubts = list(found.doubts)
    if num_layers in found.states:
        doubts.append(found.states)
    before = [tuple(BEFORE_NORM if i == num_layers else i for i in states) for states in (found.states, *found.doubts)]
    doubts[: len(found.doubts)] = before[1:]
    return replace(found, states=before[0], doubts=tuple(doubts))


def written(states: Sequence[int], num_layers: int) -> list[int]:
    """Returns ``states`` as entries of config.json have them."""
    return [num_layers if i == BEFORE_NORM else i for i in states]


def _read(config: Mapping[str, Any], num_layers: int, override: Sequence[int] | None, block: int | None) -> LayerIds:
    if override is not None:
        return LayerIds(_checked("layer_ids", override, num_layers, 0), "layer_ids")
    nested = {name: config.get(name) or {} for name in ("eagle_config", "dflash_config")}
    entries: list[tuple[str, Any, int]] = []  # name, ids, and how far hidden states are from them
    top = config.get("eagle_aux_hidden_state_layer_ids")
    if config.get("speculators_model_type") is not None:
        entries += [("eagle_aux_hidden_state_layer_ids", top, 0)]
        entries += [("aux_hidden_state_layer_ids", config.get("aux_hidden_state_layer_ids"), 0)]
        top = None
    outputs = 0 if config.get("model_type") == "deepseek_v41" else 1
    name = "eagle_aux_hidden_state_layer_ids"
    if (own := nested["eagle_config"].get(name)) is not None:
        return _of_eagle_config(f"eagle_config.{name}", own, num_layers)
    entries += [("dflash_config.target_layer_ids", nested["dflash_config"].get("target_layer_ids"), 1)]
    entries += [("dspark_target_layer_ids", config.get("dspark_target_layer_ids"), outputs)]
    entries += [("target_layer_ids", config.get("target_layer_ids"), 1)]
    entries += [(f"{n}.layer_ids", part.get("layer_ids"), 0) for n, part in nested.items()]
    for entry, ids, offset in entries:
        if ids is not None:
            return LayerIds(_checked(entry, ids, num_layers, offset), f"{entry} of config.json")
    if top is not None:
        states = _checked(name, top, num_layers, 0)
        shifted = tuple(i + 1 for i in states)
        doubts = (shifted,) if max(shifted) <= num_layers else ()
        return LayerIds(states, f"{name} of config.json, as hidden states", doubts)
    if block is not None:
        ids = [num_layers // 2] if block == 1 else [round(1 + i * (num_layers - 4) / (block - 1)) for i in range(block)]
        return LayerIds(_checked("layer_ids", ids, num_layers, 1), "DFlash's usual ones", missing=True)
    usual = (2, num_layers // 2, num_layers - 3)
    if min(usual) < 0 or len({*usual}) < 3:
        refuse("layer_ids", f"none, neither here nor in config.json, for a target of {num_layers} layers", "some")
    return LayerIds(usual, "EAGLE's usual ones", missing=True)


def _of_eagle_config(entry: str, ids: Any, num_layers: int) -> LayerIds:
    source = f"{entry} of config.json"
    if isinstance(ids, list | tuple) and num_layers in ids:  # there is no layer of this number
        return LayerIds(_checked(entry, ids, num_layers, 0), f"{source}, as hidden states")
    states = _checked(entry, ids, num_layers, 1)
    return LayerIds(states, f"{source}, as layers", (tuple(i - 1 for i in states),))


def _checked(name: str, ids: object, num_layers: int, offset: int) -> tuple[int, ...]:
    allowed = f"distinct integers from {0} to {num_layers - offset}"
    if not isinstance(ids, Sequence) or isinstance(ids, str) or not ids:
        refuse(name, shown(ids), allowed)
    fit = all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i + offset <= num_layers for i in ids)
    if not fit or min(ids) < 0 or len({*ids}) < len(ids):
        refuse(name, shown([*ids]), allowed)
    return tuple(i + offset for i in ids)
