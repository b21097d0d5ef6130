"""A tree of tokens in one forward over the static cache: the logits of every path are those of its own full forward,
before and after the accepted nodes were moved to the front."""

from __future__ import annotations

import pytest
import torch
from specdec import StaticKVCache
from specdec.models import supported
from specdec.models.cache.compaction import Compaction
from specdec.models.cache.kv_cache import visible_slots
from specdec.models.cache.recurrent_layer import RecurrentLayer
from specdec.models.cache.tree import Tree
from specdec.models.forward import attention
from specdec.models.forward.cached_model import CachedModel
from specdec.models.supported import cached_model, why_no_trees
from support.attending import by_blocks
from support.feeding import feed, full_logits
from support.model_types import CASES, model_of
from support.models import VOCABULARY, prompts, tiny_model
from support.recorded import Recording

NO_TREES = {
    "bloom": "takes its positions from a 2-D mask",
    "falcon, ALiBi": "takes its positions from a 2-D mask",
    "mpt": "takes its positions from the order of the slots",
}
# Rotary and learned positions; windows; a mask that is added; states of all kinds.
EVERY_DAY = ("llama", "gpt2", "gemma3_text", "gpt_oss", "qwen3_5_text", "lfm2", "jamba", "zamba2")
# A root with four children, of which the third has one branch longer than a window, and the last a family.
BROAD = [-1, -1, -1, 2, -1, 3, 4, 4, 5, 8, 9, 10, 7, 11, 13, 14]
BINARY = [-1, -1, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6]
CHAIN = list(range(-1, 15))
STEPS = ((BROAD, BINARY, CHAIN, BROAD), BROAD, (CHAIN, BROAD, BINARY, BROAD))


@pytest.fixture(autouse=True)
def _inference():
    with torch.inference_mode():
        yield


def path_to(parents: list[int], node: int) -> list[int]:
    """The nodes from the root's child down to ``node``; none for the root, -1."""
    path: list[int] = []
    while node >= 0:
        path.insert(0, node)
        node = parents[node]
    return path


def feed_tree(cached, cache, roots, nodes, parents, counts) -> torch.Tensor:
    """Feeds every sequence its root and the first ``counts`` of its nodes; with count -1 not even the root."""
    tree = Tree.of(torch.tensor(parents))
    valid = torch.arange(len(nodes[0]) + 1) <= torch.tensor(counts)[:, None]
    positions, slots = tree.places(cache.lengths, valid, cache.trash)
    visible = visible_slots(int(cache.lengths.max()) + 1 + max(counts), cache.capacity)
    tokens = torch.cat((torch.tensor(roots)[:, None], torch.tensor(nodes)), 1)
    return cached(tokens, cache, cached.layout(positions, slots, visible, tree))


def padded(path: list[int], size: int) -> list[int]:
    return path + [-1] * (size - len(path))


def assert_paths(
    cached: CachedModel, steps=((BROAD, BINARY, CHAIN, BROAD), BROAD, (CHAIN, BROAD, BINARY, BROAD))
) -> None:
    """Sequences of different lengths, with trees of their own or one for all, parts of which do not count. After each
    forward one path is accepted, and is the text of the next step."""
    # Tiny models of these types differ by 2e-4 and 3e-4 from themselves in float64.
    least = {"zamba2": 1e-3, "qwen3_5_text": 1e-3}
    bound, most = least.get(cached.config.model_type, 5e-5 if cached.recurrent else 2e-5), 16
    known = [[], *(prompts(1, n, n, seed=n)[0] for n in (1, 30, 57))]
    roots = [3, 4, 5, 6]
    cache = cached.new_cache(4, 128, window=most + 1)
    cached.prefill(cache, known)
    counts, last = [(16, 16, 16, 9), (0, 5, 16, 16), (16, 16, 12, 16)], [(15, 11, 6, 8), (-1, 3, 9, 12), (7, -1, 0, 15)]
    for step, parents in enumerate(steps):
        nodes = torch.randint(VOCABULARY, (4, most), generator=torch.Generator().manual_seed(step)).tolist()
        logits = feed_tree(cached, cache, roots, nodes, parents, counts[step])
        path = []
        for b in range(4):
            own = parents if isinstance(parents[0], int) else parents[b]
            for node in range(-1, counts[step][b]):
                text = known[b] + [roots[b]] + [nodes[b][i] for i in path_to(own, node)]
                torch.testing.assert_close(
                    logits[b, node + 1], full_logits(cached.model, text)[-1], atol=bound, rtol=1e-4
                )
            path.append(path_to(own, last[step][b]))
            text = [roots[b]] + [nodes[b][i] for i in path[-1]]
            known[b], roots[b] = known[b] + text, 7 + step
        cache.compact(torch.tensor([padded(p, most) for p in path]))
        cache.lengths = torch.tensor([len(k) for k in known])


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=() if c in EVERY_DAY else pytest.mark.nightly) for c in CASES if c not in NO_TREES],
)
def test_every_path_is_a_text(case):
    cached = cached_model(model_of(case), "target")
    assert why_no_trees(cached) is None
    assert_paths(cached)


