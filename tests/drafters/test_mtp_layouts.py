"""MTP layers of latent attention and of Nemotron-H's blocks, in files as they are published, against formulas written
plainly."""

from __future__ import annotations

import copy
import functools
import json

import pytest
import torch
from safetensors.torch import save_file
from specdec import Request, Scheduler, SpeculativeDecoder, load_head
from specdec.drafters.heads.mtp_files import new_mtp
from specdec.models.supported import cached_model
from support.compare_heads import compare
from support.heads import write
from support.model_types import CASES as TYPES
from support.model_types import SHARED_EXPERTS
from support.models import DECODER, prompts, tiny_model
from support.plain_mtp import drafted, latent_layer, nemotron_layer
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

LATENT = {
    **DECODER,
    **SHARED_EXPERTS,
    "num_hidden_layers": 2,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 12,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 10,
    "v_head_dim": 6,
}
INDEXER = {"index_topk": 8, "index_n_heads": 4, "index_head_dim": 16}
# (model type, beside the sizes above, number of MTP layers, blocks of Nemotron-H's)
CASES = {
    "deepseek_v3": ("deepseek_v3", {}, 1, ""),
    "glm4_moe_lite": ("glm4_moe_lite", {}, 1, ""),
    "glm4_moe_lite, two layers": ("glm4_moe_lite", {}, 2, ""),
    "nemotron_h": ("nemotron_h", {}, 1, "*E"),
    "nemotron_h, experts of another width": ("nemotron_h", {"moe_latent_size": 16}, 1, "*E"),
    "nemotron_h, an MLP first": ("nemotron_h", {}, 1, "-*E"),
    "nemotron_h, two layers": ("nemotron_h", {}, 2, "*E"),
}


@functools.cache
@torch.inference_mode(False)
def target_of(case: str):
    kind, more, *_ = CASES[case]
    sizes = TYPES[kind][1] if kind in TYPES else LATENT
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**sizes | more)).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1:
                weight.normal_(std=1.0 if "emb" in name else 0.3)
    return model


def experts(prefix: str, config: dict, width: int, gated: bool) -> dict[str, tuple[int, ...]]:
    inner, count = config["moe_intermediate_size"], config["n_routed_experts"]
    shapes = {
        f"{prefix}.gate.weight": (count, config["hidden_size"]),
        f"{prefix}.gate.e_score_correction_bias": (count,),
    }
    for each in (*(f"experts.{e}" for e in range(count)), "shared_experts"):
        inputs = config["hidden_size"] if each == "shared_experts" else width
        for name in ("gate", "up") if gated else ("up",):
            shapes[f"{prefix}.{each}.{name}_proj.weight"] = (inner, inputs)
        shapes[f"{prefix}.{each}.down_proj.weight"] = (inputs, inner)
    return shapes


