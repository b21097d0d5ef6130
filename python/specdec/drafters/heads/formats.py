"""The formats of heads: told by their keys, and built from their files."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ...checks import refuse
from .blocks import Shape
from .checkpoint import Checkpoint
from .dflash_files import WALKS, dflash
from .eagle import Eagle
from .eagle3 import Eagle3, Eagle3Flags, PEagle
from .gemma4 import gemma4_assistant
from .interface import Head, Variant
from .medusa import Medusa
from .mtp_files import mtp
from .source import Source


def eagle3(source: Source) -> Head:
    """EAGLE-3 as EAGLE, SpecForge, speculators and DeepSpec write it, and P-EAGLE."""
    checkpoint, config = source.checkpoint, source.config
    sizes = source.layer_sizes()
    tensors, eagle = checkpoint.tensors, config.get("eagle_config") or {}

    def flag(name: str, default: bool = False) -> bool:
        return bool(eagle.get(name, config.get(name, default)))

    shape, num_layers = Shape.read(sizes, tensors), checkpoint.count(r"layers\.(\d+)\.")
    _rename_norms(tensors, num_layers)
    fused = flag("use_aux_hidden_state", True)
    states = source.resolved() if fused else source.final_state()
    # vLLM takes it for true where speculators' files do not say it.
    unsaid = config.get("speculators_model_type") == "eagle3" and "norm_before_residual" not in config
    flags = Eagle3Flags(
        fused=fused,
        norm_before_residual=flag("norm_before_residual", unsaid),
        norm_before_fc=flag("norm_before_fc"),
        fc_norm=flag("fc_norm") or flag("use_aux_norm"),
        norm_output=flag("norm_output"),
        fc_bias="fc.bias" in tensors,
        logit_scale=float(config.get("logit_scale", 1.0)),
    )
    hidden = source.hidden if fused else shape.hidden
    if (said := config.get("target_hidden_size")) not in (None, source.hidden):
        refuse("config.json", f"target_hidden_size {said}", f"{source.hidden}, the target's")
    if fused:
        source.check_fc(len(states))
    elif shape.hidden != source.hidden:
        refuse("config.json", f"hidden_size {shape.hidden} without fc", f"{source.hidden}, the target's")
    d2t, columns = source.vocabulary(sizes)
    parts = source.parts(shape, states, num_layers, columns, hidden)
    mask = source.mask_token(eagle) if "mask_hidden" in tensors else None
    if mask is not None and tensors["mask_hidden"].numel() == len(states) * source.hidden:
        tensors["mask_hidden"] = tensors["mask_hidden"].reshape(1, 1, -1)
    with torch.device("meta"):
        head = Eagle3(parts, flags) if mask is None else PEagle(mask, parts, flags)
    assert source.ids is not None
    head.doubts = [Variant(f"hidden states {list(other)}", {"states": other}) for other in source.ids.doubts]
    head.certain = source.ids.source.endswith("as layers")  # SpecForge's entry, which few read otherwise
    if unsaid:
        head.doubts.append(Variant("norm_before_residual false", {"norm_before_residual": False}))
    if flags.norm_output or config.get("norm_output") is False:  # SpecForge's older files meant the other one
        other = not flags.norm_output
        head.doubts.append(Variant(f"norm_output {str(other).lower()}", {"norm_output": other}))
    return source.finished(head, shape.hidden, d2t)


def _rename_norms(tensors: dict[str, torch.Tensor], num_layers: int) -> None:
    """Gives norms that others call otherwise our names: DeepSpec's of the states, and SGLang's before later layers."""
    for i, name in enumerate(("low", "mid", "high")):
        if (old := tensors.pop(f"aux_norm_{name}.weight", None)) is not None:
            tensors[f"fc_norm.{i}.weight"] = old
    for i in range(1, num_layers):
        if (old := tensors.get(f"layers.{i}.hidden_norm.weight")) is not None:
            tensors.setdefault(f"layers.{i}.input_layernorm.weight", tensors.pop(f"layers.{i}.hidden_norm.weight"))
            if old is not tensors[f"layers.{i}.input_layernorm.weight"]:
                refuse(f"layers.{i}.hidden_norm.weight", "a norm beside input_layernorm", "one of them")


def eagle(source: Source) -> Head:
    """EAGLE-1 and EAGLE-2."""
    checkpoint = source.checkpoint
    shape = Shape.read(source.config, checkpoint.tensors)
    if shape.hidden != source.hidden:
        refuse("config.json", f"hidden_size {shape.hidden}", f"{source.hidden}, the target's")
    parts = source.parts(shape, source.final_state(), checkpoint.count(r"layers\.(\d+)\."))
    # Without the entry there is a bias, unless the file has none.
    biased = "fc.bias" in checkpoint.tensors or bool(source.config.get("bias"))
    with torch.device("meta"):
        head = Eagle(parts, biased)
    return source.finished(head, shape.hidden)


def medusa(source: Source) -> Head:
    checkpoint, config = source.checkpoint, source.config
    num_heads = checkpoint.count(r"medusa_head\.(\d+)\.")
    num_blocks = checkpoint.count(r"medusa_head\.0\.(\d+)\.") - 1
    for name, found in (("medusa_num_heads", num_heads), ("medusa_num_layers", num_blocks)):
        if config.get(name, found) != found:
            refuse("medusa_head", f"tensors of {found} by their names", f"{name} {config[name]} of config.json")
    with torch.device("meta"):
        head = Medusa(source.final_state(), source.hidden, source.target.vocab_size, num_heads, num_blocks)
    return source.finished(head)


FORMATS: dict[str, Callable[[Source], Head]] = {
    "eagle3": eagle3,
    "peagle": eagle3,
    "eagle": eagle,
    "medusa": medusa,
    "dflash": dflash,
    "dspark": dflash,
    "dflash2": dflash,
    "domino": dflash,
    "mtp": mtp,
    "gemma4_assistant": gemma4_assistant,
}


# What other formats are, which are refused.
OTHERS = {
    "hydra": "heads that each read the drafts of those before",
    "lilicorr": "DFlash and a small transformer that scores transitions between candidates (arXiv 2608.20530)",
    "uno": "the target itself, with an adapter, drafting by diffusion",
    "xpress": "DFlash and a refiner that passes over the block several times",
}
_ARCHITECTURES = {"lilicorr": "LiLiCorr", "uno": "Uno", "xpress": "XPress"}


def detect(checkpoint: Checkpoint) -> str:
    """Returns the name of the format, whether FORMATS has it or not. What config.json of speculators says goes before
    the keys; file names say nothing, and architectures only of formats that are refused.

    Raises:
        ValueError: names the tensors that were found.
    """
    tensors, config = checkpoint.tensors, checkpoint.config
    said = config.get("speculators_model_type")
    if said is not None:
        return str(said)
    nested = config.get("dflash_config") or {}
    if (kind := str(nested.get("projector_type", config.get("projector_type", "")))) in OTHERS:
        return kind
    for kind, name in _ARCHITECTURES.items():
        if name in str(config.get("architectures")):
            return kind
    named = {
        "mask_hidden": "peagle",
        **WALKS,
        "refiner_head.": "xpress",
        "medusa_head.": "medusa",
        "hydra_": "hydra",
        "pre_projection.": "gemma4_assistant",
        "mtp": "mtp",
    }
    for begin, kind in named.items():
        if any(name.startswith(begin) for name in tensors):
            return kind
    inputs = {name: t.shape[-1] for name, t in tensors.items() if t.dim() == 2}
    reads, hidden = inputs.get("layers.0.self_attn.q_proj.weight"), config.get("hidden_size")
    if reads is not None and isinstance(hidden, int):
        if reads == 2 * hidden:
            return "eagle3"
        if reads == hidden and "hidden_norm.weight" in tensors and "fc.weight" in tensors:
            return "dflash"
        fused = inputs.get("fc.weight") == 2 * hidden
        if reads == hidden and fused and "layers.0.input_layernorm.weight" not in tensors:
            return "eagle"
    if any(part in name for name in tensors for part in (".eh_proj.", ".enorm.", ".hnorm.")):
        return "mtp"
    found = ", ".join(sorted(tensors)[:5])
    refuse("path", f"tensors of no known format ({found}, ...)", ", ".join(FORMATS))