# ---- the shape


def test_ancestors_and_depths():
    """Of one node to a chain of 70, one tree or several, against a walk to the root."""
    generator = torch.Generator().manual_seed(0)
    shapes = [[], [-1], CHAIN, list(range(-1, 69)), [-1] * 5, BROAD]
    shapes += [[int(torch.randint(-1, i, (), generator=generator)) for i in range(n)] for n in (2, 3, 9, 33, 64)]
    for parents in shapes:
        several = torch.tensor([parents, parents], dtype=torch.int64)
        for tree, size in ((Tree.of(several[0]), 1), (Tree.of(several), 2)):
            paths = [[0, *(node + 1 for node in path_to(parents, i))] for i in range(-1, len(parents))]
            assert tree.depths.tolist() == [[len(path) - 1 for path in paths]] * size
            seen = [[[k in path for k in range(len(paths))] for path in paths]] * size
            assert tree.ancestors.tolist() == seen


def test_a_chain_is_what_is_fed_without_a_tree():
    """The same masks, positions and slots, so the same logits to the bit; with caches of 16 bits as well."""
    for kind in ("llama", "gemma3"):
        for dtype in (None, torch.bfloat16):
            cached = CachedModel(tiny_model(kind), cache_dtype=dtype)
            known, tokens = prompts(2, 5, 20), prompts(2, 6, 6, seed=1)
            logits = []
            for by_tree in (False, True):
                cache = cached.new_cache(2, 70)
                cached.prefill(cache, known)
                if by_tree:
                    fed = feed_tree(cached, cache, [t[0] for t in tokens], [t[1:] for t in tokens], CHAIN[:5], (5, 5))
                else:
                    fed = feed(cached, cache, tokens)
                logits.append(fed)
            assert torch.equal(*logits)


# ---- what moves


def storages(batch: int, capacity: int) -> StaticKVCache:
    """A cache whose numbers are all different, with heads of two sizes, in different numbers."""
    cache = StaticKVCache(tiny_model().config, batch, capacity, "cpu")
    cache.write_at(torch.zeros(batch, 1, dtype=torch.int64), 1)
    for layer, heads in enumerate((2, 3)):
        cache.update(torch.zeros(batch, heads, 1, 4), torch.zeros(batch, heads, 1, 7), layer)
    for i, states in enumerate(cache.storage()):
        states.copy_(1000.0 * i + torch.arange(states.numel()).view(states.shape))
    return cache


