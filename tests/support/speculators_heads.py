"""Random tiny heads of the library ``speculators``, written by its own code, and what its own forwards make of them.

Its models have forwards for training alone, which read whole texts with the tokens that follow. Drafts are given to
them as these tokens, so what they compute at the last known token is what was to be drafted."""

from __future__ import annotations

from pathlib import Path

import torch
from speculators import SpeculatorModel, SpeculatorModelConfig, SpeculatorsConfig, VerifierConfig
from speculators.models import dflash, dflash2, dspark, eagle3, mtp, peagle
from speculators.models.peagle.data import generate_cod_sample_indices
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import PreTrainedConfig, PreTrainedModel

KINDS = {
    "eagle3": (eagle3.Eagle3DraftModel, eagle3.Eagle3SpeculatorConfig),
    "peagle": (peagle.PEagleDraftModel, peagle.PEagleSpeculatorConfig),
    "dflash": (dflash.DFlashDraftModel, dflash.DFlashSpeculatorConfig),
    "dflash2": (dflash2.DFlash2DraftModel, dflash2.DFlash2SpeculatorConfig),
    "dspark": (dspark.DSparkDraftModel, dspark.DSparkSpeculatorConfig),
    "mtp": (mtp.MTPDraftModel, mtp.MTPSpeculatorConfig),
}
MORE = 8  # tokens after the drafts, which the forwards want and nothing of interest sees


def write_head(
    folder: Path,
    kind: str,
    target: PreTrainedModel,
    layers: PreTrainedConfig,
    reduced: torch.Tensor | None = None,
    **settings,
) -> SpeculatorModel:
    """Writes a head for ``target`` to ``folder``, and returns it as speculators reads it from there.

    Args:
        layers: configuration of its layers.
        reduced: [columns] int64, ascending: the ids of its vocabulary; None: all.
        settings: the rest of its configuration.
    """
    new, config = KINDS[kind]
    verifier = folder.with_name(f"{folder.name} target")
    target.save_pretrained(verifier)
    layers._attn_implementation = "eager"  # what it has else needs a compiler
    if kind != "mtp":
        settings["draft_vocab_size"] = layers.vocab_size if reduced is None else len(reduced)
    said = SpeculatorsConfig(
        algorithm=kind,
        proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=1)],
        default_proposal_method="greedy",
        verifier=VerifierConfig.from_pretrained(str(verifier)),
    )
    head = new(config(speculators_config=said, transformer_layer_config=layers, **settings))
    if reduced is not None:
        t2d = torch.zeros(layers.vocab_size, dtype=torch.bool)
        t2d[reduced] = True
        head.load_vocab_mappings(t2d, reduced - torch.arange(len(reduced)))
    torch.manual_seed(0)
    own = kind in ("eagle3", "peagle")
    # What a head does not write is the target's, which speculators reads instead.
    saved = {"embed_tokens": own, "lm_head": own or reduced is not None, "verifier_lm_head": False}
    with torch.no_grad():
        for name, weight in head.named_parameters():
            if saved.get(name.removesuffix(".weight"), True):
                weight.normal_(std=0.3).add_(weight.dim() == 1 and "norm" in name)
    head.load_verifier_weights()
    head.to(target.dtype).save_pretrained(folder)
    read = SpeculatorModelConfig.from_pretrained(folder)
    read.transformer_layer_config._attn_implementation = "eager"
    return SpeculatorModel.from_pretrained(folder, config=read, dtype=target.dtype).eval()


def features(target: PreTrainedModel, text: list[int], ids: list[int]) -> torch.Tensor:
    """[1, L, width] of the hidden states ``ids``, side by side. The last layer's is its output, before the norm, as
    speculators has it from vLLM."""
    last: list[torch.Tensor] = []
    layer = target.model.layers[-1]
    hook = layer.register_forward_hook(lambda module, args, out: last.append(out if torch.is_tensor(out) else out[0]))
    states = target(torch.tensor([text]), output_hidden_states=True).hidden_states
    hook.remove()
    return torch.cat([last[0] if i == len(states) - 1 else states[i] for i in ids], -1)


def draft_logits(
    head: SpeculatorModel, target: PreTrainedModel, states: list[torch.Tensor], text: list[int], drafts: list[int]
) -> torch.Tensor:
    """[len(drafts) + 1, columns] after ``text``, by the forward of ``head``."""
    return _LOGITS[head.config.speculators_model_type](head, target, text, drafts)


def _padded(states: torch.Tensor, length: int) -> torch.Tensor:
    return torch.nn.functional.pad(states, (0, 0, 0, length - states.shape[1]), value=1.0)


