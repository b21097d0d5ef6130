"""Heads in the loop: exact texts, the acceptance of right wiring, and what wrong wiring costs and looks like."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from specdec import HeadDrafter, Request, Scheduler, SpeculativeDecoder, load_head, speculate
from specdec.loop.graphs import StepGraphs
from support.heads import (
    LAYERS,
    V,
    exact_eagle,
    exact_eagle3,
    exact_medusa,
    exact_mtp,
    predictable_target,
    random_head,
    write,
)
from support.models import tiny_model
from support.recorded import record
from support.scripted import script_k

from specdec_kernels import SamplingParams, validation

PROMPTS = [[1, 2, 3, 9, 9, 4], [5], [3, 3, 1, 2, 8, 1, 7, 0, 15, 4, 4]]
# kind: (the files of a head that predicts its target, the target's order, K, least tau of greedy text)
KINDS = {
    "eagle3": (exact_eagle3, 2, 4, 4.5),
    "eagle": (exact_eagle, 2, 4, 4.5),
    "mtp": (exact_mtp, 2, 4, 4.5),
    "medusa": (exact_medusa, 1, 3, 3.0),  # after a prompt, its drafts are those of the token before its end
    "peagle": (lambda: random_head("peagle"), 2, 4, 1.0),
    "dflash": (lambda: random_head("dflash"), 2, 4, 1.0),
    "dspark": (lambda: random_head("dspark"), 2, 4, 1.0),
    "domino": (lambda: random_head("domino"), 2, 4, 1.0),
    "dflash2": (lambda: random_head("dflash2"), 2, 4, 1.0),
}
IN_TURN = ("eagle3", "eagle", "mtp")
EXACT = (*IN_TURN, "medusa")
DAILY = ("eagle3", "dflash")  # in a scheduler; the others' steps differ in no shape


@pytest.fixture(scope="module")
def loaded(tmp_path_factory) -> dict[str, HeadDrafter]:
    folder = tmp_path_factory.mktemp("heads")
    return {
        kind: load_head(write(folder / kind, *files()), predictable_target(order), check=kind in EXACT)
        for kind, (files, order, _, _) in KINDS.items()
    }


@pytest.fixture(scope="module")
def imperfect(tmp_path_factory) -> HeadDrafter:
    files = exact_eagle3(noise=0.3)
    return load_head(write(tmp_path_factory.mktemp("imperfect"), *files), predictable_target(), check=False)


def texts(target, drafter, prompts=PROMPTS, num_drafts=4, new=24, **settings):
    return SpeculativeDecoder(target, drafter, num_drafts).generate(
        prompts, max_new_tokens=new, eos_token_id=[], **settings
    )


def served(target, drafter, num_drafts=4, graphs=None, **settings) -> dict:
    """Four requests on two rows, so that sequences begin beside others."""
    scheduler = Scheduler(
        SpeculativeDecoder(target, drafter, num_drafts), rows=2, max_length=60, prefill_chunk=4, rule="coupled"
    )
    scheduler.batch.config = replace(scheduler.batch.config, graphs=graphs)
    asked = [Request([i + 1, *PROMPTS[i % 3]], 5 + 6 * i, seed=i, id=i, **settings) for i in range(4)]
    told = {o.request.id: (o.tokens, o.stats) for o in scheduler.run(asked)}
    assert scheduler.drafter_error is None
    return told


@pytest.mark.parametrize("kind", KINDS)
def test_exact_heads_are_accepted_and_greedy_texts_are_the_targets(kind, loaded):
    _, order, num_drafts, least = KINDS[kind]
    target = predictable_target(order)
    plain = texts(target, None)
    for prompts in (PROMPTS, PROMPTS[:1]):
        result = texts(target, loaded[kind], prompts, num_drafts)
        assert result.drafter_error is None and result.tokens == plain.tokens[: len(prompts)]
        # A prompt of one token has no feature before its first step.
        assert result.stats.tau >= least - (len(prompts) > 1)
    steps = sum(result.stats.steps_by_drafts[1:])  # of the one sequence
    at_once = kind not in IN_TURN
    assert result.stats.draft_forwards == result.stats.steps if at_once else result.stats.draft_forwards > steps
    assert kind not in EXACT or not loaded[kind].report.little
    assert not any(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in target.modules())


@pytest.mark.parametrize("kind", [*KINDS, "imperfect"])
def test_coupled_texts_are_plain_samplings(kind, loaded, imperfect):
    _, order, num_drafts, _ = KINDS.get(kind, KINDS["eagle3"])
    target, drafter = predictable_target(order), loaded.get(kind, imperfect)
    settings = {"rule": "coupled", "params": SamplingParams(1.0), "seed": [3, 4, 5]}
    plain = texts(target, None, **settings)
    result = texts(target, drafter, num_drafts=num_drafts, **settings)
    assert result.tokens == plain.tokens and result.stats.accepted > 0


@pytest.mark.parametrize(
    "kind",
    ["eagle3", "imperfect", "dflash", *(pytest.param(k, marks=pytest.mark.nightly) for k in KINDS if k not in DAILY)],
)
def test_sequences_that_begin_beside_others(kind, loaded, imperfect, monkeypatch):
    """Texts are plain decoding's, and acceptance does not depend on the company, nor on a graph."""
    monkeypatch.setattr(validation, "check_counts", lambda *given: None)
    _, order, num_drafts, least = KINDS.get(kind, KINDS["eagle3"])
    target, drafter = predictable_target(order), loaded.get(kind, imperfect)
    plain = served(target, None)
    graphs = StepGraphs(capture=record, allocated=lambda: 0)
    told, replayed = served(target, drafter, num_drafts), served(target, drafter, num_drafts, graphs)
    assert graphs.replays > 5
    for number, (tokens, stats) in told.items():
        assert tokens == plain[number][0] == replayed[number][0]
        assert (stats.accepted, stats.drafted) == (replayed[number][1].accepted, replayed[number][1].drafted)
        assert kind not in IN_TURN or stats.acceptance_rate == 1.0
    if kind == "imperfect":
        assert 0 < sum(s.accepted for _, s in told.values()) < sum(s.drafted for _, s in told.values())