def latent_shapes(root: str, config: dict) -> dict[str, tuple[int, ...]]:
    hidden, heads, q, kv = (config[n] for n in ("hidden_size", "num_attention_heads", "q_lora_rank", "kv_lora_rank"))
    plain, turned, value = (config[n] for n in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    attention = {
        "q_a_proj": (q, hidden),
        "q_a_layernorm": (q,),
        "q_b_proj": (heads * (plain + turned), q),
        "kv_a_proj_with_mqa": (kv + turned, hidden),
        "kv_a_layernorm": (kv,),
        "kv_b_proj": (heads * (plain + value), kv),
        "o_proj": (hidden, heads * value),
    }
    norms = ("enorm", "hnorm", "shared_head.norm", "input_layernorm", "post_attention_layernorm")
    shapes = {f"{root}.self_attn.{name}.weight": shape for name, shape in attention.items()}
    shapes |= {f"{root}.{name}.weight": (hidden,) for name in norms}
    shapes[f"{root}.eh_proj.weight"] = (hidden, 2 * hidden)
    return shapes | experts(f"{root}.mlp", config, hidden, gated=True)


def nemotron_shapes(k: int, pattern: str, config: dict) -> dict[str, tuple[int, ...]]:
    hidden, first, shapes = config["hidden_size"], k * len(pattern), {}
    for block, kind in enumerate(pattern, first):
        mixer = f"mtp.layers.{block}.mixer"
        shapes[f"mtp.layers.{block}.norm.weight"] = (hidden,)
        if kind == "*":
            width, own = (config[n] * config["head_dim"] for n in ("num_attention_heads", "num_key_value_heads"))
            for name, outputs in zip("qkv", (width, own, own), strict=True):
                shapes[f"{mixer}.{name}_proj.weight"] = (outputs, hidden)
            shapes[f"{mixer}.o_proj.weight"] = (hidden, width)
        elif kind == "-":
            shapes[f"{mixer}.up_proj.weight"] = (config["intermediate_size"], hidden)
            shapes[f"{mixer}.down_proj.weight"] = (hidden, config["intermediate_size"])
        else:
            width = config["moe_latent_size"] or hidden
            shapes |= experts(mixer, config, width, gated=False)
            if width != hidden:
                shapes[f"{mixer}.fc1_latent_proj.weight"] = (width, hidden)
                shapes[f"{mixer}.fc2_latent_proj.weight"] = (hidden, width)
    shapes |= {f"mtp.layers.{first}.{name}.weight": (hidden,) for name in ("enorm", "hnorm")}
    shapes[f"mtp.layers.{first}.eh_proj.weight"] = (hidden, 2 * hidden)
    return shapes | {f"mtp.layers.{first + len(pattern) - 1}.final_layernorm.weight": (hidden,)}


def files(case: str):
    """(config.json, tensors) of random MTP layers beside the target of ``case``."""
    kind, _, count, pattern = CASES[case]
    target = target_of(case)
    config = target.config.to_dict()
    torch.manual_seed(7)
    shapes: dict[str, tuple[int, ...]] = {}
    for k in range(count):
        root = f"model.layers.{config['num_hidden_layers'] + k}" if not pattern else ""
        shapes |= nemotron_shapes(k, pattern, config) if pattern else latent_shapes(root, config)
    tensors = {name: 0.3 * torch.randn(shape) + 1.0 * ("norm" in name) for name, shape in shapes.items()}
    said = {"model_type": kind, "num_nextn_predict_layers": count}
    if pattern:
        return said | {"mtp_hybrid_override_pattern": pattern}, tensors
    for k in range(count):  # files have copies of what the layers share
        root = f"model.layers.{config['num_hidden_layers'] + k}"
        tensors[f"{root}.embed_tokens.weight"] = target.get_input_embeddings().weight.detach()
        tensors[f"{root}.shared_head.head.weight"] = target.lm_head.weight.detach()
    return said, tensors


def write_beside(folder, case: str):
    """Writes the target's files with MTP layers among them, in the names of their publishers."""
    (config, tensors), target = files(case), target_of(case)
    own = {name: weight.contiguous() for name, weight in target.state_dict().items()}
    if CASES[case][3]:
        own = {name.replace("model.", "backbone."): weight for name, weight in own.items()}
    parts = {"model-00001-of-00002.safetensors": own, "model-00002-of-00002.safetensors": tensors}
    for name, part in parts.items():
        save_file({n: t.clone() for n, t in part.items()}, folder / name)
    index = {n: name for name, part in parts.items() for n in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (folder / "config.json").write_text(json.dumps(config))
    return tensors


@pytest.mark.parametrize("case", CASES)
def test_layers_against_plain_formulas(tmp_path, case):
    """Over whole loops, mostly of rejected drafts."""
    target, (_, _, count, pattern) = target_of(case), CASES[case]
    tensors = write_beside(tmp_path, case)
    config, embedding = target.config.to_dict(), target.get_input_embeddings().weight

    def step(k, features, tokens):
        embedded = embedding[torch.tensor(tokens)]
        if pattern:
            return nemotron_layer(tensors, k, pattern, config, features, embedded)
        root = f"model.layers.{config['num_hidden_layers'] + k}"
        return latent_layer(tensors, root, config, features, embedded)

    @torch.no_grad()
    def logits(hidden, text, drafts):
        return drafted(step, count, target.lm_head.weight, hidden[-1], text, drafts)

    compare(tmp_path, logits, target=target)


# ---- texts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["glm4_moe_lite", "nemotron_h", "nemotron_h, two layers"])
def test_texts_are_those_of_plain_decoding(tmp_path, case):
    """Alone, in a batch, and in rows that others had. Few tokens are allowed, so that some drafts are accepted."""
    target, few = target_of(case), dict.fromkeys(range(3), 30.0)
    write_beside(tmp_path, case)
    head, ids = load_head(tmp_path, target, check=False), prompts(3, 2, 9)
    settings = {"max_new_tokens": 40, "eos_token_id": [], "logit_bias": few}
    plain = SpeculativeDecoder(target, None, 0).generate(ids, **settings)
    batch = SpeculativeDecoder(target, head, 3).generate(ids, **settings)
    assert batch.tokens == plain.tokens and batch.drafter_error is None
    assert 0 < batch.stats.accepted < batch.stats.drafted
    for prompt, text in zip(ids, plain.tokens, strict=True):
        alone = SpeculativeDecoder(target, head, 3).generate([prompt], **settings)
        assert alone.tokens == [text] and alone.drafter_error is None
    scheduler = Scheduler(SpeculativeDecoder(target, head, 3), rows=2, max_length=64, prefill_chunk=7)
    done = scheduler.run([Request(prompt, **settings) for prompt in ids])
    assert [sequence.tokens for sequence in sorted(done, key=lambda sequence: sequence.number)] == plain.tokens
    assert all(sequence.stats.accepted for sequence in done)


# ---- what is read, and what is refused -------------------------------------------------------------------------


def test_the_router_of_blocks_stays_in_float32(tmp_path):
    target = copy.deepcopy(target_of("nemotron_h")).bfloat16()
    config, tensors = files("nemotron_h")
    weights = load_head(write(tmp_path, config, tensors), target, check=False).head.state_dict()
    dtypes = {name: weight.dtype for name, weight in weights.items()}
    assert dtypes.pop("layers.0.block.1.mixer.gate.e_score_correction_bias") == torch.float32
    assert {*dtypes.values()} == {torch.bfloat16}


@pytest.mark.parametrize("said", [{}, {"mtp_layers_block_type": ["attention", "moe"]},
                                  {"mtp_layers_block_type": ["full_attention", "moe"]}])  # fmt: skip
def test_blocks_by_other_entries(tmp_path, said):
    """Files of transformers have names, and some have neither."""
    config, tensors = files("nemotron_h")
    del config["mtp_hybrid_override_pattern"]
    folder = write(tmp_path, config | said, tensors)
    blocks = load_head(folder, target_of("nemotron_h"), check=False).head.layers[0].block
    assert [block.block_type for block in blocks] == ["full_attention", "moe"]


ROOT = "mtp.layers.1"
# (change of config.json, tensors to be taken away or put in, the error)
REFUSED = {
    "a Mamba block": (
        {"mtp_hybrid_override_pattern": "M*E"},
        {},
        r"mtp_hybrid_override_pattern: got 'M\*E' in config.json, allowed: one block of attention \('\*'\)",
    ),
    "two of attention": ({"mtp_hybrid_override_pattern": "**E"}, {}, "mtp_hybrid_override_pattern: got"),
    "no attention": ({"mtp_hybrid_override_pattern": "E"}, {}, "mtp_hybrid_override_pattern: got 'E' in"),
    "no letters": ({"mtp_hybrid_override_pattern": 3}, {}, "mtp_hybrid_override_pattern: got 3 in"),
    "another order": ({"mtp_hybrid_override_pattern": "E*"}, {}, "^mtp.layers.0.mixer.experts.up_proj: got no such"),
    "more layers": ({"num_nextn_predict_layers": 2}, {}, "num_nextn_predict_layers: got 2 in config.json"),
    "no last norm": ({}, {f"{ROOT}.final_layernorm.weight": None}, f"^{ROOT}.final_layernorm.weight: got no such"),
    "a norm elsewhere": ({}, {"mtp.layers.0.final_layernorm.weight": torch.ones(32)}, "^mtp.layers.0.final_layernorm"),
    "a projection elsewhere": ({}, {f"{ROOT}.eh_proj.weight": torch.ones(32, 64)}, f"^{ROOT}.eh_proj.weight: got a"),
    "an expert": ({}, {f"{ROOT}.mixer.experts.2.up_proj.weight": None}, f"^{ROOT}.mixer.experts.2.up_proj.weight: got"),
    "a short expert": (
        {},
        {f"{ROOT}.mixer.experts.2.up_proj.weight": torch.ones(3, 32)},
        rf"^{ROOT}.mixer.experts.2.up_proj.weight: got shape \[3, 32\]",
    ),
    "8 bits": (
        {},
        {"mtp.layers.0.mixer.q_proj.weight": torch.ones(32, 32).to(torch.float8_e4m3fn)},
        r"mtp.layers.0.mixer.q_proj.weight: got quantised MTP layers",
    ),
    "DeepSeek's names": ({}, {"model.layers.4.eh_proj.weight": torch.ones(32, 64)}, "^layers.4.* in another layout"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_files_are_refused_by_name(tmp_path, name):
    changed, replaced, error = REFUSED[name]
    config, tensors = files("nemotron_h")
    tensors = {n: t for n, t in (tensors | replaced).items() if t is not None}
    with pytest.raises(ValueError, match=error):
        load_head(write(tmp_path, config | changed, tensors), target_of("nemotron_h"), check=False)


@pytest.mark.parametrize("kind", ["deepseek_v32", "glm_moe_dsa"])
def test_layers_with_an_indexer_are_refused_with_their_target(tmp_path, kind):
    """Each token attends to the best ones alone, for which the loop has no mask."""
    with torch.device("meta"):
        target = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**LATENT | INDEXER)).eval()
    with pytest.raises(
        ValueError, match=rf"target: model type '{kind}' has other masks .* \((indexed|deepseek_sparse)_attention\)"
    ):
        load_head(write(tmp_path, *files("deepseek_v3")), target)


def test_layers_of_other_targets(tmp_path):
    folder = write(tmp_path, *files("nemotron_h"))
    with pytest.raises(ValueError, match="target: got model type 'llama' with MTP layers, allowed: .*nemotron_h"):
        load_head(folder, tiny_model("llama"), check=False)
    with pytest.raises(ValueError, match="^target: got model type 'nemotron_h', whose MTP layers have experts"):
        new_mtp(cached_model(target_of("nemotron_h"), "target"))
