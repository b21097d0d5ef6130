"""MTP layers in the files of a target, as their publishers name them."""

from __future__ import annotations

import copy
import functools
import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedConfig

from ...checks import refuse
from ...models.cache.kv_layer import Slot
from ...models.exchanged.layers import layers_path
from ...models.forward.cached_model import CachedModel
from .blocks import Rotation
from .checkpoint import Checkpoint
from .fused import layers_can_fuse
from .interface import Head, Variant
from .mtp import Mtp, MtpHead, MtpInSuccession, MtpLayer
from .mtp_nemotron import Blocks, block_kinds, by_block, by_layer
from .source import Source

# Of these the tests know that a layer can be built from transformers' class. MiMo's layers are those of qwen2.
TARGETS = (
    "deepseek_v3", "glm4_moe", "glm4_moe_lite", "mimo", "nemotron_h", "qwen2", "qwen3", "qwen3_5_moe_text",
    "qwen3_5_text", "qwen3_next",
)  # fmt: skip
# What is beside the decoder layer, as DeepSeek and GLM name it, MiMo, and Qwen, whose layers share it. All else is the
# decoder layer's.
DEEPSEEK = {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "shared_head.norm": "norm"}
_MIMO = {"token_layernorm": "enorm", "hidden_layernorm": "hnorm", "input_proj": "eh_proj", "final_layernorm": "norm"}
QWEN = {"pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "fc": "eh_proj", "norm": "norm"}
_ALLOWED = "layers.N.eh_proj, mtp_layers.N.input_proj, mtp.fc, or mtp.layers.N.eh_proj of nemotron_h"
_OURS = {name: name for name in QWEN.values()}
_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")  # what config.json may call the number of layers
_SHARED = {"embed_tokens.weight": "embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}


def mtp(source: Source) -> Head:
    """The MTP layers of DeepSeek-V3, GLM-4.5 and GLM-4.7-Flash (``layers.{number of layers}``), of MiMo
    (``mtp_layers.0``), of Qwen3-Next and Qwen3.5 (``mtp.layers.0``, with ``mtp.fc`` and three norms), of Nemotron-H
    (``mtp.layers.0`` and later, one for each of its blocks), and those that speculators trains for Qwen's targets:
    MiMo's names in Qwen's order."""
    checkpoint = source.checkpoint
    _check_type(source.target)
    mimo = source.config.get("speculators_model_type") is None
    hidden_first = mimo and any(name.startswith("mtp_layers.") for name in checkpoint.tensors)
    kinds = block_kinds(source.config) if source.target.config.model_type == "nemotron_h" else ()
    count = _rename(checkpoint, source.num_layers, len(kinds))
    text = source.config.get("text_config")
    for name, part in itertools.product(_COUNTS, (source.config, text if isinstance(text, dict) else {})):
        said = part.get(name)
        if isinstance(said, int) and said != count:
            refuse(name, f"{said} in config.json, and tensors of {count} layers", "as many")
    found = (re.match(r"(.+\.experts)\.\d+\.", name) for name in checkpoint.tensors)
    for prefix in sorted({match[1] for match in found if match is not None}):
        _fuse_experts(checkpoint, prefix)
    slot = _slot(source.target)
    own = source.own_embedding(), source.has_own("lm_head.weight", source.model.get_output_embeddings())
    with torch.device("meta"):
        head = _built(source.target, slot, count, source.final_state(), hidden_first, own, kinds)
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
    if target.config.model_type == "nemotron_h":
        refuse("target", "model type 'nemotron_h', whose MTP layers have experts", "a target without them")
    keys, values = (part._replace(dtype=torch.float32) for part in _slot(target))
    return _built(target, (keys, values), 1, (target.config.num_hidden_layers,), False, (False, False))


def _check_type(target: CachedModel) -> None:
    if target.is_sharded:
        refuse("target", "one over several devices (tp) with MTP layers", "one on one device")
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
    kinds: Sequence[str] = (),
) -> MtpHead:
    """Returns a head whose decoder layers are of the target's class.

    Args:
        own: embedding and head.
        kinds: of the blocks that take a layer's place, if the target's layers are such blocks.
    """
    config, hidden = target.config, target.config.hidden_size
    base: Any = target.model.base_model
    own_layers: Any = target.model.get_submodule(layers_path(target.model))
    decoder_layer, norm = type(own_layers[-1]), type(base.norm_f if kinds else base.norm)
    eps = config.layer_norm_epsilon if kinds else config.rms_norm_eps
    configs = [_layers_config(config, count, kind) for kind in kinds or ("full_attention",)]

    def layer(k: int) -> MtpLayer:
        blocks: list[nn.Module] = [decoder_layer(own_config, k) for own_config in configs]
        return MtpLayer(Blocks(blocks) if kinds else blocks[0], hidden, lambda: norm(hidden, eps))

    kind: Any = Mtp if count == 1 else MtpInSuccession
    layers, rotary = [layer(k) for k in range(count)], None if kinds else _rotary(base.rotary_emb)
    head = kind(layers, states, hidden, target.vocab_size, slot, rotary, hidden_first, own)
    head.can_fuse = layers_can_fuse(target)
    return head


def _rotary(module: Any) -> Callable[[torch.Tensor, torch.Tensor], Rotation]:
    """Returns the forward of a rotary embedding, of a text's positions [n, q] int64 where images have three."""
    if not hasattr(module, "mrope_section"):
        return module.forward
    # transformers 5.17 takes the three alone.
    return lambda x, positions: module.forward(x, positions.expand(3, -1, -1))


def _layers_config(config: PreTrainedConfig, count: int, kind: str) -> PreTrainedConfig:
    """Returns the target's configuration for MTP layers: all are of this kind, and have experts if the target has."""
    own = copy.deepcopy(config)
    own.num_hidden_layers = count
    if getattr(own, "layer_types", None):
        own.layer_types = [kind] * count
    if getattr(own, "mlp_layer_types", None):
        own.mlp_layer_types = ["sparse"] * count
    if hasattr(own, "first_k_dense_replace"):
        own.first_k_dense_replace = 0
    return own


def _rename(checkpoint: Checkpoint, num_layers: int, blocks: int) -> int:
    """Gives the tensors the names of :class:`~.mtp.MtpLayer`. Returns the number of layers.

    Args:
        blocks: how many of Nemotron-H's blocks take a layer's place; 0: the target is of another type.

    Raises:
        ValueError: names a tensor of another target's layers, of an 8-bit dtype, or in another layout.
    """
    root, parts, first, given = "layers", DEEPSEEK, num_layers, checkpoint.tensors
    published: Callable[[str], str] = str
    if blocks:
        root, parts, first, given = "mtp.layers", _OURS, 0, by_layer(given, blocks)
        published = functools.partial(by_block, blocks=blocks)
    elif any(name.startswith("mtp_layers.") for name in given):
        root, parts, first = "mtp_layers", _MIMO, 0
    elif any(name.startswith("mtp.") for name in given):
        root, parts, first, given, published = "mtp.layers", _OURS, 0, _of_each_layer(given), _of_all_layers
    renamed: dict[str, torch.Tensor] = {}
    for name, tensor in given.items():
        if (match := re.match(re.escape(root) + r"\.(\d+)\.(.+)$", name)) is None:
            refuse(published(name), "MTP in another layout", _ALLOWED)
        if tensor.itemsize < 2 or name.endswith("weight_scale_inv"):
            refuse(published(name), f"quantised MTP layers ({tensor.dtype})", "a floating dtype of 16 bits or more")
        number, rest = int(match[1]) - first, match[2]
        if number < 0:
            refuse(
                published(name), "an MTP layer of another target", f"{root}.{first} and later, after the target's own"
            )
        part, _, kind = rest.rpartition(".")
        new = f"layers.{number}." + (f"{parts[part]}.{kind}" if part in parts else f"block.{rest}")
        new = _SHARED.get(rest, new)
        if new in renamed and not torch.equal(renamed[new], tensor):
            refuse(published(name), "other values than in the layer before", "the same in all MTP layers")
        renamed[new] = tensor
    back = {ours: theirs for theirs, ours in parts.items()}

    def written(name: str) -> str:
        if (match := re.match(r"layers\.(\d+)\.(block\.)?(.+)$", name)) is None:
            return name
        part, _, kind = match[3].rpartition(".")
        rest = match[3] if match[2] else f"{back[part]}.{kind}"
        return published(f"{root}.{int(match[1]) + first}.{rest}")

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


def _of_all_layers(name: str) -> str:
    """Returns the name of a tensor as Qwen writes it, given the one of each layer."""
    back, match = {ours: theirs for theirs, ours in QWEN.items()}, re.match(r"mtp\.layers\.\d+\.(\w+)\.(\w+)$", name)
    return name if match is None or match[1] not in back else f"mtp.{back[match[1]]}.{match[2]}"


def _fuse_experts(checkpoint: Checkpoint, prefix: str) -> None:
    """Stacks the experts' matrices, which files have one by one and transformers' modules together."""
    tensors = checkpoint.tensors
    count = checkpoint.count(re.escape(prefix) + r"\.(\d+)\.")

    def stacked(kind: str) -> torch.Tensor:
        names = [f"{prefix}.{e}.{kind}.weight" for e in range(count)]
        for name in names:
            if name not in tensors:
                refuse(checkpoint.written(name), f"no such tensor in {checkpoint.path!r}", "one of each expert")
            if tensors[name].shape != tensors[names[0]].shape:
                given, first = ([*tensors[n].shape] for n in (name, names[0]))
                refuse(checkpoint.written(name), f"shape {given}", f"{first}, as of expert 0")
        return torch.stack([tensors.pop(name) for name in names])

    if any(name.startswith(prefix) and name.endswith(".gate_proj.weight") for name in tensors):
        gate, up = stacked("gate_proj"), stacked("up_proj")
        tensors[f"{prefix}.gate_up_proj"] = torch.cat((gate, up), 1)
    else:
        tensors[f"{prefix}.up_proj"] = stacked("up_proj")
    tensors[f"{prefix}.down_proj"] = stacked("down_proj")
