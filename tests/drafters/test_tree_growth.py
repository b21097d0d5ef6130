"""Trees that models and heads grow: their nodes are those of full forwards, their texts the target's, and they accept
more than chains."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import replace

import pytest
import torch
from specdec import EarlyExitDrafter, Request, Scheduler, SpeculativeDecoder, load_head
from specdec.drafters import TreeGrowth, guard
from specdec.drafters.model import model_drafter
from specdec.drafters.tree_shape import best_shape
from specdec.evaluation.verify.chi_square import chi_square
from specdec.loop.graphs import StepGraphs
from specdec.models.forward.cached_model import CachedModel
from specdec.models.supported import cached_model
from support import plain_heads
from support.growing import Watched, likely_paths, paths_of
from support.heads import exact_eagle, exact_eagle3, predictable_target, write
from support.model_types import model_of
from support.models import VOCABULARY, prompts, pruned_draft, tiny_model, toy_model, tunable_pair
from support.recorded import record

from specdec_kernels import SamplingParams, draft_children, draft_step, validation
from specdec_kernels.testing import text_distribution

K, N, WIDTH = 4, 14, 3
GREEDY, WARM = SamplingParams(0.0), SamplingParams(0.9)
PENALISED = SamplingParams(0.0, repetition_penalty=0.8)  # which makes nodes of their ancestors' tokens likely
GUESS = (0.6, 0.3, 0.2)
MOST = torch.tensor([i for i in range(VOCABULARY) if i % 6])  # of the vocabulary


def noisy(model):
    """A draft that often agrees with ``model``."""
    draft = copy.deepcopy(model)
    weight = draft.get_output_embeddings().weight
    with torch.no_grad():
        weight.add_(0.12 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)))
    return draft


def drafters(kind: str, growth: TreeGrowth):
    """(target, drafter, what its logits are made of: a model and the ids of its columns)."""
    if kind == "early exit":
        target = tunable_pair(0.4)[0]
        drafter = EarlyExitDrafter(target, 2, growth=growth)
        return target, drafter, (drafter.model.model, None)
    target = tunable_pair(0.3)[0] if kind in ("llama", "reduced") else tiny_model(kind)
    draft = tunable_pair(0.3)[1] if kind in ("llama", "reduced") else noisy(target)
    ids = MOST if kind == "reduced" else None
    draft = draft if ids is None else pruned_draft(draft, ids)
    drafter = model_drafter(draft, cached_model(target, "target"), ids)
    drafter.growth = growth
    return target, drafter, (draft, ids)


def rows_of(model, ids, penalty: float = 1.0):
    """Logits [n, V] after a text and n paths, of full forwards, with the repetition penalty."""

    @torch.no_grad()
    def rows(text, paths):
        known = torch.tensor([[*text, *path] for path in paths])
        logits = model(known).logits[:, -1].float()
        if ids is not None:
            whole = torch.full((len(paths), VOCABULARY), -torch.inf)
            logits = whole.index_copy(1, ids, logits)
        seen = torch.zeros_like(logits, dtype=torch.bool).scatter(1, known, True)
        return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)

    return rows


def decode(target, drafter, ids, tree: int | None = N, num_drafts: int = K, new: int = 16, **settings):
    decoder = SpeculativeDecoder(target, drafter, num_drafts, tree=tree)
    result = decoder.generate(ids, max_new_tokens=new, eos_token_id=[], **settings)
    assert result.drafter_error is None
    return result


def plain(target, ids, new: int = 16, **settings):
    decoder = SpeculativeDecoder(target, None, 0)
    return decoder.generate(ids, max_new_tokens=new, eos_token_id=[], rule="coupled", **settings).tokens


def assert_likely(watched: Watched, rows, nodes: int = N, width: int = WIDTH) -> None:
    for _, row, text, allowed, tree in watched.of_rows():
        paths = [path for path in paths_of(tree, row) if path is not None]
        expected = likely_paths(rows, text, min(allowed, K), nodes, width)
        assert len(paths) == len(set(paths)) and set(paths) == set(expected)
        assert [len(path) for path in paths] == sorted(map(len, paths))


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        ("llama", GREEDY),
        ("gemma3", PENALISED),
        ("reduced", GREEDY),
        ("early exit", GREEDY),
        pytest.param("gpt2", GREEDY, marks=pytest.mark.nightly),
        pytest.param("qwen3", PENALISED, marks=pytest.mark.nightly),
    ],
)
def test_the_most_probable_nodes_of_full_forwards(kind, params):
    """In every step of a greedy text, after paths of all lengths were accepted; alone as beside others."""
    target, drafter, made_of = drafters(kind, TreeGrowth(WIDTH))
    ids, expected, several = prompts(3, 1, 14, seed=2), None, None
    for rows in (ids, ids[2:]):
        watched = Watched(drafter)
        result = decode(target, watched, rows, params=params)
        expected = expected or plain(target, rows, params=params)
        assert result.tokens == expected[-len(rows) :]
        assert_likely(watched, rows_of(*made_of, params.repetition_penalty or 1.0))
        trees = {
            (len(text), allowed): paths_of(tree, row)
            for _, row, text, allowed, tree in watched.of_rows()
            if row == len(rows) - 1
        }
        several = several or trees
        assert all(several[key][: len(paths)] == paths for key, paths in trees.items())
    assert result.stats.accepted_by_position[2] > 0 and result.stats.tau > 1.5


@pytest.mark.parametrize("rule", ("coupled", "token"))
@pytest.mark.parametrize("kind", ("llama", "reduced"))
def test_drawn_children_are_those_of_full_forwards(kind, rule):
    """Of every node, all children in order, after penalties: with rule ``token`` without replacement, with ``coupled``
    by the race that verification runs."""
    target, drafter, made_of = drafters(kind, TreeGrowth(acceptance=GUESS))
    watched, ids, seeds = Watched(drafter), prompts(3, 1, 14, seed=2), [5, 6, 7]
    params = SamplingParams(0.9, repetition_penalty=1.1)
    result = decode(target, watched, ids, params=params, seed=seeds, rule=rule)
    raw, rows, shape = rows_of(*made_of), rows_of(*made_of, 1.1), best_shape(N, K, GUESS)
    for _, row, text, allowed, tree in watched.of_rows():
        paths = paths_of(tree, row)
        assert tree.parents.tolist() == list(shape)[: len(paths)]
        for node in range(-1, len(paths)):
            path = () if node < 0 else paths[node]
            children = tree.tokens[row, tree.parents == node].tolist()
            if path is None or len(path) >= allowed or not children:
                continue
            logits, columns = rows(text, [path]), made_of[1]
            noise = {"seed": seeds[row], "position": len(text), "backend": "reference"}
            if rule == "token":
                logits = logits if columns is None else logits[:, columns]
                whole = raw(text, [path])[0]
                expected = whole if columns is None else whole[columns]
                torch.testing.assert_close(tree.logits[row, 1 + node], expected, atol=1e-4, rtol=1e-4)
                out = draft_children(logits, len(children), WARM, offset=1 + node, d2t=columns, **noise)
                drawn = out.tokens[0].tolist()
            else:
                drawn = []
                for _ in children:
                    step = draft_step(logits, WARM, offset=len(path), rule="coupled", **noise)
                    drawn.append(int(step.tokens))
                    logits[0, drawn[-1]] = -torch.inf
            assert children == drawn
    assert len(result.tokens) == 3 and result.stats.accepted_by_position[2] > 0
    if rule == "coupled":
        assert result.tokens == plain(target, ids, params=params, seed=seeds)


# ---- heads


def random_eagle3(folder, layers: int = 2):
    """(config.json, tensors) of a head for the tiny Llama, over half of the vocabulary."""
    sizes = {
        "hidden_size": 32, "intermediate_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
        "rms_norm_eps": 1e-5, "vocab_size": VOCABULARY, "max_position_embeddings": 256, "norm_output": True,
        "draft_vocab_size": len(MOST), "num_hidden_layers": layers,
    }  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (32, 96),
        "norm.weight": (32,),
        "lm_head.weight": (len(MOST), 32),
    }
    for i in range(layers):
        inputs = 32 if i else 64
        shapes |= {f"layers.{i}.self_attn.{n}_proj.weight": (s, inputs) for n, s in (("q", 32), ("k", 16), ("v", 16))}
        shapes |= {f"layers.{i}.self_attn.o_proj.weight": (32, 32), f"layers.{i}.mlp.down_proj.weight": (32, 40)}
        shapes |= {f"layers.{i}.mlp.{n}_proj.weight": (40, 32) for n in ("gate", "up")}
        norms = ["input_layernorm", "post_attention_layernorm", *([] if i else ["hidden_norm"])]
        shapes |= {f"layers.{i}.{n}.weight": (32,) for n in norms}
    generator = torch.Generator().manual_seed(0)
    tensors = {n: 0.5 * torch.randn(s, generator=generator) + ("norm" in n) for n, s in shapes.items()}
    t2d = torch.zeros(VOCABULARY, dtype=torch.bool).scatter(0, MOST, True)
    ids = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 2, 3]}}
    files = tensors | {"d2t": MOST - torch.arange(len(MOST)), "t2d": t2d}
    return write(folder, sizes | ids, files), sizes, tensors


def test_eagle3_trees_are_those_of_plain_heads(tmp_path):
    """Each node's stand-in feature is its own parent's output, and it attends to the text and its ancestors."""
    target = tiny_model("llama", layers=7)
    folder, sizes, tensors = random_eagle3(tmp_path)
    head = load_head(folder, target, check=False)
    head.growth = TreeGrowth(WIDTH)
    watched, states = Watched(head), {}

    @torch.no_grad()
    def rows(text, paths):
        if tuple(text) not in states:
            states[tuple(text)] = target(torch.tensor([text]), output_hidden_states=True).hidden_states
        read = [states[tuple(text)][i][0] for i in (1, 3, 4)]
        weights = {"embedding": target.model.embed_tokens.weight, "head": tensors["lm_head.weight"]}
        logits = [
            plain_heads.eagle3(tensors, sizes, read, text, list(path), recycle_normed=True, **weights)[-1].float()
            for path in paths
        ]
        return torch.full((len(paths), VOCABULARY), -torch.inf).index_copy(1, MOST, torch.stack(logits) + biased[MOST])

    few = dict.fromkeys(MOST[:3].tolist(), 25.0)  # so that many drafts are accepted
    biased = torch.zeros(VOCABULARY).index_fill(0, MOST[:3], 25.0)
    for settings in ({"params": GREEDY}, {"params": WARM, "seed": [1, 2, 3]}):
        ids = prompts(3, 2, 9)
        result = decode(target, watched, ids, new=14, logit_bias=few, rule="coupled", **settings)
        assert result.tokens == plain(target, ids, new=14, logit_bias=few, **settings)
    greedy = Watched(head)
    greedy.steps = [step for step in watched.steps if step[2].parents.dim() == 2]
    assert len(greedy.steps) > 3
    assert_likely(greedy, rows)


@pytest.mark.parametrize("kind", ("model", "eagle3", "eagle"))
def test_a_tree_of_width_one_is_the_chain(kind, tmp_path):
    chains, trees = [], []
    if kind == "model":
        target, drafter, _ = drafters("llama", TreeGrowth(width=1))
    else:
        target = predictable_target()
        files = exact_eagle() if kind == "eagle" else exact_eagle3(noise=0.6)
        drafter = load_head(write(tmp_path, *files), target, check=False)
        drafter.growth = TreeGrowth(width=1)

    class Chain(Watched):
        def start(self, batch):
            session = self.drafter.start(batch)
            propose = session.propose

            def noted(step):
                drafts = propose(step)
                chains.append(drafts.tokens.where(torch.arange(step.num_drafts) < step.allowed_on_device[:, None], -1))
                return drafts

            session.propose = noted
            return session

    ids = [[1, 2, 3, 9, 9, 4], [5], [3, 3, 1, 2, 8, 1, 7, 0]]
    chain, watched = decode(target, Chain(drafter), ids, None), Watched(drafter)
    tree = decode(target, watched, ids, N)
    trees = [tree.tokens for *_, tree in watched.steps]
    assert chain.tokens == tree.tokens and chain.stats.accepted_by_position == tree.stats.accepted_by_position
    assert len(chains) == len(trees) > 2 and all(map(torch.equal, chains, trees))


def test_trees_accept_more_than_chains(pair, tmp_path):
    """The embedded pair on source code, and a head that is often wrong; greedy and sampled texts are the target's."""
    target, draft, tokenizer = pair
    code = [tokenizer(t)["input_ids"] for t in ("def fibonacci(n):\n    ", "import os\nimport sys\n\ndef main(")]
    ours = predictable_target()
    head = load_head(write(tmp_path, *exact_eagle3(noise=0.6)), ours, check=False)
    for of, drafter, ids in ((target, draft, code), (ours, head, [[1, 2, 3], [5, 9, 9, 4]])):
        for params in (GREEDY, SamplingParams(1.0)):
            settings = {"params": params, "seed": [3, 4], "rule": "coupled", "new": 24}
            chain, tree = (decode(of, drafter, ids, nodes, **settings) for nodes in (None, 16))
            settings.pop("rule")
            assert chain.tokens == tree.tokens == plain(of, ids, **settings)
            assert tree.stats.tau > 1.1 * chain.stats.tau


