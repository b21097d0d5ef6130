"""What heads are told apart by, which layers their ids mean, and which files are refused, by the tensor's name."""

from __future__ import annotations

import json
import runpy

import pytest
import torch
from specdec import load_head
from specdec.drafters.heads.checkpoint import Checkpoint, canonical
from specdec.drafters.heads.formats import detect
from specdec.drafters.heads.layer_ids import resolve
from specdec.models.cache.features import BEFORE_NORM
from support import ROOT
from support.heads import (
    HIDDEN,
    SIZES,
    V,
    exact_eagle,
    exact_eagle3,
    exact_medusa,
    predictable_target,
    random_head,
    write,
)

IDS = "eagle_aux_hidden_state_layer_ids"
# config.json of a head for 36 layers -> the hidden states that it reads
CONVENTIONS = {
    "EAGLE: none": ({}, (2, 18, 33)),
    "speculators": ({"speculators_model_type": "eagle3", IDS: [2, 18, 33]}, (2, 18, 33)),
    "speculators, DFlash": ({"speculators_model_type": "dflash", "aux_hidden_state_layer_ids": [2, 10]}, (2, 10)),
    "SpecForge": ({"eagle_config": {IDS: [1, 17, 32]}}, (2, 18, 33)),
    "z-lab": ({"dflash_config": {"target_layer_ids": [1, 9, 17, 25, 33]}}, (2, 10, 18, 26, 34)),
    "DeepSpec": ({"target_layer_ids": [1, 9, 17, 25, 33]}, (2, 10, 18, 26, 34)),
    "DSpark": ({"dspark_target_layer_ids": [1, 9]}, (2, 10)),
    "DSpark of DeepSeek": ({"model_type": "deepseek_v41", "dspark_target_layer_ids": [1, 9]}, (1, 9)),
    "vLLM, eagle_config": ({"eagle_config": {"layer_ids": [2, 18, 33]}}, (2, 18, 33)),
    "vLLM, dflash_config": ({"dflash_config": {"layer_ids": [2, 18]}}, (2, 18)),
    "top level": ({IDS: [2, 18, 33]}, (2, 18, 33)),
}


@pytest.mark.parametrize("name", CONVENTIONS)
def test_conventions_of_layer_ids(name):
    config, states = CONVENTIONS[name]
    ids = resolve(config, 36)
    assert ids.states == states and ids.missing == (not config)
    # SGLang reads the last one as layers, and vLLM SpecForge's as hidden states.
    assert ids.doubts == {"top level": ((3, 19, 34),), "SpecForge": ((1, 17, 32),)}.get(name, ())
    assert resolve(config, 36, (5, 6)).states == (5, 6)  # the user's go first


@pytest.mark.parametrize(
    "config",
    [
        {"eagle_config": {IDS: [24, 30, 36]}},  # nvidia/gpt-oss-120b-Eagle3-v3, which is no layer
        {"speculators_model_type": "eagle3", IDS: [24, 30, 36]},
        {"dflash_config": {"target_layer_ids": [23, 29, 35]}},
    ],
)
def test_the_last_state_is_read_before_the_norm(config):
    """As engines do; z-lab's own code reads it after."""
    ids = resolve(config, 36)
    assert ids.states == (24, 30, BEFORE_NORM) and ids.doubts == ((24, 30, 36),)
    assert resolve({}, 36, (24, 36)).states == (24, BEFORE_NORM)


def test_usual_ids_of_dflash_and_ids_that_are_refused():
    assert resolve({}, 36, block=5).states == (2, 10, 18, 26, 34) and resolve({}, 36, block=1).states == (19,)
    for ids in ([2, 36], [2, 2], [-1, 2], [], "2", [True], 7):
        with pytest.raises(ValueError, match=r"target_layer_ids: got .*, allowed: distinct integers from 0 to 35"):
            resolve({"target_layer_ids": ids}, 36)


FORMATS = {"eagle3": exact_eagle3, "eagle": exact_eagle, "medusa": exact_medusa}


