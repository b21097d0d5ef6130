"""Heads in training: what each kind learns, and that the very same network drafts from its files."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from specdec import HeadDrafter, SpeculativeDecoder, load_head
from specdec.drafters.heads.interface import known_rows
from specdec.models.cache.features import FeatureStore
from specdec.models.cache.kv_cache import visible_slots
from specdec.models.supported import cached_model
from specdec.training.head_features import CachedFeatures, Features
from specdec.training.head_trainer import measure
from specdec.training.heads import learn_dflash, learn_medusa
from specdec.training.heads import learner as learning
from specdec.training.heads.learner import layer_sizes, output_ids
from specdec.training.settings import BLOCKS, DistillSettings, HeadSettings
from specdec.training.train_heads import WrongFiles, loaded_back, mask_token, new_learner, write_files
from support.heads import HIDDEN, LAYERS, V, predictable_target
from support.models import TYPES, prompts, tiny_model
from transformers import Gemma2Config, Gemma2ForCausalLM, PreTrainedModel

LENGTH = 24
RUN = DistillSettings()
SETTINGS = {
    "medusa": HeadSettings("medusa", RUN, depth=3),
    "eagle3": HeadSettings("eagle3", dataclasses.replace(RUN, vocabulary=24)),
    "dflash": HeadSettings("dflash", RUN, depth=5),
    "dspark": HeadSettings("dspark", RUN, depth=5),
    "mtp": HeadSettings("mtp", RUN),
}


def model() -> PreTrainedModel:
    """Every layer has another code of the token, so what reads the wrong one reads nothing."""
    return predictable_target()


@functools.cache
def text() -> torch.Tensor:
    """Of the target's own, [1, LENGTH]."""
    written = SpeculativeDecoder(model(), None, 0).generate([[3, 1, 4, 1, 5, 9, 2, 6]], max_new_tokens=LENGTH - 8)
    return torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6, *written.tokens[0]]])


def features(target, learner) -> Features:
    return Features(target, learner.head.states, learner.head.d2t)


@functools.cache
def learned(name: str):
    """A head that knows one text by heart, and how often its drafts were right in the last step."""
    target = cached_model(model(), "target")
    torch.manual_seed(1)
    learner = new_learner(SETTINGS[name], target, text(), None)
    lesson = features(target, learner).lesson(text())
    optimiser, chance = torch.optim.Adam(learner.head.parameters(), 5e-3), torch.Generator().manual_seed(2)
    for _ in range(70):
        loss, hits = learner.learn(lesson, chance)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert all(parameter.grad is not None for parameter in learner.head.parameters())
    return learner, hits


def decoded(folder, **how):
    prompt, new = text()[0, :8].tolist(), LENGTH - 8
    drafter = load_head(folder, model(), check=False, **how)
    result = SpeculativeDecoder(model(), drafter, num_drafts=3).generate([prompt], max_new_tokens=new)
    assert result.drafter_error is None and result.tokens[0] == text()[0, 8:].tolist()
    return drafter, result.stats


@pytest.mark.parametrize("name", SETTINGS)
def test_a_head_learns_and_its_files_draft(tmp_path, name):
    """Most drafts are right, in training and in decoding, which are the same network; the text is the target's."""
    learner, hits = learned(name)
    assert len(hits) == SETTINGS[name].depth and min(hits) > 0.7, hits
    write_files(tmp_path, learner.published("some/target"), torch.float32)
    drafter, stats = decoded(tmp_path)
    assert drafter.head.kind == learner.kind and drafter.head.states == learner.head.states
    assert stats.alpha > 0.7
    mine, theirs = learner.head.state_dict(), drafter.head.state_dict()
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[key], theirs[key]) for key in mine)


def drafted(head, target, tokens: list[int], known: int, depth: int) -> list[torch.Tensor]:
    """The logits of the next drafts after ``known`` tokens, in decoding, where these are the text's own."""
    capacity = target.capacity(len(tokens) + depth)
    store, cache = head.new_store(1, capacity), target.new_cache(1, capacity)
    cache.features = store
    target.prefill(cache, [tokens])
    end, last, places = torch.tensor([known - 1]), torch.tensor([tokens[known - 1]]), torch.arange(known - 1)[None]
    rows = known_rows(head, store, places, end, last, visible_slots(capacity, capacity))
    after = torch.arange(known - 1, known + depth - 2)[None]
    drafts = head.draft(
        rows, head.layout(after, after, rows.layout.visible), head.new_cache(1, capacity), depth
    )  # fmt: skip
    found = [next(drafts)]
    return found + [drafts.send(torch.tensor([[tokens[known + i]]])) for i in range(depth - 1)]