def test_acceptance_after_steps_without_drafts(loaded, monkeypatch):
    """The head reads what it missed, and once more what it had read with guessed features."""
    script_k(monkeypatch, [4, 4, 0, 0, 0, 0, 0, 0, 4, 0, 0, *[4] * 30])
    result = texts(predictable_target(), loaded["eagle3"], PROMPTS[::2], new=40)
    assert result.tokens == texts(predictable_target(), None, PROMPTS[::2], new=40).tokens
    assert result.stats.acceptance_rate == 1.0 and result.stats.steps > 10


# What is done to the files of an exact head, or how it is loaded: (name, change of tensors, arguments)
def _rotated(name: str, parts: int):
    def change(tensors):
        first, *others = tensors[name].chunk(parts, 1)
        tensors[name] = torch.cat((*others, first), 1)

    return change


def _unpermuted(tensors):
    tensors["fc.weight"][:V] = torch.cat([torch.eye(V), torch.zeros(V, V)] * 3, 1) / 3


def _other_vocabulary(tensors):
    tensors["lm_head.weight"] = tensors["lm_head.weight"].roll(1, 0)


def _forgets(tensors):
    tensors["midlayer.self_attn.v_proj.weight"][:V] = 0


WRONG = {
    "states one late": (None, {"layer_ids": (3, 4, 6)}),
    "states one early": (None, {"layer_ids": (1, 2, 4)}),
    "states in another order": (None, {"layer_ids": (3, 5, 2)}),
    "fc reads what is not there": (_unpermuted, {}),
    "fc in another order": (_rotated("fc.weight", 3), {}),
    "feature before embedding": (_rotated("midlayer.self_attn.v_proj.weight", 2), {}),
    "ids one off": (_other_vocabulary, {}),
    "the wrong state is fed back": (_forgets, {}),
}