# ---- in the loop


def test_requests_that_join_and_captured_steps(monkeypatch, tmp_path):
    """Rows whose sequences come and go, with recorded steps instead of graphs, as nothing waits for the device."""
    monkeypatch.setattr(validation, "check_parents", lambda parents, batch, nodes, device: parents.expand(batch, nodes))
    monkeypatch.setattr(guard, "_out_of_order", lambda parents: False)
    target, drafter, _ = drafters("llama", TreeGrowth())
    ours, ids = predictable_target(), [[i % 32 for i in p] for p in prompts(4, 1, 20)]
    head = load_head(write(tmp_path, *exact_eagle3(noise=0.6)), ours, check=False)
    for of, by, params in ((target, drafter, GREEDY), (target, drafter, WARM), (ours, head, GREEDY)):
        told = []
        for graphs in (None, StepGraphs(capture=record, allocated=lambda: 0)):
            scheduler = Scheduler(SpeculativeDecoder(of, by, K, tree=N), rows=2, max_length=60)
            scheduler.batch.config = replace(scheduler.batch.config, graphs=graphs)
            asked = [Request(p, 5 + 6 * i, params, seed=i, eos_token_id=[]) for i, p in enumerate(ids)]
            outcomes = {o.number: o for o in scheduler.run(asked)}
            assert scheduler.drafter_error is None
            told.append([(outcomes[i].tokens, outcomes[i].stats.accepted) for i in range(4)])
        assert told[0] == told[1] and graphs.replays > 5
        for i, (tokens, _) in enumerate(told[0]):
            assert plain(of, ids[i : i + 1], new=5 + 6 * i, params=params, seed=i) == [tokens]
        assert sum(accepted for _, accepted in told[0]) > 10


