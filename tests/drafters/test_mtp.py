"""MTP layers in the files of their targets, against transformers' own modules composed by hand over whole sequences."""

from __future__ import annotations

import copy
import functools
import itertools
import json
import warnings

import pytest
import torch
from safetensors.torch import save_file
from specdec import SpeculativeDecoder, load_head
from support.compare_heads import compare
from support.heads import HIDDEN, LAYERS, V, exact_mtp, predictable_target, write
from support.model_types import SHARED_EXPERTS, model_of
from support.models import DECODER, tiny_model
from support.plain_mtp import drafted
from support.scripted import script_k
from torch.nn.functional import linear, rms_norm
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from specdec_kernels import SamplingParams

PARTS = {
    "deepseek": ("model.layers.{}.", ("enorm", "hnorm", "eh_proj", "shared_head.norm")),
    "mimo": ("model.mtp_layers.{}.", ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")),
    "speculators": ("mtp_layers.{}.", ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")),
    "qwen": ("mtp.layers.{}.", ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")),
}
# name: (target, the layout of its files, number of MTP layers, an embedding and a head of their own)
CASES = {
    "deepseek_v3": ("deepseek_v3", "deepseek", 1, False),
    "deepseek_v3, two layers": ("deepseek_v3", "deepseek", 2, False),
    "glm4_moe": ("glm4_moe", "deepseek", 1, True),
    "glm4_moe, three layers": ("glm4_moe", "deepseek", 3, False),
    "mimo": ("mimo", "mimo", 1, False),
    "qwen3_5": ("qwen3_5_text", "qwen", 1, False),
    "qwen3_next": ("qwen3_next", "qwen", 1, False),
    "speculators": ("qwen3", "speculators", 1, False),
    "speculators, experts": ("qwen3_next", "speculators", 1, False),
}

LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 12,
    "v_head_dim": 6,
}


class MimoConfig(Qwen2Config):
    model_type = "mimo"


class MimoForCausalLM(Qwen2ForCausalLM):
    """As the publisher's own code has it, which is not part of transformers."""

    config_class = MimoConfig


@functools.cache
def _target(kind: str):
    if kind in ("glm4_moe", "qwen3_5_text", "qwen3_next"):
        return model_of(kind)
    if kind == "qwen3":
        return tiny_model(kind)
    torch.manual_seed(0)
    sizes = {"num_hidden_layers": 2, "initializer_range": 0.3, **DECODER}
    if kind == "mimo":
        return MimoForCausalLM(MimoConfig(**sizes)).eval()
    return DeepseekV3ForCausalLM(DeepseekV3Config(**sizes | SHARED_EXPERTS | LATENT)).eval()


def mtp_files(kind: str, layout: str, count: int, own: bool) -> tuple[dict, dict, list]:
    """(config.json, tensors, plain layers) of random MTP layers with decoder layers of the target's class."""
    target = _target(kind)
    torch.manual_seed(count)
    config, last, tensors, plain = target.config, target.model.layers[-1], {}, []
    hidden, (root, names) = config.hidden_size, PARTS[layout]
    for k in range(count):
        # Layer 1 of these targets has experts, if they have any.
        block = type(last)(config, 1).eval().requires_grad_(False)
        norms = [1 + 0.3 * torch.randn(hidden) for _ in range(3)]
        projection = 0.3 * torch.randn(hidden, 2 * hidden)
        weights = block.state_dict()
        for name, weight in weights.items():
            weight.normal_(std=0.3).add_(1.0 if "norm" in name else 0.0)
        plain.append((norms, projection, block))
        prefix = root.format(k + (config.num_hidden_layers if layout == "deepseek" else 0))
        beside = "mtp." if layout == "qwen" else prefix  # what all of its layers share
        for name, tensor in zip(names, (norms[0], norms[1], projection, norms[2]), strict=True):
            tensors[f"{beside}{name}.weight"] = tensor
        for name, tensor in weights.items():  # one tensor for each expert, as most files have them
            if layout == "speculators":
                tensors[prefix + name] = tensor
            elif name.endswith("experts.gate_up_proj"):
                stem = prefix + name.removesuffix("gate_up_proj")
                for e, (gate, up) in enumerate(t.chunk(2) for t in tensor):
                    tensors[f"{stem}{e}.gate_proj.weight"], tensors[f"{stem}{e}.up_proj.weight"] = gate, up
            elif name.endswith("experts.down_proj"):
                for e, down in enumerate(tensor):
                    tensors[f"{prefix}{name.removesuffix('down_proj')}{e}.down_proj.weight"] = down
            else:
                tensors[prefix + name] = tensor
        if layout == "deepseek":  # copies of the target's, or others
            tensors[f"{prefix}embed_tokens.weight"] = target.model.embed_tokens.weight.detach() + own
            tensors[f"{prefix}shared_head.head.weight"] = target.lm_head.weight.detach() * (1 + own)
    config = {"model_type": config.model_type, "num_nextn_predict_layers": count, "hidden_size": hidden}
    config |= {"speculators_model_type": "mtp"} if layout == "speculators" else {}
    return config, tensors, plain


def plain_mtp(target, layers, hidden_first: bool, own: bool, final, text, drafts) -> torch.Tensor:
    """Logits [len(drafts) + 1, V] of the drafts after ``text``; ``final`` [L, h] is the target's last state."""
    eps = target.config.rms_norm_eps
    embedding, head = target.model.embed_tokens.weight + own, target.lm_head.weight * (1 + own)

    def out(k: int, features: torch.Tensor, tokens: list[int]) -> torch.Tensor:
        norms, projection, block = layers[k]
        enorm, hnorm, norm = (weight + target.config.model_type.startswith("qwen3_") for weight in norms)  # Qwen adds 1
        both = [
            rms_norm(embedding[torch.tensor(tokens)], enorm.shape, enorm, eps),
            rms_norm(features, hnorm.shape, hnorm, eps),
        ]
        x = linear(torch.cat(both[::-1] if hidden_first else both, 1), projection)[None]
        positions = torch.arange(len(tokens))[None]
        if target.config.model_type.startswith("qwen3_5"):
            positions = positions.expand(3, -1, -1)  # transformers 5.17 takes no fewer
        rotation = target.model.rotary_emb(x, positions)
        mask = torch.full((len(tokens), len(tokens)), -1e30).triu(1)[None, None]
        return rms_norm(block(x, attention_mask=mask, position_embeddings=rotation)[0], norm.shape, norm, eps)

    return drafted(out, len(layers), head, final, text, drafts)


def write_among(folder, config, tensors, target) -> None:
    """Writes MTP layers among the target's own tensors, in two files and an index."""
    first, second = {n: t.contiguous() for n, t in target.state_dict().items()}, dict(tensors)
    half = list(second)[: len(second) // 2]
    first |= {n: second.pop(n) for n in half}
    folder.mkdir(exist_ok=True)
    index = {}
    for name, part in (("a.safetensors", first), ("b.safetensors", second)):
        save_file({n: t.contiguous().clone() for n, t in part.items()}, folder / name)
        index |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("name", CASES)
def test_layouts(tmp_path, name):
    kind, layout, count, own = CASES[name]
    target = _target(kind)
    config, tensors, layers = mtp_files(kind, layout, count, own)
    write_among(tmp_path, config, tensors, target)

    @torch.no_grad()
    def logits(hidden, text, drafts):
        return plain_mtp(target, layers, layout == "mimo", own, hidden[-1], text, drafts)

    compare(tmp_path, logits, target=target)


def test_layers_that_were_not_asked(tmp_path, monkeypatch):
    """In steps with fewer drafts than layers, or with none, the later layers read what they will need."""
    script_k(monkeypatch, itertools.cycle([3, 3, 1, 1, 1, 1, 2, 1, 3, 0, 0, 0, 0]))
    target, (config, tensors, layers) = _target("glm4_moe"), mtp_files("glm4_moe", "deepseek", 3, False)

    @torch.no_grad()
    def logits(hidden, text, drafts):
        return plain_mtp(target, layers, False, False, hidden[-1], text, drafts)

    few = dict.fromkeys(range(2), 30.0)  # so that half of the drafts are accepted
    compare(write(tmp_path, config, tensors), logits, 40, target, logit_bias=few)


def test_routers_stay_in_float32(tmp_path):
    """Their biases decide which experts are asked."""
    target = copy.deepcopy(_target("glm4_moe")).bfloat16()
    config, tensors, _ = mtp_files("glm4_moe", "deepseek", 1, False)
    weights = load_head(write(tmp_path, config, tensors), target, check=False).head.state_dict()
    dtypes = {name: weight.dtype for name, weight in weights.items()}
    assert dtypes.pop("layers.0.block.mlp.gate.e_score_correction_bias") == torch.float32
    assert {*dtypes.values()} == {torch.bfloat16}


# ---- a layer that predicts its target ------------------------------------------------------------------------

SAMPLED = {"max_new_tokens": 24, "eos_token_id": [], "params": SamplingParams(1.0), "seed": [1, 2, 3]}
PROMPTS = [[1, 2, 3, 9, 9, 4], [5, 6], [3, 3, 1, 2, 8, 1, 7, 0, 15, 4, 4]]


def tau(head, **settings) -> float:
    settings = SAMPLED | settings
    return SpeculativeDecoder(predictable_target(), head, 4).generate(PROMPTS, **settings).stats.tau


@pytest.fixture(scope="module")
def exact(tmp_path_factory):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return load_head(write(tmp_path_factory.mktemp("mtp"), *exact_mtp()), predictable_target())


def test_an_exact_layer_is_accepted(exact):
    """Without a word on the readings that are worse."""
    assert exact.report.accepted > 3.9 and exact.report.reading is None
    assert exact.report.others["outputs fed back before the norm"] < 1.5
    greedy = {"params": SamplingParams(0.0)}
    assert tau(exact) > 3.9 and tau(exact, **greedy) > 3.9
    plain = SpeculativeDecoder(predictable_target(), None, 0).generate(PROMPTS, **SAMPLED | greedy)
    drafted = SpeculativeDecoder(predictable_target(), exact, 4).generate(PROMPTS, **SAMPLED | greedy)
    assert drafted.tokens == plain.tokens


ROOT = f"model.layers.{LAYERS}"


def _other_order(t):
    t[f"{ROOT}.eh_proj.weight"] = t[f"{ROOT}.eh_proj.weight"].roll(HIDDEN, 1)


def _other_sign(t):
    t[f"{ROOT}.hnorm.weight"] *= -1


def _before_the_norm(t):
    """What is fed back has the sign of the target's states before the norm, and a head of its own reads the other."""
    t[f"{ROOT}.eh_proj.weight"][:V] *= -1
    head = predictable_target().lm_head.weight.detach().clone()
    head[:, :V] *= -1
    t[f"{ROOT}.shared_head.head.weight"] = head


# (change of an exact layer, the reading that the self-check takes; None: no one is right)
WIRING = {
    "the feature first": (_other_order, "the feature first"),
    "fed back before the norm": (_before_the_norm, "outputs fed back before the norm"),
    "without the sign of hnorm": (_other_sign, None),
}


@pytest.mark.parametrize("name", WIRING)
def test_wiring_costs_tau_and_trips_the_self_check(tmp_path, name, exact):
    change, reading = WIRING[name]
    config, tensors = exact_mtp()
    change(tensors)
    folder = write(tmp_path, config, tensors)
    wrong = load_head(folder, predictable_target(), check=False)
    assert tau(wrong) < 0.6 * tau(exact)
    told = "drafts are rarely accepted" if reading is None else f"taken is {reading}"
    with pytest.warns(RuntimeWarning, match=told):
        checked = load_head(folder, predictable_target())
    assert reading is None or tau(checked) == tau(exact)


# ---- what is refused -----------------------------------------------------------------------------------------


def _put(name, change):
    return lambda t: t.__setitem__(name, change(t[name]))


def _add(name, tensor):
    return lambda t: t.__setitem__(name, tensor)


MLP, Q = f"{ROOT}.mlp.up_proj.weight", f"{ROOT}.self_attn.q_proj.weight"
REFUSED = {
    "a missing tensor": (lambda t: t.pop(MLP), rf"layers.{LAYERS}.mlp.up_proj.weight: got no such tensor"),
    "no projection": (lambda t: t.pop(f"{ROOT}.eh_proj.weight"), rf"layers.{LAYERS}.eh_proj.weight: got no such"),
    "a truncated tensor": (_put(Q, lambda w: w[:-1]), rf"layers.{LAYERS}.self_attn.q_proj.weight: got shape \[127, 64"),
    "one more tensor": (_add(f"{ROOT}.x.weight", torch.ones(2)), rf"layers.{LAYERS}.x.weight: .*\[2\]"),
    "8 bits": (_put(Q, lambda w: w.to(torch.float8_e4m3fn)), r"q_proj.weight: got quantised MTP layers \(torch.float8"),
    "a scale": (_add(f"{Q}_scale_inv", torch.ones(1)), r"q_proj.weight_scale_inv: got quantised"),
    "another target's": (lambda t: [t.__setitem__(n.replace("7", "5"), t.pop(n)) for n in [*t]], r"layers.5.*layers.7"),
    "Qwen's layout": (_add("mtp.fc.weight", torch.ones(2)), "layers.7.* got MTP in another layout"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_files_are_refused_by_name(tmp_path, name):
    config, tensors = exact_mtp()
    change, error = REFUSED[name]
    change(tensors)
    with pytest.raises(ValueError, match=error):
        load_head(write(tmp_path, config, tensors), predictable_target(), check=False)


def test_what_layers_share_is_named_as_in_the_files(tmp_path):
    config, tensors, _ = mtp_files("qwen3_next", "qwen", 1, False)
    for name in ("mtp.fc.weight", "mtp.norm.weight", "mtp.layers.0.mlp.gate.weight"):
        given = {n: t for n, t in tensors.items() if n != name}
        with pytest.raises(ValueError, match=f"^{name}: got no such tensor"):
            load_head(write(tmp_path / name, config, given), _target("qwen3_next"), check=False)
    low = tensors | {"mtp.fc.weight": tensors["mtp.fc.weight"].to(torch.float8_e4m3fn)}
    with pytest.raises(ValueError, match="^mtp.fc.weight: got quantised MTP layers"):
        load_head(write(tmp_path / "low", config, low), _target("qwen3_next"), check=False)


def test_wrong_layers_are_refused_by_name(tmp_path):
    target = _target("glm4_moe")
    config, tensors, _ = mtp_files("glm4_moe", "deepseek", 2, False)
    gate, root = "model.layers.2.mlp.experts.1.gate_proj.weight", "model.layers.3."

    def refused(error, config=config, target=target, **changed):
        given = {n: changed.get(n, t) for n, t in tensors.items() if changed.get(n, t) is not None}
        with pytest.raises(ValueError, match=error):
            load_head(write(tmp_path / str(len(error)), config, given), target, check=False)

    refused("layers.2.mlp.experts.1.gate_proj.weight: got no such", **{gate: None})
    refused(r"layers.2.mlp.experts.1.gate_proj.weight: got shape \[3, 32\]", **{gate: torch.ones(3, 32)})
    other = tensors[f"{root}embed_tokens.weight"] + 1
    refused("layers.3.embed_tokens.weight: got other values than", **{f"{root}embed_tokens.weight": other})
    refused("num_nextn_predict_layers: got 3 in config.json", config | {"num_nextn_predict_layers": 3})
    refused("target: got model type 'llama' with MTP layers, allowed: deepseek_v3", target=tiny_model("llama"))
    sizes = {"layer_types": ["linear_attention", "full_attention"], "num_hidden_layers": 2, "hidden_size": 32}
    with torch.device("meta"):
        hybrid = AutoModelForCausalLM.from_config(CONFIG_MAPPING["minimax"](**sizes)).eval()
    refused("'minimax' keeps a state that cannot be rewound", target=hybrid)
