"""MTP layers in the files of a target, as their publishers name them."""

from __future__ import annotations

import copy
import itertools
import re
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from ...checks import refuse
from ...models.cached_model import CachedModel
from ...models.kv_layer import Slot
from ...models.layers import layers_path
from .checkpoint import Checkpoint
from .interface import Head, Variant
from .mtp import Mtp, MtpHead, MtpInSuccession, MtpLayer
from .source import Source

# Of these the tests know that a layer can be built from transformers' class. MiMo's layers are those of qwen2.
TARGETS = ("deepseek_v3", "glm4_moe", "mimo", "qwen2", "qwen3", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
# What is beside the decoder layer, as DeepSeek and GLM name it, MiMo, and Qwen, whose layers share it. All else is the
# decoder layer's.
DEEPSEEK = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "shared_head.norm": "norm"}
_MIMO = {"token_layernorm": "enorm", "hidden_layernorm": "hnorm", "input_proj": "eh_proj", "final_layernorm": "norm"}
QWEN = {"pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "fc": "eh_proj", "norm": "norm"}
_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")  # what config.json may call the number of layers
_SHARED = {"embed_tokens.weight": "embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}


def mtp(source: Source) -> Head:
    """The MTP layers of DeepSeek-V3 and GLM-4.5 (``layers.{number of layers}``), of MiMo (``mtp_layers.0``), and of
    Qwen3-Next and Qwen3.5 (``mtp.layers.0``, with ``mtp.fc`` and three norms), and those that speculators trains for
    Qwen's targets: MiMo's names in Qwen's order."""
    checkpoint = source.checkpoint
    _check_type(source.target)
    mimo = source.config.get("speculators_model_type") is None
    hidden_first = mimo and any(name.startswith("mtp_layers.") for name in checkpoint.tensors)
    count = _rename(checkpoint, source.num_layers)
    text = source.config.get("text_config")
    for name, part in itertools.product(_COUNTS, (source.config, text if isinstance(text, dict) else {})):
        said = part.get(name)
        if isinstance(said, int) and said != count:
            refuse(name, f"{said} in config.json, and tensors of {count} layers", "as many")
    for k in range(count):
        _fuse_experts(checkpoint, f"layers.{k}.block.mlp.experts")
    slot = _slot(source.target)
    own = source.own_embedding(), source.has_own("lm_head.weight", source.model.get_output_embeddings())
    with torch.device("meta"):
        head = _built(source.target, slot, count, source.final_state(), hidden_first, own)
    other = "token's embedding" if hidden_first else "feature"
    head.doubts = [
        Variant("outputs fed back before the norm", {"recycle_normed": False}),
        Variant(f"the {other} first", {"hidden_first": not hidden_first}),
    ]
    return source.finished(head, source.hidden)


def new_mtp(target: CachedModel) -> MtpHead:
    """Returns one MTP layer for ``target``, in DeepSeek's order, with the weights of new modules, float32 on the CPU.
    Raises ValueError naming ``target``."""
    _check_type(target)
    keys, values = (part._replace(dtype=torch.float32) for part in _slot(target))
    return _built(target, (keys, values), 1, (target.config.num_hidden_layers,), False, (False, False))


def _check_type(target: CachedModel) -> None:
    if target.config.model_type not in TARGETS:
        refuse("target", f"model type {target.config.model_type!r} with MTP layers", ", ".join(TARGETS))


def _slot(target: CachedModel) -> tuple[Slot, Slot]:
    """Returns the keys and the values that the target's last layer with attention stores of a token."""
    return next(slot for slot in reversed(target.layer_slots()) if slot is not None)


def _built(
    target: CachedModel,
    slot: tuple[Slot, Slot],
    count: int,
    states: tuple[int, ...],
    hidden_first: bool,
    own: tuple[bool, bool],
) -> MtpHead:
    """Returns a head whose decoder layers are of the target's class. ``own``: embedding and head."""
    config, hidden = target.config, target.config.hidden_size
    base: Any = target.model.base_model
    own_layers: Any = target.model.get_submodule(layers_path(target.model))
    decoder_layer, norm = type(own_layers[-1]), type(base.norm)
    layers_config = _layers_config(config, count)

    def layer(k: int) -> MtpLayer:
        block: nn.Module = decoder_layer(layers_config, k)
        return MtpLayer(block, hidden, lambda: norm(hidden, config.rms_norm_eps))

    kind: Any = Mtp if count == 1 else MtpInSuccession
    layers, rotary = [layer(k) for k in range(count)], base.rotary_emb.forward
    return kind(layers, states, hidden, target.vocab_size, slot, rotary, hidden_first, own)


def _layers_config(config: PreTrainedConfig, count: int) -> PreTrainedConfig:
    """Returns the target's configuration for MTP layers: all have full attention, and experts if the target has."""
    own = copy.deepcopy(config)
    own.num_hidden_layers = count
    if getattr(own, "layer_types", None):
        own.layer_types = ["full_attention"] * count
    if hasattr(own, "first_k_dense_replace"):
        own.first_k_dense_replace = 0
    return own


def _rename(checkpoint: Checkpoint, num_layers: int) -> int:
    """Gives the tensors the names of :class:`~.mtp.MtpLayer`. Returns the number of layers.

    Raises:
        ValueError: names a tensor of another target's layers, of an 8-bit dtype, or in another layout.
    """
    root, parts, first, given = "layers", DEEPSEEK, num_layers, checkpoint.tensors
    if any(name.startswith("mtp_layers.") for name in given):
        root, parts, first = "mtp_layers", _MIMO, 0
    elif any(name.startswith("mtp.") for name in given):
        root, parts, first, given = "mtp.layers", {name: name for name in QWEN.values()}, 0, _of_each_layer(given)
    renamed: dict[str, torch.Tensor] = {}
    for name, tensor in given.items():
        if (match := re.match(re.escape(root) + r"\.(\d+)\.(.+)$", name)) is None:
            refuse(name, "MTP in another layout", "layers.N.eh_proj, mtp_layers.N.input_proj, or mtp.fc")
        if tensor.itemsize < 2 or name.endswith("weight_scale_inv"):
            refuse(name, f"quantised MTP layers ({tensor.dtype})", "a floating dtype of 16 bits or more")
        number, rest = int(match[1]) - first, match[2]
        if number < 0:
            refuse(name, "an MTP layer of another target", f"{root}.{first} and later, after the target's own")
        part, _, kind = rest.rpartition(".")
        new = f"layers.{number}." + (f"{parts[part]}.{kind}" if part in parts else f"block.{rest}")
        new = _SHARED.get(rest, new)
        if new in renamed and not torch.equal(renamed[new], tensor):
            refuse(name, "other values than in the layer before", "the same in all MTP layers")
        renamed[new] = tensor
    back = {ours: theirs for theirs, ours in (QWEN if root == "mtp.layers" else parts).items()}

    def written(name: str) -> str:
        if (match := re.match(r"layers\.(\d+)\.(block\.)?(.+)$", name)) is None:
            return name
        part, _, kind = match[3].rpartition(".")
        if root == "mtp.layers" and not match[2]:
            return f"mtp.{back[part]}.{kind}"
        rest = match[3] if match[2] else f"{back[part]}.{kind}"
        return f"{root}.{int(match[1]) + first}.{rest}"

    checkpoint.tensors, checkpoint.written = renamed, written
    return checkpoint.count(r"layers\.(\d+)\.")


def _of_each_layer(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Gives what Qwen's layers share to each of them."""
    numbers = {match[1] for name in tensors if (match := re.match(r"mtp\.layers\.(\d+)\.", name))} or {"0"}
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        part, _, kind = name.removeprefix("mtp.").rpartition(".")
        if name.startswith("mtp.") and part in QWEN:
            found |= {f"mtp.layers.{number}.{QWEN[part]}.{kind}": tensor for number in numbers}
        else:
            found[name] = tensor
    return found


def _fuse_experts(checkpoint: Checkpoint, prefix: str) -> None:
    """Stacks the experts' matrices, which files have one by one and transformers' modules together."""
    tensors = checkpoint.tensors
    count = checkpoint.count(re.escape(prefix) + r"\.(\d+)\.")
    if count == 0:
        return

    def stacked(kind: str) -> torch.Tensor:
        names = [f"{prefix}.{e}.{kind}.weight" for e in range(count)]
        for name in names:
            if name not in tensors:
                refuse(checkpoint.written(name), f"no such tensor in {checkpoint.path!r}", "one of each expert")
            if tensors[name].shape != tensors[names[0]].shape:
                given, first = ([*tensors[n].shape] for n in (name, names[0]))
                refuse(checkpoint.written(name), f"shape {given}", f"{first}, as of expert 0")
        return torch.stack([tensors.pop(name) for name in names])

    gate, up, down = (stacked(kind) for kind in ("gate_proj", "up_proj", "down_proj"))
    tensors[f"{prefix}.gate_up_proj"], tensors[f"{prefix}.down_proj"] = torch.cat((gate, up), 1), down