@pytest.mark.parametrize("rule", ("token", pytest.param("block", marks=pytest.mark.nightly)))
def test_sampled_texts_have_the_targets_distribution(rule):
    """Whole texts of three tokens, of two steps or three."""
    target, draft, count = toy_model(1), toy_model(2), 8_000
    result = decode(
        target, draft, [[1, 3]] * count, 5, 2, new=3, params=SamplingParams(1.2), seed=list(range(count)), rule=rule
    )

    @torch.no_grad()
    def p(text):
        return (target(torch.tensor([text])).logits[0, -1].double() / 1.2).softmax(-1)

    found = chi_square(Counter(map(tuple, result.tokens)), text_distribution(p, 3, (1, 3)), level=1e-4)
    assert found.p_value > 1e-4 and found.detectable < 0.2 and 1.2 < result.stats.tau < 2.9


def test_the_best_shape():
    """Against all trees of up to five nodes."""

    def value(parents, guess):
        worth = []
        for node, parent in enumerate(parents):
            rank = parents[:node].count(parent)
            worth.append((1.0 if parent < 0 else worth[parent]) * (guess[rank] if rank < len(guess) else 0))
        return sum(worth)

    def depth(parents, node):
        return 0 if node < 0 else 1 + depth(parents, parents[node])

    for guess in ((0.6, 0.3, 0.1), (0.9, 0.05), (0.4, 0.39, 0.38, 0.37)):
        for most in (1, 2, 4):
            every = [()]
            for n in range(6):
                fitting = [t for t in every if len(t) == n and all(depth(t, i) <= most for i in range(n))]
                shape = best_shape(n, most, guess)
                assert value(shape, guess) == pytest.approx(max(value(t, guess) for t in fitting))
                depths = [depth(shape, i) for i in range(len(shape))]
                assert list(shape) == sorted(shape) and depths == sorted(depths) and max(depths, default=0) <= most
                every += [(*t, parent) for t in every if len(t) == n for parent in range(-1, n)]
    assert best_shape(3, 8, (0.9, 0.1)) == (-1, 0, 1) and best_shape(4, 1, (0.9, 0.1)) == (-1, -1)