def test_formats_are_told_by_their_keys():
    """Whatever config.json says of architectures."""
    for kind, files in FORMATS.items():
        config, tensors = files()
        named = {canonical(name): t for name, t in tensors.items()}
        assert detect(Checkpoint("", config | {"architectures": ["EagleForCausalLM"]}, named)) == kind
        assert detect(Checkpoint("", {"speculators_model_type": "dflash"}, named)) == "dflash"
    _, tensors = exact_eagle3()
    others = {"mask_hidden": "peagle", "markov_head.markov_w1.weight": "dspark", "mtp.fc.weight": "mtp",
              "hydra_lm_head.0.weight": "hydra", "pre_projection.weight": "gemma4_assistant",
              "prefix_gru.weight_ih_l0": "domino", "candidate_selector.predecessor_codebook": "dflash2"}  # fmt: skip
    for name, kind in others.items():
        assert detect(Checkpoint("", SIZES, {name: torch.zeros(1), **tensors})) == kind
    layer = {"layers.0.self_attn.q_proj.weight": torch.zeros(HIDDEN, HIDDEN), "hidden_norm.weight": torch.ones(HIDDEN)}
    assert detect(Checkpoint("", SIZES, {"fc.weight": torch.zeros(HIDDEN, 5 * HIDDEN), **layer})) == "dflash"


# What is wrong with an EAGLE-3 head: (change of config.json, change of tensors, the error)
def _without(name):
    return lambda t: t.pop(name)


def _put(name, value):
    return lambda t: t.__setitem__(name, value)


FC, LM = "fc.weight", "lm_head.weight"
NARROW = torch.arange(V).roll(1)
REFUSED = {
    "a missing tensor": ({}, _without("midlayer.mlp.up_proj.weight"), r"layers.0.mlp.up_proj.weight: got no such"),
    "a truncated tensor": (
        {},
        lambda t: t.__setitem__(LM, t[LM][:-1]),
        rf"lm_head.weight: got shape \[{V - 1}, {HIDDEN}\], allowed: \[{V}, {HIDDEN}\]",
    ),
    "too few states": (
        {},
        lambda t: t.__setitem__(FC, t[FC][:, HIDDEN:]),
        rf"fc.weight: got shape \[{HIDDEN}, {2 * HIDDEN}\], allowed: \[{HIDDEN}, {3 * HIDDEN}\], for 3 states",
    ),
    "a tensor of another format": ({}, _put("midlayer.extra.weight", torch.ones(3)), r"layers.0.extra.weight: .*\[3\]"),
    "integers": ({}, _put("norm.weight", torch.ones(HIDDEN, dtype=torch.int64)), r"norm.weight: got torch.int64"),
    "a norm that config.json wants": ({"norm_before_fc": True}, None, r"input_norm.weight: got no such tensor"),
    "a layer in between": (
        {},
        _put("layers.2.input_layernorm.weight", torch.ones(HIDDEN)),
        r"got tensors without number 1",
    ),
    "d2t beyond the vocabulary": ({}, _put("d2t", torch.ones(V, dtype=torch.int64)), r"d2t: got ids from 1 to 32"),
    "d2t with ids": ({}, _put("d2t", torch.arange(V)), r"d2t: got ids from 0 to 62"),
    "d2t that repeats": ({}, _put("d2t", NARROW * 0 - torch.arange(V)), r"d2t: got ids from 0 to 0, 1 of 32 distinct"),
    "t2d that contradicts d2t": (
        {},
        _put("t2d", torch.arange(V) > 0),
        r"t2d: got 31 ids, others than d2t's 32, allowed: the same",
    ),
    "t2d of another target": ({}, _put("t2d", torch.ones(9, dtype=torch.bool)), r"t2d: got torch.bool of shape \[9\]"),
    "another draft vocabulary": ({"draft_vocab_size": 7}, None, r"d2t: got 32 columns.*draft_vocab_size.*7"),
    "another target": ({"target_hidden_size": 9}, None, r"config.json: got target_hidden_size 9, allowed: 64"),
    "a rope that depends on the length": (
        {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
        None,
        r"config.json: got the rotary embedding .*dynamic",
    ),
    "a sliding window": ({"layer_types": ["sliding_attention"]}, None, r"layers with sliding_attention"),
    "layers of Gemma 4": ({"model_type": "gemma4_text"}, None, r"model_type 'gemma4_text': layers of Gemma 4"),
    "latent attention": ({"kv_lora_rank": 16}, None, r"kv_lora_rank: latent attention"),
    "no sizes": ({"hidden_size": None}, None, r"(hidden_size None|no known format)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_wrong_files_are_refused_by_name(tmp_path, name):
    config, tensors = exact_eagle3()
    more, change, error = REFUSED[name]
    if change is not None:
        change(tensors)
    with pytest.raises(ValueError, match=error):
        load_head(write(tmp_path, config | more, tensors), predictable_target(), check=False)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"architectures": ["LiLiCorrDraftModel"]}, "'lilicorr', DFlash and a small transformer"),
        ({"dflash_config": {"projector_type": "lilicorr"}}, "'lilicorr', DFlash and a small transformer"),
        ({"speculators_model_type": "xpress"}, "'xpress', DFlash and a refiner"),
        ({"architectures": ["UnoDraftModel"]}, "'uno', the target itself"),
    ],
)
def test_other_formats_are_refused_with_what_they_are(tmp_path, config, told):
    _, tensors = exact_eagle3()
    with pytest.raises(ValueError, match=f"path: got a head in the format {told}"):
        load_head(write(tmp_path, config, tensors), predictable_target(), check=False)


