"""Every layout of a head, written with the names, shapes and dtypes that are documented, against heads written plainly.

The distributions are compared that drafts were drawn from, in steps of three ragged sequences after rejections."""

from __future__ import annotations

import itertools

import pytest
import torch
from specdec import load_head
from support import plain_heads
from support.compare_heads import LAYERS, compare
from support.heads import write
from support.model_types import model_of
from support.models import VOCABULARY, tiny_model
from support.scripted import script_k

HIDDEN = 32
CONFIG = {
    "hidden_size": HIDDEN,
    "intermediate_size": 40,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 256,
}


def random(**shapes: tuple[int, ...]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(len(shapes))
    norms = {name for name in shapes if "norm" in name}
    return {n: (torch.randn(s, generator=generator) * 0.3 + (n in norms)) for n, s in shapes.items()}


def layer(prefix: str, inputs: int, **more: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    c = CONFIG
    q, kv, ff = c["num_attention_heads"] * c["head_dim"], c["num_key_value_heads"] * c["head_dim"], 40
    shapes = {
        "self_attn.q_proj.weight": (q, inputs),
        "self_attn.k_proj.weight": (kv, inputs),
        "self_attn.v_proj.weight": (kv, inputs),
        "self_attn.o_proj.weight": (HIDDEN, q),
        "mlp.gate_proj.weight": (ff, HIDDEN),
        "mlp.up_proj.weight": (ff, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, ff),
        "post_attention_layernorm.weight": (HIDDEN,),
        **more,
    }
    return {f"{prefix}.{name}": shape for name, shape in shapes.items()}


def eagle3(prefix: str = "midlayer", n: int = 3, columns: int = VOCABULARY, **more) -> dict[str, torch.Tensor]:
    norms = {"hidden_norm.weight": (HIDDEN,), "input_layernorm.weight": (HIDDEN,)}
    shapes = {**layer(prefix, 2 * HIDDEN, **norms), "fc.weight": (HIDDEN, n * HIDDEN), "norm.weight": (HIDDEN,)}
    return random(**shapes, **{"lm_head.weight": (columns, HIDDEN)}, **more)


def reduced(tensors: dict[str, torch.Tensor], ids: torch.Tensor) -> dict[str, torch.Tensor]:
    t2d = torch.zeros(VOCABULARY, dtype=torch.bool)
    t2d[ids] = True
    return {**tensors, "d2t": ids - torch.arange(len(ids)), "t2d": t2d}


QK = {f"self_attn.{n}_norm.weight": (8,) for n in "qk"}
LATER = layer("layers.1", HIDDEN, **{"input_layernorm.weight": (HIDDEN,)})
SGLANG = layer("layers.1", HIDDEN, **{"hidden_norm.weight": (HIDDEN,)})
EMBEDDING = {"embed_tokens.weight": (VOCABULARY, HIDDEN)}
SPECULATORS = {"speculators_model_type": "eagle3", "speculators_version": "0.9.0", "transformer_layer_config": CONFIG}
IDS = {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}
DEEPSPEC = {"architectures": ["Qwen3Eagle3Model"], "target_layer_ids": [0, 1, 2, 3, 4], "ttt_length": 7}
ODD = torch.arange(1, VOCABULARY, 2)
SCRAMBLED = ODD[torch.randperm(len(ODD), generator=torch.Generator().manual_seed(0))]
BIASES = {f"midlayer.self_attn.{n}_proj.bias": (s,) for n, s in (("q", 32), ("k", 16), ("v", 16), ("o", 32))}

# name: (config.json, tensors, states, what the plain head is told)
EAGLE3 = {
    "official": (CONFIG | {"draft_vocab_size": len(ODD)}, reduced(eagle3(columns=len(ODD)), ODD), (2, 3, 4), {}),
    "model. prefix, order of d2t": (
        CONFIG | {"eagle_config": IDS},
        {f"model.{n}": t for n, t in reduced(eagle3(columns=len(ODD)), SCRAMBLED).items()},
        (2, 4, 5),
        {},
    ),
    "specforge": (CONFIG | {"eagle_config": IDS}, eagle3(**EMBEDDING), (2, 4, 5), {}),
    "specforge, all norms": (
        CONFIG | {"eagle_config": IDS, "norm_before_fc": True, "fc_norm": True, "norm_output": True},
        eagle3(**{"input_norm.weight": (96,)}, **{f"fc_norm.{i}.weight": (HIDDEN,) for i in range(3)}),
        (2, 4, 5),
        {"recycle_normed": True},
    ),
    "old names of fc_norm": (
        CONFIG | {"eagle_config": IDS | {"use_aux_norm": True}},
        eagle3(**{f"aux_norm_{n}.weight": (HIDDEN,) for n in ("low", "mid", "high")}),
        (2, 4, 5),
        {},
    ),
    "biases, another rope": (
        CONFIG | {"eagle_config": IDS, "attention_bias": True, "rope_theta": 77.0},
        eagle3(**BIASES),
        (2, 4, 5),
        {},
    ),
    "final state alone": (
        CONFIG | {"eagle_config": {"use_aux_hidden_state": False}},
        {n: t for n, t in eagle3().items() if n != "fc.weight"},
        (7,),
        {},
    ),
    "speculators": (SPECULATORS | IDS | {"norm_before_residual": False}, eagle3("layers.0"), (1, 3, 4), {}),
    "speculators, residual after the norm": (
        SPECULATORS | IDS | {"norm_before_residual": True},
        eagle3("layers.0"),
        (1, 3, 4),
        {"norm_before_residual": True},
    ),
    "speculators, not said": (SPECULATORS | IDS, eagle3("layers.0"), (1, 3, 4), {"norm_before_residual": True}),
    "two layers": (SPECULATORS | IDS | {"norm_before_residual": False}, eagle3("layers.0", **LATER), (1, 3, 4), {}),
    "two layers of SGLang": (
        CONFIG | {"eagle_config": IDS},
        eagle3("layers.0", **SGLANG),
        (2, 4, 5),
        {"later_norm": "hidden_norm"},
    ),
    "deepspec": (
        CONFIG | DEEPSPEC,
        eagle3("layers.0", n=5, **{f"layers.0.{n}": s for n, s in QK.items()}, **EMBEDDING),
        (1, 2, 3, 4, 5),
        {},
    ),
    "P-EAGLE of SpecForge": (
        CONFIG | {"eagle_config": IDS, "mask_token_id": 9},
        eagle3(**EMBEDDING, **{"mask_hidden": (1, 1, 3 * HIDDEN)}),
        (2, 4, 5),
        {"mask_token": 9},
    ),
    "P-EAGLE of speculators": (
        SPECULATORS | IDS | {"speculators_model_type": "peagle", "ptd_token_id": 9, "norm_before_fc": True},
        eagle3("layers.0", **LATER, **{"mask_hidden": (1, 1, 3 * HIDDEN), "input_norm.weight": (96,)}),
        (1, 3, 4),
        {"mask_token": 9},
    ),
    "P-EAGLE with a flat mask": (
        CONFIG | {"eagle_config": IDS, "mask_token_id": 9},
        eagle3(**EMBEDDING, **{"mask_hidden": (3 * HIDDEN,)}),
        (2, 4, 5),
        {"mask_token": 9},
    ),
    "tied": (
        CONFIG | {"eagle_config": IDS, "tie_word_embeddings": True},
        {n: t for n, t in eagle3(**EMBEDDING).items() if n != "lm_head.weight"},
        (2, 4, 5),
        {},
    ),
    "the target's output, reduced": (
        CONFIG | {"eagle_config": IDS},
        reduced({n: t for n, t in eagle3().items() if n != "lm_head.weight"}, ODD),
        (2, 4, 5),
        {},
    ),
}


@pytest.mark.filterwarnings("ignore:config.json of")  # "official" says no ids
@pytest.mark.parametrize(
    "name", [n if i % 2 == 0 else pytest.param(n, marks=pytest.mark.nightly) for i, n in enumerate(EAGLE3)]
)
def test_eagle3(tmp_path, name):
    config, tensors, states, told = EAGLE3[name]
    plain = {n.removeprefix("model."): t for n, t in tensors.items()}
    target = tiny_model("llama", layers=LAYERS)
    embedding = plain.get("embed_tokens.weight", target.model.embed_tokens.weight.detach())
    own = plain.get("lm_head.weight", embedding if name == "tied" else target.lm_head.weight.detach())
    if "d2t" in plain and len(own) < VOCABULARY:  # columns in the order of the target's ids
        own = own[(plain["d2t"] + torch.arange(len(own))).argsort()]
    first = "layers.0" if "layers.0.mlp.up_proj.weight" in plain else "midlayer"

    def logits(hidden, text, drafts):
        read, sizes = [hidden[i] for i in states], config | CONFIG
        weights = {"first": first, "embedding": embedding, "head": own}
        return plain_heads.eagle3(plain, sizes, read, text, drafts, **weights, **told)

    compare(write(tmp_path, config, tensors), logits)


def test_what_was_missed_in_steps_without_drafts(tmp_path, monkeypatch):
    """Then the keys of accepted drafts, which were computed from guesses, are no longer among the last ones."""
    script_k(monkeypatch, itertools.cycle([3, 3, 0, 0, 0, 0, 0, 0]))
    config, tensors, states, _ = EAGLE3["specforge"]
    weights = {"embedding": tensors["embed_tokens.weight"], "head": tensors["lm_head.weight"], "first": "midlayer"}

    def logits(hidden, text, drafts):
        return plain_heads.eagle3(tensors, config, [hidden[i] for i in states], text, drafts, **weights)

    few = dict.fromkeys(range(2), 30.0)  # so that half of the drafts are accepted
    compare(write(tmp_path, config, tensors), logits, 60, logit_bias=few)


@pytest.mark.parametrize("bias", [True, False])
def test_eagle(tmp_path, bias):
    shapes = layer("layers.0", HIDDEN) | {"fc.weight": (HIDDEN, 2 * HIDDEN)} | ({"fc.bias": (HIDDEN,)} if bias else {})
    tensors, target = random(**shapes), tiny_model("llama", layers=LAYERS)
    tensors = {name: t / 2 for name, t in tensors.items()}  # without norms, larger weights amplify rounding
    own = {"embedding": target.model.embed_tokens.weight.detach(), "head": target.lm_head.weight.detach()}

    def logits(hidden, text, drafts):
        return plain_heads.eagle(tensors, CONFIG, hidden[-1], text, drafts, **own)

    compare(write(tmp_path, CONFIG | {"bias": bias}, tensors), logits)


@pytest.mark.parametrize("heads, blocks, prefix", [(5, 1, ""), (3, 2, "medusa_head."), (1, 1, "")])
def test_medusa(tmp_path, heads, blocks, prefix):
    shapes = {}
    for i in range(heads):
        for j in range(blocks):
            shapes |= {f"{i}.{j}.linear.weight": (HIDDEN, HIDDEN), f"{i}.{j}.linear.bias": (HIDDEN,)}
        shapes[f"{i}.{blocks}.weight"] = (VOCABULARY, HIDDEN)
    tensors = random(**shapes)
    config = {"medusa_num_heads": heads, "medusa_num_layers": blocks, "base_model_name_or_path": "target"}

    def logits(hidden, text, drafts):
        return plain_heads.medusa(tensors, heads, blocks, hidden[-1], text, drafts)

    compare(write(tmp_path, config, {prefix + n: t for n, t in tensors.items()}), logits)


ZLAB = {"architectures": ["DFlashDraftModel"], "block_size": 5, "layer_types": ["full_attention"] * 2}
OF_DOMINO = CONFIG | {"architectures": ["DominoDraftModel"]}
DOMINO = {
    "mask_token_id": 9, "target_layer_ids": [0, 3, 4], "projector_type": "domino", "emb_dim": 10, "gru_hidden_dim": 12,
}  # fmt: skip
# name: (config.json, whether causal, whether from the anchor, columns)
DFLASH = {
    "z-lab": (
        CONFIG | ZLAB | {"dflash_config": {"mask_token_id": 9, "target_layer_ids": [0, 3, 4]}}, False, False, None,
    ),
    "z-lab, causal": (
        CONFIG | ZLAB | {"dflash_config": {"mask_token_id": 9, "target_layer_ids": [0, 3, 4], "causal": True}},
        True,
        False,
        None,
    ),
    "speculators": (
        {
            "speculators_model_type": "dflash", "aux_hidden_state_layer_ids": [1, 4, 5], "block_size": 3,
            "mask_token_id": 9, "sample_from_anchor": True, "draft_vocab_size": len(ODD),
            "transformer_layer_config": CONFIG,
        },
        False,
        True,
        len(ODD),
    ),
    "dflash2 of z-lab": (
        CONFIG | {
            "architectures": ["DFlash2DraftModel"], "is_causal": False, "layer_types": ["full_attention"] * 2,
            "dflash_config": {
                "block_size": 5, "mask_token_id": 9, "target_layer_ids": [0, 3, 4], "conv_kernel_size": 3,
                "conv_group_size": 8, "selector_rank": 6, "selector_top_k": 7,
            },
        },
        False,
        False,
        None,
    ),
    "domino of SpecForge": (
        OF_DOMINO | {
            "block_size": 3, "emb_dim": 10,
            "dflash_config": DOMINO | {"pure_draft_prefix_len": 1, "shift_label": True},
        },
        False,
        True,
        None,
    ),
    "domino, not shifted": (OF_DOMINO | {"block_size": 5, "dflash_config": DOMINO}, False, False, None),
    "dspark of SpecForge": (
        CONFIG | {
            "architectures": ["DSparkDraftModel"], "block_size": 3, "dflash_config": {
                "mask_token_id": 9, "target_layer_ids": [0, 3, 4], "projector_type": "dspark", "markov_rank": 6,
                "enable_confidence_head": True, "confidence_head_with_markov": True,
            },
        },
        False,
        True,
        VOCABULARY,
    ),
    "dspark of DeepSpec": (
        CONFIG | {
            "architectures": ["Qwen3DSparkModel"], "target_layer_ids": [0, 3, 4], "mask_token_id": 9, "block_size": 3,
            "markov_rank": 6, "markov_head_type": "vanilla", "enable_confidence_head": True,
        },
        False,
        True,
        VOCABULARY,
    ),
}  # fmt: skip


WINDOW = 4
SLIDES = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
IDS_OF_DFLASH = {"mask_token_id": 9, "target_layer_ids": [0, 3, 4]}
# z-lab's heads of Qwen3.6: in layers with a window a token sees those of its block before it, and each as far back.
SLIDING = {
    "z-lab": (
        CONFIG | ZLAB | SLIDES | {"dflash_config": IDS_OF_DFLASH},
        lambda layer, known, query, key: layer == 0 and (key > query or key <= query - WINDOW),
    ),
    "z-lab, not causal": (
        CONFIG | ZLAB | SLIDES | {"dflash_config": IDS_OF_DFLASH | {"causal": False}},
        lambda layer, known, query, key: layer == 0 and key <= query - WINDOW,
    ),
    "speculators": (
        {
            "speculators_model_type": "dflash", "aux_hidden_state_layer_ids": [1, 4, 5], "block_size": 5,
            "mask_token_id": 9, "transformer_layer_config": CONFIG | SLIDES,
        },
        lambda layer, known, query, key: layer == 0 and (key < known - WINDOW or key > query),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SLIDING)
def test_dflash_with_windows(tmp_path, name):
    config, hides = SLIDING[name]
    tensors, target = dflash_tensors(), tiny_model("llama", layers=LAYERS)
    weights = {"head": target.lm_head.weight.detach(), "embedding": target.model.embed_tokens.weight.detach()}
    told = {"block": 5, "mask_token": 9, "causal": False, "from_anchor": False, "hides": hides}

    def logits(hidden, text, drafts):
        return plain_heads.dflash(tensors, CONFIG, [hidden[i] for i in (1, 4, 5)], text, drafts, **weights, **told)

    compare(write(tmp_path, config, tensors), logits)


@pytest.mark.parametrize(
    "case, speculators", [("gemma2", False), ("gemma2", True), ("qwen3_5_text", False), ("qwen3_5_text", True)]
)
def test_dflash_on_targets_of_other_kinds(tmp_path, case, speculators):
    """Gemma multiplies its embedding, and bounds its logits: z-lab embeds the block as Gemma does and speculators from
    its table, and q is bounded like p. The states of a hybrid target are its layers' outputs, recurrent ones or not."""
    target = model_of(case)
    count, embed, cap = target.config.num_hidden_layers, target.get_input_embeddings(), None
    if case == "gemma2":
        cap = target.config.final_logit_softcapping
        assert embed(torch.tensor([3])).norm() > 2 * embed.weight[3].norm() and cap
    tensors = dflash_tensors(2)
    told = {"block": 5, "mask_token": 9, "causal": False, "from_anchor": False}
    table = (embed.weight if speculators else embed(torch.arange(VOCABULARY))).detach()
    head = target.get_output_embeddings().weight.detach()

    def logits(hidden, text, drafts):
        states = [hidden[0], hidden[1]] if count == 2 else [hidden[1], hidden[2]]
        found = plain_heads.dflash(tensors, CONFIG, states, text, drafts, embedding=table, head=head, **told)
        return found if cap is None else cap * torch.tanh(found / cap)

    ids, mask = [0, 1] if count == 2 else [1, 2], {"mask_token_id": 9}
    config = CONFIG | ZLAB | {"dflash_config": {"layer_ids": ids, **mask}}
    if speculators:
        config = {"speculators_model_type": "dflash", "aux_hidden_state_layer_ids": ids, "block_size": 5, **mask}
        config |= {"transformer_layer_config": CONFIG}
    compare(write(tmp_path, config, tensors), logits, target=target)
    doubts = load_head(tmp_path, target, check=False).head.doubts  # SpecForge's files look like z-lab's
    assert any("scale" in doubt.name for doubt in doubts) == (case == "gemma2" and not speculators)


def dflash_tensors(states: int = 3) -> dict[str, torch.Tensor]:
    shapes = {"fc.weight": (HIDDEN, states * HIDDEN), "hidden_norm.weight": (HIDDEN,), "norm.weight": (HIDDEN,)}
    for i in range(2):
        shapes |= layer(f"layers.{i}", HIDDEN, **{"input_layernorm.weight": (HIDDEN,)}, **QK)
    return random(**shapes)


def test_the_last_state_among_several_is_before_the_norm(tmp_path):
    """As vLLM, SGLang and speculators read it; alone it is after the norm."""
    target, outputs = tiny_model("llama", layers=LAYERS), []
    tensors = eagle3(**EMBEDDING)
    config = CONFIG | {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, LAYERS]}}
    weights = {"embedding": tensors["embed_tokens.weight"], "head": tensors["lm_head.weight"], "first": "midlayer"}

    def logits(hidden, text, drafts):
        outputs.clear()
        hook = target.model.layers[-1].register_forward_hook(lambda module, args, out: outputs.append(out))
        target(torch.tensor([text]))
        hook.remove()
        read = [hidden[2], hidden[4], outputs[0][0]]
        return plain_heads.eagle3(tensors, config | CONFIG, read, text, drafts, **weights)

    compare(write(tmp_path, config, tensors), logits)


WALKS = {
    "dspark": {
        **{f"markov_head.markov_w{i}.weight": (VOCABULARY, 6) for i in (1, 2)},
        "confidence_head.proj.weight": (1, HIDDEN + 6), "confidence_head.proj.bias": (1,),
    },
    "domino": {
        "prefix_gru.weight_ih_l0": (36, HIDDEN), "prefix_gru.weight_hh_l0": (36, 12),
        "embed_proj.0.weight": (10, HIDDEN + 12), "embed_proj.2.weight": (VOCABULARY, 10),
    },
    "dflash2": {
        **{f"layers.{i}.{n}_conv.base_kernel": (2, 3, HIDDEN) for i in range(2) for n in ("attention", "mlp")},
        **{
            f"layers.{i}.{n}_conv.kernel_projection.weight": (6 * HIDDEN // 8, HIDDEN)
            for i in range(2) for n in ("attention", "mlp")
        },
        **{f"candidate_selector.{n}_codebook": (VOCABULARY, 6) for n in ("predecessor", "successor")},
        "candidate_selector.hidden_projection.weight": (6, HIDDEN),
    },
}  # fmt: skip


@pytest.mark.parametrize("name", DFLASH)
def test_dflash(tmp_path, name):
    config, causal, from_anchor, columns = DFLASH[name]
    shapes = {"fc.weight": (HIDDEN, 3 * HIDDEN), "hidden_norm.weight": (HIDDEN,), "norm.weight": (HIDDEN,)}
    for i in range(2):
        shapes |= layer(f"layers.{i}", HIDDEN, **{"input_layernorm.weight": (HIDDEN,)}, **QK)
    shapes |= {} if columns is None else {"lm_head.weight": (columns, HIDDEN)}
    shapes |= WALKS.get(name.split()[0].strip(","), {})
    tensors, target = random(**shapes), tiny_model("llama", layers=LAYERS)
    files = reduced(tensors, ODD) if columns == len(ODD) else tensors
    weights = {"head": tensors.get("lm_head.weight", target.lm_head.weight.detach())}
    weights["embedding"] = target.model.embed_tokens.weight.detach()
    said = config | config.get("dflash_config", {})
    told = {"block": said["block_size"], "mask_token": 9, "causal": causal, "from_anchor": from_anchor}
    told |= {"most": said.get("selector_top_k", 0), "pure": said.get("pure_draft_prefix_len", 0)}

    def logits(hidden, text, drafts):
        return plain_heads.dflash(tensors, CONFIG, [hidden[i] for i in (1, 4, 5)], text, drafts, **weights, **told)

    compare(write(tmp_path, config, files), logits)