def test_what_cannot_grow_is_refused():
    target, draft = tunable_pair(0.3)
    with pytest.raises(ValueError, match="confidence: got 0.5 with tree=8, allowed: 0"):
        SpeculativeDecoder(target, draft, K, confidence=0.5, tree=8)
    with pytest.warns(
        RuntimeWarning, match="a draft of model type 'mpt' takes its positions from .*; each step drafts"
    ):
        decoder = SpeculativeDecoder(target, model_of("mpt"), K, tree=8)
    assert decoder.nodes == 0
    for arguments in ({"width": 0}, {"width": 2000}, {"acceptance": (0.2, 0.3)}, {"acceptance": (1.0,)}):
        name = next(iter(arguments))
        with pytest.raises(ValueError, match=f"{name}: got"):
            TreeGrowth(**arguments)
    decoder = SpeculativeDecoder(target, draft, K, tree=8)
    decoder.drafter.growth = TreeGrowth(width=5)  # looks at 15 nodes
    with pytest.raises(ValueError, match=r"2 rows of 66 slots \(max_length=50, 15 nodes of a tree and the trash"):
        Scheduler(decoder, rows=2, max_length=50, cache_tokens=100)


@pytest.mark.parametrize("params", (GREEDY, WARM))
def test_a_sequence_whose_draft_is_not_a_number_drafts_no_more(params, monkeypatch):
    """The draft's second forward of a step gives NaN for row 0 alone."""
    target, drafter, _ = drafters("llama", TreeGrowth())
    texts, whole = prompts(2, 3, 9), CachedModel.__call__
    forwards: list[int] = []

    def spoiled(self, tokens, *rest):
        logits = whole(self, tokens, *rest)
        if self is drafter.model and len(forwards) < 2:
            forwards.append(1)
            logits[0] += float("nan") if len(forwards) == 2 else 0.0
        return logits

    monkeypatch.setattr(CachedModel, "__call__", spoiled)
    with pytest.warns(RuntimeWarning, match="its draft logits are NaN or infinite .DRAFT_NAN"):
        result = decode(target, drafter, texts, N, K, new=12, params=params, seed=[1, 2])
    monkeypatch.undo()
    assert result.tokens == plain(target, texts, new=12, params=params, seed=[1, 2])
    assert result.sequence_stats[1].drafted > result.sequence_stats[0].drafted