WIRED = {"params": SamplingParams(1.0), "seed": [1, 2, 3]}


@pytest.fixture(scope="module")
def right(loaded) -> float:
    """tau of the head as it should be."""
    return texts(predictable_target(), loaded["eagle3"], **WIRED).stats.tau


EVERY_DAY = ("states one late", "fc in another order", "ids one off")


@pytest.mark.parametrize("name", [n if n in EVERY_DAY else pytest.param(n, marks=pytest.mark.nightly) for n in WRONG])
def test_wrong_wiring_halves_tau_and_is_told(tmp_path, name, right):
    change, arguments = WRONG[name]
    config, tensors = exact_eagle3()
    if change is not None:
        change(tensors)
    target = predictable_target()
    with pytest.warns(RuntimeWarning, match="drafts are rarely accepted") as caught:
        drafter = load_head(write(tmp_path, config, tensors), target, **arguments)
    assert drafter.report.little
    assert texts(target, drafter, **WIRED).stats.tau < 0.6 * right
    if name.startswith("states one"):  # the message says which would be right
        assert "layer_ids=[2, 3, 5]" in str(caught[0].message)


def test_a_reading_in_doubt_is_decided_by_the_drafts(tmp_path):
    """The same top-level ids mean hidden states to vLLM, and layers to SGLang."""
    config, tensors = exact_eagle3((2, 3, 5))
    del config["eagle_config"]
    for ids, reading in (([2, 3, 5], "what config.json says"), ([1, 2, 4], r"hidden states \[2, 3, 5\]")):
        folder = write(tmp_path / str(ids[0]), config | {"eagle_aux_hidden_state_layer_ids": ids}, tensors)
        with pytest.warns(RuntimeWarning, match=f"taken is {reading}"):
            drafter = load_head(folder, predictable_target())
        assert drafter.head.states == (2, 3, 5) and drafter.report.accepted > 3.9


def test_ids_that_nobody_says_are_warned_about(tmp_path):
    config, tensors = exact_eagle3((2, 3, 4))
    del config["eagle_config"]
    with pytest.warns(RuntimeWarning, match=r"does not say which hidden states the head reads; taken are \[2, 3, 4\]"):
        drafter = load_head(write(tmp_path, config, tensors), predictable_target())
    assert drafter.report.accepted > 3.9


def test_generate_of_transformers(loaded):
    target, ids = predictable_target(), torch.tensor(PROMPTS[:1])
    ours = speculate(drafter=loaded["eagle3"], num_drafts=4)
    settings = {"max_new_tokens": 20, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    text = target.generate(ids, attention_mask=torch.ones_like(ids), custom_generate=ours, **settings)
    assert torch.equal(text, target.generate(ids, attention_mask=torch.ones_like(ids), **settings))
    assert ours.last_result.stats.tau > 4


def test_matrices_that_are_the_targets_are_shared(tmp_path):
    config, tensors = exact_eagle3()
    ours = (predictable_target().get_input_embeddings().weight, predictable_target().get_output_embeddings().weight)
    for own in (False, True):
        table, head = (weight.detach() + own for weight in ours)
        folder = write(tmp_path / str(own), config, tensors | {"embed_tokens.weight": table, "lm_head.weight": head})
        model = load_head(folder, predictable_target(), check=False).head
        assert (model.embed_tokens is not None) == (model.lm_head is not None) == own


def test_a_head_of_another_target_is_refused(loaded, monkeypatch):
    with pytest.raises(ValueError, match="draft: got a head \\(eagle3\\) for 64 hidden numbers, 32 tokens.*101 tokens"):
        SpeculativeDecoder(tiny_model("llama", layers=LAYERS), loaded["eagle3"], 4)
    layer = predictable_target().model.layers[1]
    monkeypatch.setattr(layer, "forward", layer.forward)  # as accelerate does
    with pytest.raises(ValueError, match="target: got model type 'qwen2', whose forward was replaced"):
        SpeculativeDecoder(predictable_target(), loaded["eagle3"], 4)
