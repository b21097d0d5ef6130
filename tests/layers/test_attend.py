"""Attention over the slots that each query sees: softmax in float64, and bits that depend on nothing else."""

from __future__ import annotations

import pytest
import torch
from specdec_layers import attend
from specdec_layers.backends.reference_attend import mask_of
from specdec_layers.ops import handle

# Heads, heads of keys, numbers of keys and of values.
SHAPES = (
    (1, 1, 64, 64),
    (4, 2, 32, 32),
    (9, 3, 64, 64),
    (2, 2, 5, 3),
    (8, 1, 256, 256),
    (4, 4, 80, 72),
    (6, 3, 96, 17),
)


def numbers(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def inputs(shape: tuple[int, int, int, int], rows: int = 2, queries: int = 5, slots: int = 70) -> list[torch.Tensor]:
    heads, key_heads, size, value_size = shape
    q = numbers(rows, heads, queries, size, seed=1) * 2
    return [q, numbers(rows, key_heads, slots, size, seed=2), numbers(rows, key_heads, slots, value_size, seed=3)]


def seen_by(rows: int, queries: int, slots: int, path: int = 3) -> torch.Tensor:
    """Ranges and paths of all kinds; some of them empty."""
    generator = torch.Generator().manual_seed(4)
    first = torch.randint(0, slots // 2, (rows, queries, 1), generator=generator) * (torch.arange(queries) % 2)[:, None]
    end = first + torch.randint(0, slots // 2 - path, (rows, queries, 1), generator=generator)
    nodes = end + torch.arange(path) * 2 + torch.randint(0, 2, (rows, queries, path), generator=generator)
    nodes = torch.where(torch.rand(rows, queries, path, generator=generator) < 0.6, nodes, -1)
    seen = torch.cat((first, end, nodes), 2)
    seen[0, 0] = torch.tensor([0, 0, *[-1] * path])  # none
    seen[0, 1] = torch.tensor([0, 1, *[-1] * path])  # one
    seen[-1, -1] = torch.tensor([0, slots, *[-1] * path])  # all
    return seen


def expected(q, k, v, seen, scale, softcap=None, sinks=None) -> torch.Tensor:
    group = q.shape[1] // k.shape[1]
    q, k, v = q.double(), (k.double().repeat_interleave(group, 1)), v.double().repeat_interleave(group, 1)
    scores = q @ k.transpose(2, 3) * scale
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    mask = mask_of(seen, k.shape[2])[:, None]
    scores = torch.where(mask, scores, float("-inf"))
    sink = torch.full((q.shape[1],), float("-inf")) if sinks is None else sinks
    scores = torch.cat((scores, sink.double().view(-1, 1, 1).expand(len(q), -1, q.shape[2], 1)), -1)
    return torch.where(mask.any(-1, keepdim=True), scores.softmax(-1)[..., :-1] @ v, 0).transpose(1, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_attention(instruction_set, shape, dtype):
    q, k, v = inputs(shape)
    k, v = k.to(dtype), v.to(dtype)
    seen = seen_by(2, 5, 70)
    for scale in (None, 0.3):
        out = attend(q, k, v, seen, scale=scale)
        exact = expected(q, k, v, seen, shape[2] ** -0.5 if scale is None else scale)
        assert (out - exact).abs().max() <= 1e-5 and (out[0, 0] == 0).all()


@pytest.mark.parametrize("shape", SHAPES[1:4])
def test_soft_caps_and_sinks(instruction_set, shape):
    q, k, v = inputs(shape)
    seen, sinks = seen_by(2, 5, 70), numbers(shape[0], seed=9) * 3
    for more in ({"softcap": 5.0}, {"sinks": sinks}, {"softcap": 1.5, "sinks": sinks}, {"sinks": sinks + 60}):
        out = attend(q, k, v, seen, **more)
        assert (out - expected(q, k, v, seen, shape[2] ** -0.5, **more)).abs().max() <= 1e-5
        alone = torch.cat([attend(q[:, :, i : i + 1], k, v, seen[:, i : i + 1], **more) for i in range(5)], 1)
        assert torch.equal(out, alone) and (out[0, 0] == 0).all()
    assert attend(q * 1e6, k, v, seen, softcap=1.5).isfinite().all()
    with pytest.raises(ValueError, match="softcap: got -1.0, allowed: > 0, or None"):
        attend(q, k, v, seen, softcap=-1.0)
    with pytest.raises(RuntimeError, match="sinks has a wrong shape"):
        attend(q, k, v, seen, sinks=sinks[:1])


@pytest.mark.parametrize("shape", SHAPES)
def test_a_query_does_not_depend_on_the_others(instruction_set, shape):
    """Nor on how many slots there are, on the dtype of what bfloat16 has, or on the number of threads."""
    q, k, v = inputs(shape)
    k, v, seen = k.bfloat16().float(), v.bfloat16().float(), seen_by(2, 5, 70)
    alone = torch.cat([attend(q[:, :, i : i + 1], k, v, seen[:, i : i + 1]) for i in range(5)], 1)
    for queries in range(1, 6):
        assert torch.equal(attend(q[:, :, :queries], k, v, seen[:, :queries]), alone[:, :queries])
    assert torch.equal(attend(q[1:], k[1:], v[1:], seen[1:]), alone[1:])
    assert torch.equal(attend(q, k.bfloat16(), v.bfloat16(), seen), alone)
    more = [torch.cat((x, torch.full_like(x, float("nan"))), 2) for x in (k, v)]
    assert torch.equal(attend(q, *more, seen), alone)
    if shape[0] > shape[1]:  # heads of a group beside each other, and each by itself
        heads = q.view(2, shape[1], -1, 5, shape[2])[:, :, 0]
        group = shape[0] // shape[1]
        assert torch.equal(attend(heads, k, v, seen), alone.view(2, 5, shape[1], group, -1)[:, :, :, 0])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        assert torch.equal(attend(q, k, v, seen), alone)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_path_is_a_range(instruction_set, shape):
    """Wherever its slots are."""
    q, k, v = inputs(shape, rows=1, queries=3)
    seen = torch.tensor([[[0, 40, -1, -1, -1], [0, 43, -1, -1, -1], [7, 42, -1, -1, -1]]])
    chain = attend(q, k, v, seen)
    places = torch.tensor([50, 57, 63])
    for x in (k, v):
        x[:, :, places] = x[:, :, 40:43].clone()
        x[:, :, 40:50] = float("nan")
    path = torch.tensor([[[0, 40, -1, -1, -1], [0, 40, 50, 57, 63], [7, 40, 50, -1, 57]]])
    assert torch.equal(attend(q, k, v, path), chain)


def test_a_fault_stays_where_it_is_seen(instruction_set):
    q, k, v = inputs((4, 2, 32, 32), rows=1)
    seen = torch.tensor([[[0, i + 1] for i in range(5)]])
    good = attend(q, k, v, seen)
    k[0, 1, 3], v[0, 0, 4] = float("nan"), float("inf")
    out = attend(q, k, v, seen)
    assert torch.equal(out[:, :3], good[:, :3]) and torch.equal(out[0, 3, :2], good[0, 3, :2])
    assert out[0, 3:, 2:].isnan().all() and (out[0, 4, :2] == float("inf")).all()


def test_large_scores(instruction_set):
    q, k, v = inputs((2, 2, 16, 16), rows=1, queries=1)
    seen = torch.tensor([[[0, 70]]])
    out = attend(q * 1e4, k, v, seen)
    torch.testing.assert_close(out, expected(q * 1e4, k, v, seen, 0.25).float(), atol=1e-5, rtol=1e-5)
    assert torch.equal(attend(q * 0, k, v * 0 + 3, seen), torch.full((1, 1, 2, 16), 3.0))


def test_tensors_of_any_strides():
    q, k, v = inputs((6, 3, 24, 24))
    seen = seen_by(2, 5, 70)
    out = attend(q, k, v, seen)
    assert torch.equal(attend(q.transpose(1, 2).contiguous().transpose(1, 2), k, v, seen), out)
    wide = [torch.cat((x, x), 2)[:, :, :70] for x in (k, v)]
    assert torch.equal(attend(q, *wide, seen), out)
    assert torch.equal(attend(q.transpose(2, 3).contiguous().transpose(2, 3), k, v, seen), out)


def test_other_dtypes_are_pytorchs():
    q, k, v = inputs((4, 2, 32, 32))
    seen = seen_by(2, 5, 70)
    for dtype, bound in ((torch.float64, 1e-12), (torch.bfloat16, 0.05)):
        out = attend(*(x.to(dtype) for x in (q, k, v)), seen)
        rounded = [x.to(dtype).double() for x in (q, k, v)]
        assert out.dtype == dtype and (out.double() - expected(*rounded, seen, 32**-0.5)).abs().max() < bound
        more = {"softcap": 2.0, "sinks": torch.tensor([1.0, -2.0, 0.0, 3.0], dtype=dtype)}
        out = attend(*(x.to(dtype) for x in (q, k, v)), seen, **more)
        assert (out.double() - expected(*rounded, seen, 32**-0.5, **more)).abs().max() < bound


def test_nothing_to_compute():
    q, k, v = inputs((4, 2, 8, 8))
    assert attend(q[:0], k[:0], v[:0], seen_by(2, 5, 70)[:0]).shape == (0, 5, 4, 8)
    assert attend(q[:, :, :0], k, v, seen_by(2, 5, 70)[:, :0]).shape == (2, 0, 4, 8)


def test_slots_that_are_not_there_are_not_read():
    q, k, v = inputs((4, 2, 8, 8))
    seen = torch.tensor([[[-5, 1 << 40, 70, 1 << 40]] * 5] * 2)
    assert torch.equal(attend(q, k, v, seen), attend(q, k, v, torch.tensor([[[0, 70]] * 5] * 2)))


@pytest.mark.parametrize("name", ["q", "k", "v", "seen"])
def test_wrong_tensors_are_refused(name):
    given = dict(zip("qkv", inputs((4, 2, 8, 8)), strict=True)) | {"seen": seen_by(2, 5, 70)}
    with pytest.raises(RuntimeError, match="specdec_layers: .* a wrong shape"):
        attend(**{**given, name: given[name][:1]})
    with pytest.raises(RuntimeError, match="specdec_layers: .* wrong shape|do not divide"):
        attend(**{**given, name: given[name][:, :1]} if name != "k" else {**given, "k": given["k"][..., :4]})


def test_its_schema():
    arguments = (*inputs((4, 2, 8, 8)), seen_by(2, 5, 70), 0.5, 0.0, None)
    torch.library.opcheck(handle("attend"), arguments, test_utils=("test_schema", "test_faketensor"))