def _losses(module, head: SpeculatorModel, which: int | str = 0, **given) -> list[torch.Tensor]:
    """The logits of which ``head``'s forward computes its losses, or another one of the arguments of these."""
    seen: list[torch.Tensor] = []

    def compute_metrics(*others, **settings):
        seen.append(settings[which] if isinstance(which, str) else others[which])
        return torch.tensor(0.0), {}

    old, module.compute_metrics = module.compute_metrics, compute_metrics
    try:
        head(**given, document_ids=torch.zeros(1, given["input_ids"].shape[1], dtype=torch.int64))
    finally:
        module.compute_metrics = old
    return seen


def _eagle3(head, target, text, drafts) -> torch.Tensor:
    known, tokens = len(text) - 1, torch.tensor([[*text[1:], *drafts, *[0] * MORE]])
    states = _padded(features(target, text, head.target_layer_ids)[:, :known], tokens.shape[1])
    last = states[..., : head.hidden_size]
    seen = _losses(
        eagle3.core, head, hidden_states=states, input_ids=tokens, verifier_last_hidden_states=last,
        ttt_steps=len(drafts) + 1,
    )  # fmt: skip
    return torch.stack([logits[0, known - 1] for logits in seen])


def _peagle(head, target, text, drafts) -> torch.Tensor:
    """The drafts are not known to it. Chains of masks begin at every token from the last known one on, none is left
    out, and those of later tokens do not touch the first."""
    known, count = len(text) - 1, len(drafts) + 1
    tokens = torch.tensor([[*text[1:], *[0] * (count + MORE)]])
    states = _padded(features(target, text, head.target_layer_ids)[:, :known], tokens.shape[1])
    chains = {"loss_mask": (torch.arange(tokens.shape[1]) >= known)[None].float(), "num_depths": count}
    chains |= {"down_sample_ratio": 1000.0}
    (logits,) = _losses(
        peagle.core, head, hidden_states=states, input_ids=tokens,
        verifier_last_hidden_states=states[..., : head.hidden_size], **chains,
    )  # fmt: skip
    begins, depth = generate_cod_sample_indices(tokens.shape[1], **chains)
    ours = (begins == known - 1).nonzero()[:, 0]
    assert depth[ours].tolist() == [*range(count)]
    return logits[0, ours]


def _dflash(head, target, text, drafts, which: int | str = 0) -> torch.Tensor:
    known, block = len(text) - 1, head.block_size
    tokens = torch.tensor([[*text, *drafts, *[0] * (block + MORE)]])
    states = _padded(features(target, text, head.target_layer_ids)[:, :known], tokens.shape[1])
    module = {"dflash": dflash, "dflash2": dflash2, "dspark": dspark}[head.config.speculators_model_type].core
    (found,) = _losses(
        module, head, which, hidden_states=states, input_ids=tokens, max_anchors=1,
        loss_mask=(torch.arange(tokens.shape[1]) == known)[None].float(),
        verifier_last_hidden_states=states[..., : head.hidden_size],
    )  # fmt: skip
    first = 0 if head.config.sample_from_anchor else 1
    return found[0, first : first + len(drafts) + 1]


def _dflash2(head, target, text, drafts) -> torch.Tensor:
    """Training scores the true token beside the candidates, so these are selected as they would be when drafting."""
    selector, given = head.candidate_selector, []
    score = selector.score_candidates
    selector.score_candidates = lambda *those: given.append(those) or score(*those)
    logits = _dflash(head, target, text, drafts, "unary_logits")
    del selector.score_candidates
    (unary, hidden, before, _), first = given[0], 0 if head.config.sample_from_anchor else 1
    candidates, scores = selector.select(unary, hidden, before)
    rows = torch.full_like(unary, -torch.inf).scatter(-1, candidates, scores)[0]
    return rows[first : first + len(logits)]


def confidences(head: SpeculatorModel, target: PreTrainedModel, text: list[int], drafts: list[int]) -> torch.Tensor:
    """[len(drafts) + 1], of a DSpark head: how likely it finds each of ``drafts``, and one after them."""
    return _dflash(head, target, text, drafts, 2).sigmoid()


def _mtp(head, target, text, drafts) -> torch.Tensor:
    """One step of the forward for each draft, over true features and, of drafted tokens, its own outputs. (In training,
    later steps read outputs in the place of all features, since it has no others then.)"""
    last = features(target, text, [target.config.num_hidden_layers])[:, : len(text) - 1]
    states, rows = target.model.norm(last), []
    kept: list[torch.Tensor] = []
    hook = head.mtp_layers[0].register_forward_hook(lambda module, args, out: kept.append(out))
    for i in range(len(drafts) + 1):
        tokens = torch.tensor([[*text, *drafts[:i], 0]])
        logits, *_ = head(input_ids=tokens, hidden_states=_padded(states, tokens.shape[1]))
        rows.append(logits[0][0, -1])
        states = torch.cat((states, kept[-1][:, -1:]), 1)
    hook.remove()
    return torch.stack(rows)


_LOGITS = {"eagle3": _eagle3, "peagle": _peagle, "dflash": _dflash, "dflash2": _dflash2, "dspark": _dflash, "mtp": _mtp}