@pytest.mark.parametrize("name", SETTINGS)
def test_what_it_learns_from_is_what_it_drafts_from(name, monkeypatch):
    """The same logits at every place and depth: no row sees another one, or what it will not see in decoding."""
    target, tokens, depth, recorded = cached_model(model(), "target"), text()[0], SETTINGS[name].depth, []
    torch.manual_seed(3)
    learner = new_learner(SETTINGS[name], target, text(), None)
    for weight in learner.head.parameters():
        if weight.dim() == 2:
            torch.nn.init.normal_(weight, std=0.3)
    for module in (learning, learn_dflash, learn_medusa):
        monkeypatch.setattr(module, "agreement", lambda ours, *others: recorded.append(ours) or 0.0)
    learner.learn(features(target, learner).lesson(text()), torch.Generator().manual_seed(4))
    begins = torch.randperm(LENGTH - depth, generator=torch.Generator().manual_seed(4)).tolist()
    with torch.no_grad():
        for known in (2, 9, LENGTH - depth):
            row = begins.index(known - 2) if name in BLOCKS else known - 2
            wanted = drafted(learner.head, target, tokens.tolist(), known, depth)
            for mine, theirs in zip(recorded, wanted, strict=True):
                torch.testing.assert_close(mine[:, row], theirs, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", SETTINGS)
def test_matrices_in_bfloat16_learn_alike(name):
    target, losses = cached_model(model(), "target"), []
    for low in (False, True):
        torch.manual_seed(3)
        learner = new_learner(SETTINGS[name], target, text(), None)
        lesson = features(target, learner).lesson(text())
        with torch.autocast("cpu", torch.bfloat16, enabled=low):
            loss, _ = learner.learn(lesson, torch.Generator().manual_seed(4))
        loss.backward()
        losses.append(loss.item())
    assert losses[0] != losses[1] and losses[1] == pytest.approx(losses[0], rel=0.03)


@pytest.mark.parametrize("name", ["eagle3", "dflash", "dspark"])
def test_the_container_of_speculators_is_the_same_head(tmp_path, name):
    learner, _ = learned(name)
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    write_files(tmp_path / "a", learner.published("t"), torch.float32)
    write_files(tmp_path / "b", learner.container("t", 5), torch.float32)
    told = json.loads((tmp_path / "b" / "config.json").read_text())
    assert told["speculators_model_type"] == name
    assert told["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 5
    (one, first), (other, second) = decoded(tmp_path / "a"), decoded(tmp_path / "b")
    assert one.head.states == other.head.states and first.accepted == second.accepted
    assert other.num_parameters == one.num_parameters  # the embedding is the target's, and shared


# ---- classic bugs of wiring: each costs most of the acceptance, or is refused


def changed(tmp_path, name: str, config=lambda c: None, tensors=lambda t: None):
    learner, _ = learned(name)
    write_files(tmp_path, learner.published("t"), torch.float32)
    told, weights = json.loads((tmp_path / "config.json").read_text()), load_file(tmp_path / "model.safetensors")
    config(told)
    tensors(weights)
    (tmp_path / "config.json").write_text(json.dumps(told))
    save_file(weights, tmp_path / "model.safetensors")
    return tmp_path


def one_late(told: dict) -> None:
    nested, name = ("eagle_config", "eagle_aux_hidden_state_layer_ids")
    if "dflash_config" in told:
        nested, name = "dflash_config", "target_layer_ids"
    told[nested][name] = [i + 1 for i in told[nested][name]]


def test_what_was_written_is_what_was_trained(tmp_path):
    for name in SETTINGS:
        folder = tmp_path / name
        folder.mkdir()
        drafter, trouble = loaded_back(changed(folder, name), learned(name)[0], None, text()[0].tolist())
        # It knows one text by heart, and the self-check has another one.
        assert drafter.head.kind == name and trouble is not None and "rarely accepted" in trouble


@pytest.mark.parametrize("name", ["eagle3", "dflash", "dspark"])
def test_layer_ids_off_by_one_are_seen(tmp_path, name):
    with pytest.raises(WrongFiles, match="draft worse than what was trained: .* accepted, not"):
        loaded_back(changed(tmp_path, name, one_late), learned(name)[0], None, text()[0].tolist())


def test_d2t_added_twice_is_refused(tmp_path):
    def twice(weights):
        weights["d2t"] = weights["d2t"] + torch.arange(len(weights["d2t"]))

    with pytest.raises(ValueError, match="^(d2t|t2d): got"):
        decoded(changed(tmp_path, "eagle3", tensors=twice))


def test_d2t_has_the_most_frequent_tokens():
    _, tensors = learned("eagle3")[0].published("t")
    ids = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    assert ids.tolist() == tensors["t2d"].nonzero()[:, 0].tolist() and len(ids) == 24
    assert {*text()[0].tolist()} <= {*ids.tolist()}


def test_the_mask_is_a_token_that_no_text_has():
    assert mask_token(torch.tensor([3, 1, 0, 0]), None) == 2
    assert mask_token(torch.tensor([3, 1, 0, 0]), 3) == 3
    assert mask_token(torch.tensor([3, 1, 0, 2]), 3) == 2  # the padding is the end of sequence here
    assert mask_token(torch.tensor([3, 1, 0, 2]), 9) == 2


def test_the_embedding_is_no_layers_output():
    assert output_ids([1, 8]) == [0, 7]
    with pytest.raises(ValueError, match="^layer_ids: got .0, 4., allowed: from 1"):
        output_ids([0, 4])


# ---- features


def decoding_features(target, states, tokens) -> torch.Tensor:
    """[L - 1, n * h]: what is recorded while the text is fed a few tokens at a time, as steps do."""
    capacity = target.capacity(len(tokens))
    cache, width = target.new_cache(1, capacity), len(states) * target.config.hidden_size
    cache.features = FeatureStore(states, lambda taken: taken, 1, capacity, width, target.dtype, target.device)
    for end in (5, 6, 9, len(tokens) - 1):
        start = int(cache.lengths[0])
        target.extend(cache, [tokens[:end]], [start])
    return cache.features.features[0, : len(tokens) - 1]


@pytest.mark.parametrize("kind", TYPES)
@torch.no_grad()
def test_features_are_those_of_decoding(kind):
    target, tokens = cached_model(tiny_model(kind, layers=3), "target"), torch.tensor(prompts(2, 12, 12))
    states = (1, 2, 3)
    lesson = Features(target, states).lesson(tokens)
    plain = target.model(tokens, output_hidden_states=True)
    wanted = torch.cat([plain.hidden_states[i] for i in states], -1)
    torch.testing.assert_close(lesson.states, wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(lesson.log_p, plain.logits.log_softmax(-1), rtol=1e-4, atol=1e-4)
    for row, own in zip(tokens.tolist(), lesson.states, strict=True):
        torch.testing.assert_close(decoding_features(target, states, row), own[:-1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("states", [(2, 4, 5), (1, LAYERS), (LAYERS,)])
def test_cached_features_are_those_of_each_step(tmp_path, states, monkeypatch):
    from specdec.training import head_features as module

    monkeypatch.setattr(module, "SHARD_BYTES", 2 * 12 * (len(states) + 1) * HIDDEN * 4 + 1)
    target, blocks = cached_model(model(), "target"), torch.randint(V, (5, 12))
    online = Features(target, states)
    known = CachedFeatures(tmp_path, online, blocks)
    known.fill(2, lambda done, total: None)
    assert known.shards in (2, 3) and len([*tmp_path.iterdir()]) == known.shards
    found, wanted = known.of(torch.tensor([4, 1])), online.lesson(blocks[[4, 1]])
    for mine, theirs in zip(vars(found).values(), vars(wanted).values(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    assert not found.states.requires_grad and not found.log_p.requires_grad


@pytest.mark.parametrize("vocabulary", [0, 7, 24])
def test_a_loss_is_over_the_tokens_that_a_head_drafts(tmp_path, vocabulary, monkeypatch):
    """With the target's distribution over them alone, whether its logits are made of cached states or not."""
    target, blocks, recorded = cached_model(model(), "target"), torch.cat([text(), text().flip(1)]), []
    monkeypatch.setattr(learning, "agreement", lambda ours, *others: recorded.append(ours) or 0.0)
    settings = HeadSettings("eagle3", dataclasses.replace(RUN, vocabulary=vocabulary))
    learner = new_learner(settings, target, blocks, None)
    online = features(target, learner)
    known = CachedFeatures(tmp_path, online, blocks)
    known.fill(2, lambda done, total: None)
    (mine, _), (cached, _) = (
        learner.learn(lesson, torch.Generator()) for lesson in (online.lesson(blocks), known.of(torch.arange(2)))
    )
    with torch.no_grad():
        logits = target.model(blocks).logits
    kept, wanted, rows = learner.head.d2t, 0.0, LENGTH - settings.depth
    for i, ours in enumerate(recorded[: settings.depth]):
        theirs = logits[:, 1 + i : 1 + i + rows] if kept is None else logits[:, 1 + i : 1 + i + rows, kept]
        assert ours.shape == theirs.shape and ours.shape[-1] == (vocabulary or V)
        log_q, log_p = ours.log_softmax(-1), theirs.log_softmax(-1)
        wanted += 0.8**i * (log_p.exp() * (log_p - log_q)).sum().item() / (2 * rows)
    torch.testing.assert_close(torch.stack([mine, cached]), torch.full((2,), wanted), rtol=1e-4, atol=1e-5)


def test_cached_features_know_what_they_are_of(tmp_path):
    target, blocks = cached_model(model(), "target"), torch.randint(V, (3, 12))
    CachedFeatures(tmp_path, Features(target, (2, 4)), blocks).fill(2, lambda done, total: None)
    stamps = [path.stat().st_mtime_ns for path in tmp_path.iterdir()]
    CachedFeatures(tmp_path, Features(target, (2, 4)), blocks).fill(2, lambda done, total: None)
    assert [path.stat().st_mtime_ns for path in tmp_path.iterdir()] == stamps
    for wrong in ((Features(target, (2, 5)), blocks), (Features(target, (2, 4)), blocks.flip(0))):
        with pytest.raises(ValueError, match="^cache_features: got .*of another target, data or layers"):
            CachedFeatures(tmp_path, *wrong).fill(2, lambda done, total: None)


def test_logits_that_are_more_than_a_matrix_are_not_made_again(tmp_path):
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = Gemma2Config(vocab_size=32, num_key_value_heads=1, head_dim=8, final_logit_softcapping=0.5, **sizes)
    target = cached_model(Gemma2ForCausalLM(config).eval(), "target")
    with pytest.raises(ValueError, match="^cache_features: got True for model type 'gemma2'"):
        CachedFeatures(tmp_path, Features(target, (1,)), torch.randint(32, (2, 8)))


# ---- other targets


@pytest.mark.parametrize("kind", TYPES)
def test_any_target_has_layers_for_its_heads(tmp_path, kind):
    """EAGLE-3, DFlash and DSpark after a step, for targets without a Llama's configuration."""
    target = cached_model(tiny_model(kind, layers=3), "target")
    sizes = layer_sizes(target.config, 1, "llama")
    assert sizes["hidden_size"] == 32 and sizes["num_attention_heads"] * sizes["head_dim"] == 32
    tokens = torch.tensor(prompts(2, 24, 24))
    plain = SpeculativeDecoder(target.model, None, 0).generate(tokens[:, :6], max_new_tokens=10)
    for name in ("eagle3", "dflash", "dspark", "medusa"):
        ids = None if name == "medusa" else (1, 2, 3)
        learner = new_learner(HeadSettings(name, RUN, 2, layer_ids=ids), target, tokens, None)
        loss, _ = learner.learn(features(target, learner).lesson(tokens), torch.Generator())
        loss.backward()
        folder = tmp_path / name
        folder.mkdir()
        write_files(folder, learner.published("t"), torch.float32)
        drafter = load_head(folder, target.model, check=False)
        result = SpeculativeDecoder(target.model, drafter, 2).generate(tokens[:, :6], max_new_tokens=10)
        assert result.drafter_error is None and result.tokens == plain.tokens


def test_what_a_kind_cannot_have_is_refused():
    small, blocks = cached_model(tiny_model("llama"), "target"), torch.zeros(2, 20, dtype=torch.int64)
    for settings, told in (
        (HeadSettings("eagle3", RUN), "layer_ids: got none"),
        (HeadSettings("dflash", RUN), "layer_ids: got .*allowed: distinct integers"),
        (HeadSettings("dspark", RUN), "layer_ids: got .*allowed: distinct integers"),
        (HeadSettings("eagle3", RUN, layer_ids=(1, 7)), "layer_ids: got .1, 7."),
        (HeadSettings("eagle3", RUN, layer_ids=(0, 1)), "layer_ids: got .0, 1., allowed: from 1"),
        (HeadSettings("eagle3", dataclasses.replace(RUN, vocabulary=102), layer_ids=(1, 2)), "vocabulary: got 102"),
        (HeadSettings("mtp", RUN), "target: got model type 'llama' with MTP layers"),
    ):
        with pytest.raises(ValueError, match=f"^{told}"):
            new_learner(settings, small, blocks, None)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_target_in_bfloat16(tmp_path, name):
    """The head learns in float32 over its states, and drafts for it, before and after it was saved."""
    low = copy.deepcopy(model()).to(torch.bfloat16)
    target = cached_model(low, "target")
    learner = new_learner(SETTINGS[name], target, text(), None)
    loss, _ = learner.learn(features(target, learner).lesson(text()), torch.Generator())
    loss.backward()
    assert {p.dtype for p in learner.head.parameters()} == {torch.float32}
    write_files(tmp_path, learner.published("t"), torch.bfloat16)
    for drafter in (HeadDrafter(learner.head), load_head(tmp_path, low, check=False)):
        worths, hits = measure(low, drafter, text()[:, :8].tolist(), 6, 3, 0)
        assert [w.temperature for w in worths] == [0.0, 1.0] and len(hits) >= 1