@pytest.mark.parametrize("name", ["output_multiplier", "final_logit_softcapping", "use_swa"])
def test_what_changes_a_block_and_is_not_known_is_refused(tmp_path, name):
    config = {"dflash_config": {"mask_token_id": 1, "target_layer_ids": [0, 1], name: 2.0}}
    tensors = {"hidden_norm.weight": torch.ones(2), "fc.weight": torch.ones(HIDDEN, 2 * HIDDEN)}
    tensors["layers.0.self_attn.q_proj.weight"] = torch.ones(HIDDEN, HIDDEN)
    with pytest.raises(ValueError, match=rf"config.json: got {name} 2.0, allowed: none"):
        load_head(write(tmp_path, SIZES | config, tensors), predictable_target(), check=False)


# What is wrong with a head that walks through DFlash's block: (its kind, change of config.json, of tensors, the error)
SURE, WINDOW = "confidence_head.proj", {"layer_types": ["sliding_attention"], "sliding_window": 4}
FEW = {"d2t": torch.zeros(4, dtype=torch.int64), LM: torch.ones(4, HIDDEN)}
WALKS = {
    "another projector": (
        "dspark",
        {"dflash_config": {"projector_type": "dflash"}},
        None,
        r"config.json: got projector_type 'dflash', allowed: 'dspark', by its tensors",
    ),
    "another Markov head": ("dspark", {"markov_head_type": "gated"}, None, r"markov_head_type 'gated', allowed: 'van"),
    "a confidence head of other numbers": (
        "dspark",
        {},
        _put(f"{SURE}.weight", torch.ones(1, 7)),
        rf"{SURE}.weight: got 7 columns, allowed: {HIDDEN}, or with the Markov head's {HIDDEN + 6}",
    ),
    "a bias of no confidence head": ("dspark", {}, _without(f"{SURE}.weight"), rf"{SURE}.bias: got a tensor of shape"),
    "a window": ("domino", WINDOW, None, r"layers with sliding_attention"),
    "half of a network": ("domino", {}, _without("prefix_gru.weight_ih_l0"), r"prefix_gru.weight_ih: got no such"),
    "groups that do not fit": ("dflash2", {"conv_group_size": 7}, None, rf"conv_group_size 7, allowed: .* {HIDDEN}"),
    "groups of another size": ("dflash2", {"conv_group_size": 8}, None, r"conv.kernel_projection.weight: got shape"),
    "another kernel": ("dflash2", {"conv_kernel_size": 3}, None, r"attention_conv.base_kernel: got shape \[2, 2"),
    "too many candidates": ("dflash2", {"selector_top_k": V + 1}, None, rf"selector_top_k 33, allowed: 1 to {V}, the"),
    "a selector of few tokens": ("dflash2", {}, lambda t: t.update(FEW), r"d2t: got 4 columns of a head with a select"),
    "a convolution alone": (
        "dflash",
        {},
        _put("layers.0.mlp_conv.base_kernel", torch.ones(2)),
        r"mlp_conv.base_kernel",
    ),
}