def test_accepted_nodes_move_and_nothing_else():
    """Recorded once, and replayed for other lengths and paths. The trash slot may hold anything."""
    paths = (
        ([1, 2, 5], [0, 1, 2], [-1, -1, -1]),  # each into the slot of the one before; where they are; nothing
        ([2, 3, 4], [7, -1, -1], [0, 3, -1]),
    )
    cache, lengths, path = storages(3, 20), torch.tensor([0, 0, 0]), torch.zeros(3, 3, dtype=torch.int64)
    cache.lengths, recording = lengths, Recording()
    with recording:  # which refuses what waits for the device
        cache.compact(path)
    addresses = [states.data_ptr() for states in cache.storage()]
    for accepted in paths:
        for lengths_now in ([0, 5, 3], [10, 8, 14]):
            path.copy_(torch.tensor(accepted))
            lengths.copy_(torch.tensor(lengths_now))
            expected = [states.clone() for states in storages(3, 20).storage()]
            for states, before in zip(cache.storage(), expected, strict=True):
                states.copy_(before)
            recording.replay()
            for states, before in zip(cache.storage(), expected, strict=True):
                after = before.clone()
                for b, length in enumerate(lengths_now):
                    for depth, node in enumerate(n for n in accepted[b] if n >= 0):
                        after[b, :, length + 1 + depth] = before[b, :, length + 1 + node]
                assert torch.equal(states[:, :, :-1], after[:, :, :-1])
    assert addresses == [states.data_ptr() for states in cache.storage()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_launch_moves_all_layers(dtype):
    """The kernel that a GPU runs, here interpreted: as the gather moves them, to the bit."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(0)
    states = [
        torch.randn(3, heads, 20, size, generator=generator).to(dtype) for heads, size in ((2, 4), (3, 7), (40, 16))
    ]
    lengths, path = torch.tensor([0, 5, 3]), torch.tensor([[1, 2, 5], [7, -1, -1], [0, 1, 2]])
    expected = [before.clone() for before in states]
    for before, after in zip(states, expected, strict=True):
        for b, nodes in enumerate(path.tolist()):
            for depth, node in enumerate(n for n in nodes if n >= 0):
                after[b, :, lengths[b] + 1 + depth] = before[b, :, lengths[b] + 1 + node]
    moved = [t.to(device) for t in states]
    rings = [torch.randn(3, 1, places, 6, generator=generator).to(dtype) for places in (9, 12)]
    for ring in rings:
        after = ring.clone()
        for b, nodes in enumerate(path.tolist()):
            for depth, node in enumerate(n for n in nodes if n >= 0):
                old, new = (int(lengths[b] + 1 + i) % ring.shape[2] for i in (node, depth))
                after[b, :, new] = ring[b, :, old]
        expected.append(after)
        moved.append(ring.to(device))
    Compaction(moved)(lengths.to(device), path.to(device))
    for after, want in zip(moved, expected, strict=True):
        assert torch.equal(after.cpu(), want)


# ---- attention of our own, and models that cannot


@pytest.mark.parametrize("case", (pytest.param("llama", marks=pytest.mark.nightly), "gemma3_text"))
def test_flex_attention_sees_the_same(case, monkeypatch):
    """Block by block, as a kernel does; a tree of more queries than the decoding kernel takes gets a mask."""
    calls = []

    def counted(query, *args, **kwargs):
        calls.append(query.shape[2])
        return by_blocks(query, *args, **kwargs)

    monkeypatch.setattr(attention, "_compiled", lambda: counted)
    model = model_of(case)
    assert_paths(CachedModel(model, attention="flex"))
    assert set(calls) == {17}
    calls.clear()
    monkeypatch.setattr("specdec.models.forward.step_attention.MAX_QUERIES", 16)
    assert_paths(CachedModel(model, attention="flex"), steps=(BROAD,))
    assert not calls


@pytest.mark.parametrize("case", NO_TREES)
def test_models_that_take_no_tree(case):
    """Their positions are those of the slots: a chain is right, and siblings are not."""
    cached = cached_model(model_of(case), "target")
    assert why_no_trees(cached) == NO_TREES[case]
    if case == "mpt":
        assert_paths(cached, steps=((CHAIN,) * 4,))
        with pytest.raises(AssertionError, match="not close"):
            assert_paths(cached)


def test_unknown_types_are_fed_a_tree_first(monkeypatch):
    monkeypatch.setattr(supported, "KNOWN_MODEL_TYPES", frozenset())
    for case in ("llama", "mistral", "gpt_oss", "kimi_linear"):
        assert why_no_trees(CachedModel(model_of(case))) is None
    with monkeypatch.context() as patch:  # accepted nodes whose inputs stay where they are
        patch.setattr(RecurrentLayer, "windows", lambda self: [])
        assert "cannot be fed a tree: its logits differ" in (why_no_trees(CachedModel(model_of("kimi_linear"))) or "")
    cached = CachedModel(model_of("mpt"))
    assert why_no_trees(cached) == NO_TREES["mpt"]
    cached.lacks_trees = None
    assert "cannot be fed a tree: its logits differ from a full forward by up to" in (why_no_trees(cached) or "")
