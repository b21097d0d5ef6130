"""What queries see: mask and flex attention against an oracle, the blocks that are read, and no wait for the device."""

from __future__ import annotations

import pytest
import torch
from specdec.models.cache.tree import Tree
from specdec.models.forward import attention
from specdec.models.forward.attention import BLOCK, Queries, attend, block_mask, dense_mask
from support.attending import CASES, HUGE, by_blocks, oracle, random_case, read_slots
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import flex_attention as torch_flex
from torch.utils._python_dispatch import TorchDispatchMode


@pytest.fixture(autouse=True)
def _inference():
    with torch.inference_mode():
        yield


def by_mask(query, key, value, queries, scale=None, softcap=None):
    """As a model's own sdpa does."""
    seen = dense_mask(queries, torch.arange(key.shape[2]))
    return torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=seen, scale=scale, enable_gqa=query.shape[1] != key.shape[1]
    )


def by_flex(query, key, value, queries, scale=None, softcap=None):
    return attend(query, key, value, block_mask(queries, key.shape[2]), scale=scale, softcap=softcap)


@pytest.fixture
def blocks(monkeypatch):
    monkeypatch.setattr(attention, "_compiled", lambda: by_blocks)


@pytest.fixture
def eager(monkeypatch):
    """torch's flex attention without a compiler: it computes all scores and then asks the rule."""
    monkeypatch.setattr(torch_flex, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    monkeypatch.setattr(attention, "_compiled", lambda: torch_flex.flex_attention)


def assert_right(compute, case, **scores) -> None:
    got = compute(*case, **scores)
    assert got.dtype == case.query.dtype and got.isfinite().all()
    torch.testing.assert_close(got.double(), oracle(*case, **scores), atol=2e-6, rtol=2e-5)


@pytest.mark.parametrize("name", CASES)
def test_mask_and_rule_against_the_oracle(name, eager):
    """They read every slot, so none may hold NaN."""
    lengths, q, options = CASES[name]
    case = random_case(lengths, q, **options)
    case = case._replace(key=case.key.nan_to_num(HUGE), value=case.value.nan_to_num(HUGE))
    assert_right(by_mask, case)
    assert_right(by_flex, case)


@pytest.mark.parametrize("name", CASES)
def test_blocks_against_the_oracle(name, blocks):
    """What lies in a block that is not read is NaN."""
    lengths, q, options = CASES[name]
    case = random_case(lengths, q, **options)
    assert_right(by_flex, case)
    assert case.key.isnan().any() == (case.key.shape[2] > BLOCK)


@pytest.mark.parametrize("q", range(1, 10))
def test_scale_and_softcap(q, blocks):
    case = random_case((3, 140), q, seed=q)
    assert_right(by_flex, case, scale=0.3)
    assert_right(by_flex, case, scale=0.3, softcap=1.5)
    assert (oracle(*case, scale=0.3) - oracle(*case, scale=0.3, softcap=1.5)).abs().max() > 1e-2


# ---- What is read


def test_no_more_than_the_filled_blocks_are_read():
    """8192 slots, 0 to 600 and more filled: what K+1 = 5 queries read, within 10 % or one block."""
    filled = torch.tensor([1, 5, 128, 129, 600, 1281, 4000, 8192])
    queries = Queries(filled[:, None] - 5 + torch.arange(5) + 0 * filled[:, None])
    queries = Queries(queries.positions.clamp(min=0))
    mask = block_mask(queries, 8192)
    read = mask.kv_num_blocks[:, 0, 0] * BLOCK
    assert read.tolist() == [128, 128, 128, 256, 640, 1408, 4096, 8192]
    assert ((read - filled < BLOCK) & (read >= filled)).all() and 640 <= 1.1 * 600
    for b, length in enumerate(filled.tolist()):
        assert read_slots(mask, 8192, b) == list(range(-(-length // BLOCK) * BLOCK))


def test_a_window_reads_its_own_blocks():
    positions = torch.tensor([[600, 601, 602], [600, 0, 0], [0, 0, 0], [5, 6, 7], [8189, 8190, 8191]])
    mask = block_mask(Queries(positions, 100), 8192)
    read = [sorted({s // BLOCK for s in read_slots(mask, 8192, b)}) for b in range(5)]
    assert read == [[3, 4], [0, 3, 4], [0], [0], [63]]
    assert mask.kv_indices.min() >= 0 and mask.kv_indices.max() <= 63  # also where nothing counts them


class NoWait(TorchDispatchMode):
    """Refuses what waits for a GPU: operations whose shape or Python value depends on numbers there, and copies."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.overloadpacket.__name__
        waits = name in ("_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2")
        by_bools = name == "index" and any(t is not None and t.dtype == torch.bool for t in args[1])
        assert not waits and not by_bools, name
        assert name != "_to_copy" or (kwargs or {}).get("device") is None, "a copy to another device"
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ("nine, groups of eight", "a window and padding", "four trees", "a tree's last level"))
@torch.inference_mode(False)  # which hides from a mode what operations are made of
def test_nothing_waits_for_the_device(name):
    lengths, q, options = CASES[name]
    queries = random_case(lengths, q, poison=None, **options).queries
    slots = torch.arange(300)
    with NoWait():
        block_mask(queries, 300)
        dense_mask(queries, slots)
        for waits in (int, lambda p: p[p > 0], lambda p: bool((p > 0).all()), lambda p: p.to("meta")):
            with pytest.raises(AssertionError):
                waits(queries.positions[:1, :1])
    with FakeTensorMode() as mode:  # tensors without values: nothing could be read
        tree = (
            None
            if queries.tree is None
            else Tree(*(part if part is None else mode.from_tensor(part) for part in queries.tree))
        )
        unknown = Queries(mode.from_tensor(queries.positions), queries.window, tree)
        assert block_mask(unknown, 300).kv_num_blocks.shape == (len(lengths), 1, 1)
        assert dense_mask(unknown, mode.from_tensor(slots)).shape == (len(lengths), 1, q, 300)


def test_shapes_depend_on_no_length(blocks):
    """What a compiled kernel is made for: the same for all lengths, so none is compiled for a second one."""

    def shapes(lengths):
        queries = random_case(lengths, 3, capacity=1000, window=9, padding=1, poison=None).queries
        mask = block_mask(queries, 1000)
        return [(t.shape, t.stride(), t.dtype) for t in (mask.kv_num_blocks, mask.kv_indices)]

    assert shapes((-1, 5, 900)) == shapes((500, 0, 0))


# ---- Compiled


def test_the_tile_of_the_kernel():
    """Tiles that the mask's 128 queries are a multiple of, for all K+1 and groups; and registers for them."""
    for q in range(1, attention.MAX_QUERIES + 1):
        for group in (1, 2, 4, 8, 16):
            options = attention._kernel_options(q * group)
            tile, warps = options["BLOCK_M"], options["num_warps"]
            assert BLOCK % tile == 0 and tile % group == 0 and tile >= 16
            assert tile == BLOCK or tile >= q * group
            assert (warps, tile) in ((2, 16), (2, 32), (4, 64), (8, 128))


@pytest.mark.nightly
@pytest.mark.parametrize("name", CASES)
def test_compiled_for_a_cpu(name):
    lengths, q, options = CASES[name]
    assert_right(by_flex, random_case(lengths, q, **options))


@pytest.mark.nightly
def test_one_kernel_for_all_lengths():
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seed, lengths in enumerate(((5, 200), (290, 0), (-1, 150))):
            for options in ({}, {"window": 9}):
                torch._dynamo.config.error_on_recompile = seed > 0
                assert_right(by_flex, random_case(lengths, 3, seed=seed, **options))


def test_unusual_attention_is_refused():
    module, tensor = torch.nn.Module(), torch.zeros(1, 2, 1, 8)
    mask = block_mask(Queries(torch.zeros(1, 1, dtype=torch.int64)), 1)
    for unusual in ({"position_bias": tensor}, {"dropout": 0.1}):
        with pytest.raises(ValueError, match="attention: got flex for Module with"):
            attention._flex(module, tensor, tensor, tensor, mask, **unusual)
        with pytest.raises(ValueError, match="attention: got native for Module with"):
            attention._native(module, tensor, tensor, tensor, None, **unusual)
    with pytest.raises(ValueError, match="attention: got flex for Module with s_aux"):
        attention._flex(module, tensor, tensor, tensor, mask, s_aux=tensor)