@pytest.mark.parametrize("name", WALKS)
def test_wrong_files_of_walks_are_refused_by_name(tmp_path, name):
    kind, more, change, error = WALKS[name]
    config, tensors = random_head(kind)
    if change is not None:
        change(tensors)
    with pytest.raises(ValueError, match=error):
        load_head(write(tmp_path, config | more, tensors), predictable_target(), check=False)


def test_files_that_cannot_be_read(tmp_path):
    target, files = predictable_target(), exact_medusa()
    folder = write(tmp_path / "cut", *files)
    (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:-100])
    with pytest.raises(OSError, match="path: cannot read '.*model.safetensors'"):
        load_head(folder, target)
    folder = write(tmp_path / "shards", *files)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"9.0.linear.weight": "b"}}))
    with pytest.raises(OSError, match="'b' with the tensor '9.0.linear.weight' is missing"):
        load_head(folder, target)
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "config.json").write_text("{}")
    (tmp_path / "old" / "medusa_lm_head.pt").touch()
    with pytest.raises(OSError, match=r"no \*.safetensors but medusa_lm_head.pt, which tools/convert_head.py"):
        load_head(tmp_path / "old", target)
    with pytest.raises(OSError, match="there is no folder"):
        load_head(tmp_path / "none", target)


def test_medusa_and_layers_that_contradict_config_json(tmp_path):
    config, tensors = exact_medusa()
    target = predictable_target(1)
    with pytest.raises(ValueError, match=r"medusa_head: got tensors of 3 by their names, allowed: medusa_num_heads 5"):
        load_head(write(tmp_path, config | {"medusa_num_heads": 5}, tensors), target)
    with pytest.raises(ValueError, match=r"layer_ids: got \[3\], allowed: None for a head that reads the final state"):
        load_head(write(tmp_path, config, tensors), target, layer_ids=[3])
    with pytest.raises(
        ValueError, match=r"path: got a head in the format 'hydra', heads that .*, allowed: eagle3, peagle"
    ):
        load_head(write(tmp_path, {}, {"hydra_lm_head.0.weight": torch.zeros(2, 2)}), target)


class Harmful:
    def __reduce__(self):
        return (print, ("unpickled",))


def test_the_converter_of_older_files(tmp_path, capsys):
    convert = runpy.run_path(str(ROOT / "tools" / "convert_head.py"))["convert"]
    config, tensors = exact_medusa()
    folder = tmp_path / "old"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(OSError, match="lacks config.json, or a file that ends in .bin"):
        convert(folder, tmp_path / "new")
    torch.save(tensors, folder / "medusa_lm_head.pt")
    assert convert(folder, tmp_path / "new") == len(tensors) == 9
    head = load_head(tmp_path / "new", predictable_target(1), check=False).head
    assert torch.equal(head.state_dict()["medusa_head.2.1.weight"], tensors["2.1.weight"])
    with pytest.raises(OSError):  # it would overwrite
        convert(folder, tmp_path / "new")
    torch.save({"0.0.linear.weight": Harmful()}, folder / "medusa_lm_head.pt")
    with pytest.raises(ValueError, match="is no file of tensors"):
        convert(folder, tmp_path / "other")
    assert "unpickled" not in capsys.readouterr().out and not (tmp_path / "other").exists()
