"""A step's attention over a static cache, with the rotation and the storing of new keys: softmax in float64, keys as
transformers rotates them, and bits that depend neither on the number of tokens nor on rows."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
from specdec_layers import bytes_beside_caches, store_and_attend
from specdec_layers.backends.reference_attend import mask_of
from specdec_layers.backends.triton import attend
from specdec_layers.ops import handle

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# Triton's interpreter cannot multiply matrices of bfloat16.
DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if DEVICE == "cuda" else [])]
BOUNDS = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
BACKENDS = ("triton", "reference")


class Case(NamedTuple):
    """What a step feeds. ``given`` are the operation's tensors, ``keys`` and ``values`` those before it."""

    given: dict[str, torch.Tensor | None]
    keys: torch.Tensor
    values: torch.Tensor
    more: dict

    def run(self, backend: str = "triton", **changed) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(the result, all keys and all values afterwards)."""
        keys, values = (
            changed.pop(name, own).clone().to(DEVICE) for name, own in (("keys", self.keys), ("values", self.values))
        )
        given = {**self.given, **self.more, **changed}
        angles = given.pop("cos"), given.pop("sin")
        given = {name: x.to(DEVICE) if isinstance(x, torch.Tensor) else x for name, x in given.items()}
        turned = None if angles[0] is None else tuple(x.to(DEVICE) for x in angles)
        y = store_and_attend(keys=keys, values=values, angles=turned, backend=backend, **given)
        return y.cpu(), keys.cpu(), values.cpu()

    def tokens(self, first: int, count: int) -> Case:
        """The same with so many of its tokens."""
        part = slice(first, first + count)
        cut = {name: None if x is None else x[:, :, part] for name, x in self.given.items() if name in "qkv"}
        rest = {n: None if x is None else x[:, part] for n, x in self.given.items() if n not in "qkv" and n != "sinks"}
        return self._replace(given={**cut, **rest, "sinks": self.given["sinks"]})

    def rows(self, *rows: int) -> Case:
        given = {name: x if x is None or name == "sinks" else x[list(rows)] for name, x in self.given.items()}
        return Case(given, self.keys[list(rows)], self.values[list(rows)], self.more)


def numbers(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def case(
    lengths: tuple[int, ...] = (3, 150),
    tokens: int = 3,
    heads: tuple[int, int] = (4, 2),
    size: int = 16,
    value_size: int | None = None,
    capacity: int = 200,
    dtype: torch.dtype = torch.float32,
    window: int | None = None,
    sinks: bool = False,
    angles: str = "whole",
    tree: tuple[int, ...] | None = None,
    **more,
) -> Case:
    """A row for each of the ``lengths``, whose tokens follow, or are the first of a ``tree`` of these parents."""
    rows, value_size = len(lengths), size if value_size is None else value_size
    product = numbers(rows, tokens, (heads[0] + heads[1]) * size + heads[1] * value_size, seed=1).to(dtype)
    q, k, v = (
        part.unflatten(2, (-1, width)).transpose(1, 2)
        for part, width in zip(
            product.split([heads[0] * size, heads[1] * size, heads[1] * value_size], 2),
            (size, size, value_size),
            strict=True,
        )
    )
    first = torch.tensor(lengths)[:, None]
    slots = first + torch.arange(tokens)
    depths = torch.arange(tokens)
    paths = None
    if tree is not None:
        depths, paths = torch.zeros(tokens, dtype=torch.int64), torch.full((tokens, len(tree)), -1)
        for i, parent in enumerate(tree[: tokens - 1], 1):
            depths[i] = depths[parent] + 1
            paths[i] = paths[parent]
            paths[i, depths[parent]] = i
    positions = first + depths
    lowest = torch.zeros_like(positions) if window is None else (positions - window + 1).clamp(min=0)
    if paths is None:
        seen = torch.stack((lowest, positions + 1), -1)
    else:
        of_tree = torch.where(
            (paths >= 0) & (first[..., None] + paths >= lowest[..., None]), first[..., None] + paths, -1
        )
        seen = torch.cat((lowest[..., None], (first + 1).expand(-1, tokens)[..., None], of_tree), -1)
    angle = numbers(1, tokens, size // 2, seed=4) + positions[..., None] * 0.3
    angle = torch.cat((angle, angle), -1) if angles == "whole" else angle
    cos, sin = (None, None) if angles == "none" else (angle.cos().to(dtype), angle.sin().to(dtype))
    given = {"q": q, "k": k, "v": v, "slots": slots, "seen": seen, "cos": cos, "sin": sin}
    sink = numbers(heads[0], seed=5).to(dtype) if sinks else None
    stored = (numbers(rows, heads[1], capacity, n, seed=s).to(dtype) for n, s in ((size, 2), (value_size, 3)))
    return Case({**given, "sinks": sink}, *stored, more)


def turned(x: torch.Tensor, cos: torch.Tensor | None, sin: torch.Tensor | None) -> torch.Tensor:
    """As transformers' modules do it, in their dtype."""
    if cos is None or sin is None:
        return x
    cos, sin = (a if a.shape[-1] == x.shape[-1] else torch.cat((a, a), -1) for a in (cos, sin))
    a, b = x.chunk(2, -1)
    return x * cos[:, None] + torch.cat((-b, a), -1) * sin[:, None]


def expected(of: Case) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """In float64, by another formulation than the reference's; keys and values are stored in their own dtype."""
    given, keys, values = of.given, of.keys.clone(), of.values.clone()
    q = turned(given["q"], given["cos"], given["sin"])
    if given["k"] is not None:
        for b, slots in enumerate(given["slots"].tolist()):
            for i, slot in enumerate(slots):
                keys[b, :, slot] = turned(given["k"], given["cos"], given["sin"])[b, :, i]
                values[b, :, slot] = given["v"][b, :, i]
    group = q.shape[1] // keys.shape[1]
    wide = [x.double().repeat_interleave(n, 1) for x, n in ((q, 1), (keys, group), (values, group))]
    scores = torch.einsum("bhtd,bhsd->bhts", wide[0], wide[1]) * of.more.get("scale", q.shape[-1] ** -0.5)
    if cap := of.more.get("softcap"):
        scores = cap * torch.tanh(scores / cap)
    weights = torch.where(mask_of(given["seen"], keys.shape[2])[:, None], scores.exp(), 0)
    total = weights.sum(-1, keepdim=True)
    if given["sinks"] is not None:
        total = total + given["sinks"].double().exp()[None, :, None, None]
    y = torch.einsum("bhts,bhsd->bthd", weights / total.clamp(min=1e-300), wide[2])
    return y, keys, values


def assert_right(of: Case, backend: str) -> None:
    (y, keys, values), (exact, its_keys, its_values) = of.run(backend), expected(of)
    dtype = of.keys.dtype
    assert y.dtype == dtype and (y - exact).abs().max() <= BOUNDS[dtype] * max(exact.abs().max(), 1)
    # Of float32, PyTorch's own compiler may round a product and a sum at once.
    assert torch.equal(values, its_values)
    assert torch.allclose(keys, its_keys, atol=1e-6) if dtype == torch.float32 else torch.equal(keys, its_keys)


CASES = {
    "a chain": {},
    "one token": {"tokens": 1},
    "eight tokens, one key head": {"tokens": 8, "heads": (4, 1)},
    "no groups": {"heads": (2, 2)},
    "groups of three": {"heads": (6, 2), "size": 24},
    "more heads than a program has": {"heads": (18, 2), "tokens": 2},
    "wide heads": {"heads": (4, 1), "size": 192, "value_size": 320, "tokens": 8, "lengths": (90,)},
    "odd heads": {"size": 7, "value_size": 5, "angles": "none"},
    "a window": {"window": 40},
    "a window of one": {"window": 1},
    "soft caps": {"softcap": 1.5, "scale": 2.0},
    "sinks, angles of half a head": {"sinks": True, "angles": "half", "window": 9},
    "ranges of many sizes": {"lengths": (127, 128, 1023, 2300), "capacity": 2310, "heads": (2, 1), "tokens": 2},
    "a window over ranges": {"lengths": (2300,), "capacity": 2310, "heads": (2, 1), "tokens": 4, "window": 1200},
    "a tree": {"tokens": 7, "tree": (0, 0, 1, 3, 2, 3)},
    "a tree in a window": {"tokens": 7, "tree": (0, 0, 1, 3, 2, 3), "window": 3, "lengths": (3, 125)},
    "a part of a tree": {"tokens": 4, "tree": (0, 0, 1, 1, 1, 1, 1, 1, 1)},
}  # fmt: skip


# Of every part of the kernel one; the interpreter runs most of the others nightly.
SMALL = {
    "a chain": {"lengths": (3, 126)},
    "a window": {"lengths": (3, 126), "window": 3},
    "a tree": {"lengths": (126,), "tokens": 5, "tree": (0, 0, 1, 3)},
    "sinks": {"lengths": (9,), "sinks": True, "angles": "half"},
}


@pytest.mark.parametrize("name", SMALL)
def test_small_cases(name):
    assert_right(case(**{"heads": (2, 1), "tokens": 3, "capacity": 140, **SMALL[name]}), "triton")


@pytest.mark.skipif(DEVICE == "cuda", reason="there the order is the device's")
def test_workers_in_another_order(monkeypatch):
    """A worker reads no key that another one stores, and the one that ends last adds the parts, whichever it is."""
    from triton.runtime import interpreter

    of = case(lengths=(125,), tokens=6, heads=(2, 1), capacity=140)
    expected, set_grid_idx = of.run(), interpreter.interpreter_builder.set_grid_idx
    monkeypatch.setattr(
        interpreter.interpreter_builder, "set_grid_idx", lambda x, y, z: set_grid_idx(x, y, 1 - z), raising=False
    )
    assert all(map(torch.equal, of.run(), expected))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASES)
def test_it_is_attention(name, backend, dtype):
    assert_right(case(**CASES[name], dtype=dtype), backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_stored_already(backend):
    """As of layers that read the keys of another one: q alone is turned."""
    of = case()
    given = {**of.given, "k": None, "v": None, "slots": None}
    y, keys, values = of._replace(given=given).run(backend)
    assert torch.equal(keys, of.keys) and torch.equal(values, of.values)
    exact, *_ = expected(of._replace(given=given))
    assert (y - exact).abs().max() < 2e-6


@pytest.mark.parametrize("backend", BACKENDS)
def test_keys_are_stored_narrower(backend):
    of = case(dtype=torch.float32)
    narrow = of._replace(keys=of.keys.half(), values=of.values.half())
    y, keys, values = narrow.run(backend)
    exact, its_keys, its_values = expected(narrow)
    assert torch.equal(values, its_values) and torch.allclose(keys.float(), its_keys.float(), atol=1e-3)
    assert (y - exact).abs().max() < 2e-3


@pytest.fixture
def products_by_row(monkeypatch):
    """A GPU's instruction computes every row of a tile alike. numpy's products do not: they depend on where it is."""
    from triton.runtime import interpreter

    def create_dot(self, a, b, d, *options):
        product = np.einsum("mk,kn->mn", a.data, b.data, dtype=d.data.dtype, optimize=False)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


FED = {
    "a chain": ({}, torch.float32),
    "of half precision": ({}, torch.float16),
    "a group of three": ({"heads": (3, 1), "window": 130}, torch.float32),
    "sinks": ({"sinks": True, "softcap": 2.0}, torch.float32),
}


@pytest.mark.parametrize("name", FED)
def test_bits_do_not_depend_on_how_tokens_are_fed(products_by_row, name):
    """One by one or together, whichever come before them; beside which rows, and in how many slots."""
    shape, dtype = FED[name]
    of = case(**{"tokens": 8, "lengths": (3, 125), "capacity": 140, "heads": (2, 1), "dtype": dtype, **shape})
    together, keys, values = of.run()
    alone, own = [], of
    for i in range(8):
        y, its_keys, its_values = own.tokens(i, 1).run()
        own = own._replace(keys=its_keys, values=its_values)
        alone.append(y)
    assert torch.equal(torch.cat(alone, 1), together)
    assert torch.equal(own.keys, keys) and torch.equal(own.values, values)
    for count in (3, 7):
        assert torch.equal(of.tokens(0, count).run()[0], together[:, :count])
    assert torch.equal(of.rows(1).run()[0], together[1:])
    assert torch.equal(of.rows(1, 0, 1).run()[0], together[[1, 0, 1]])
    more = [torch.cat((x, x), 2) for x in (of.keys, of.values)]
    assert torch.equal(of._replace(keys=more[0], values=more[1]).run()[0], together)


def test_bits_do_not_depend_on_the_workers(monkeypatch):
    from specdec_layers.backends.triton import attend

    of = case(tokens=2, lengths=(3, 700), capacity=710, heads=(2, 1))
    monkeypatch.setattr(attend, "_LEAST_WORKERS", 1)
    found = []
    for workers in (1, 4, 100):
        monkeypatch.setattr(attend, "_WORKERS", workers)
        found.append(of.run())
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


def test_the_counter_is_zero_again():
    of, counter = case(lengths=(3, 700), capacity=710), torch.zeros(9, dtype=torch.int32, device=DEVICE)
    first, *_ = of.run(counter=counter)
    assert not counter.any()
    assert torch.equal(of.run(counter=counter)[0], first) and not counter.any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_and_what_sees_nothing(backend):
    """Padding is stored in a slot that no query sees, which may be in another range; what sees nothing is 0."""
    of = case(lengths=(3, 20), capacity=400, tokens=3, sinks=True)
    slots, seen = of.given["slots"].clone(), of.given["seen"].clone()
    slots[0, 1:], seen[0, 1:] = 399, torch.tensor([0, 1])
    seen[1, 2] = torch.tensor([5, 5])
    for sinks in (None, of.given["sinks"]):
        changed = of._replace(given={**of.given, "slots": slots, "seen": seen, "sinks": sinks})
        (y, keys, _), (exact, its_keys, _) = changed.run(backend), expected(changed)
        assert (y - exact).abs().max() < 2e-6 and (y[1, 2] == 0).all()
        assert torch.allclose(keys[:, :, :399], its_keys[:, :, :399], atol=1e-6)
    assert (keys[0, :, 399] != of.keys[0, :, 399]).any()


def test_only_what_is_seen_is_read():
    of = case(lengths=(150, 300), capacity=400, window=30, tokens=2)
    good, *_ = of.run()
    for x in (of.keys, of.values):
        for b, (low, end) in enumerate(((121, 152), (271, 302))):
            x[b, :, :low], x[b, :, end:] = float("nan"), float("nan")
    assert torch.equal(of.run()[0], good)
    of.keys[0, 1, 140] = float("nan")  # which is seen
    y, *_ = of.run()
    assert y[0, :, 2:].isnan().all() and torch.equal(y[0, :, :2], good[0, :, :2]) and torch.equal(y[1], good[1])


def test_tensors_of_any_strides():
    of = case(tokens=4)
    y, keys, values = of.run()
    for change in (lambda x: x.contiguous(), lambda x: x.transpose(2, 3).contiguous().transpose(2, 3)):
        given = {n: change(x) if n in "qkv" else x for n, x in of.given.items()}
        assert all(map(torch.equal, of._replace(given=given).run(), (y, keys, values)))
    one = of.given["cos"][:1], of.given["sin"][:1]
    all_rows = [x.expand(2, -1, -1) for x in one]
    found = [of.run(cos=cos, sin=sin)[0] for cos, sin in (one, all_rows)]
    assert torch.equal(*found)


@pytest.mark.parametrize("backend", BACKENDS)
def test_ranges_that_begin_before_the_first_slot(backend):
    """And paths with gaps, which tell no more."""
    of = case(tree=(-1, 0, 0, 1))
    seen = of.given["seen"].clone()
    seen[..., 0] = torch.where(seen[..., 0] == 0, -(2**31) + 5, seen[..., 0])
    assert (seen[..., 0] < 0).any()
    wider = torch.cat((seen[..., :2], torch.full_like(seen[..., :1], -1), seen[..., 2:]), -1)
    for own, other in zip(of.run(backend), of.run(backend, seen=wider), strict=True):
        assert torch.equal(own, other)


class Launched:
    """Stands for the kernel, and keeps what it is given."""

    def __getitem__(self, grid):
        return lambda *given, **more: vars(self).update(given=given)


def test_what_it_takes_beside_the_caches(monkeypatch):
    """The parts of a launch, and their sums."""
    wide = case(tokens=8, heads=(24, 2), size=32, value_size=64, capacity=3000, dtype=torch.float16)
    for of in (case(), wide):
        monkeypatch.setattr(attend, "attend_kernel", launched := Launched())
        of.run()
        (rows, heads, tokens, _), (_, key_heads, slots, value_size) = of.given["q"].shape, of.values.shape
        sizes = rows, tokens, key_heads, heads // key_heads, slots, value_size
        parts = [x for x in launched.given if isinstance(x, torch.Tensor) and x.dim() == 5]
        assert len(parts) == 2 and sum(x.nbytes for x in parts) == bytes_beside_caches(*sizes, of.given["q"].dtype)


def test_nothing_to_compute():
    of = case()
    assert of.rows().run()[0].shape == (0, 3, 4, 16) and of.tokens(0, 0).run()[0].shape == (2, 0, 4, 16)


def test_large_scores():
    of = case(scale=1e4)
    (y, *_), (given, keys, values) = of.run(), (of.given, *of.run("reference")[1:])
    k = keys.repeat_interleave(2, 1)
    scores = (turned(given["q"], given["cos"], given["sin"]) @ k.transpose(2, 3)).masked_fill(
        ~mask_of(given["seen"], 200)[:, None], float("-inf")
    )
    best = values.repeat_interleave(2, 1).gather(2, scores.argmax(-1, keepdim=True).expand(-1, -1, -1, 16))
    torch.testing.assert_close(y, best.transpose(1, 2), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"softcap": 0.0}, "softcap: got 0.0, allowed: > 0, or None"),
        ({"q": torch.zeros(2, 4, 3, 16, dtype=torch.float64)}, "q: got .*float64.*, allowed: .* of float32, bfloat16"),
        ({"q": torch.zeros(2, 3, 3, 16)}, "keys: got 2 heads, allowed: a divisor of the 3 of q"),
        ({"k": None, "v": None}, "slots: got a tensor, allowed: None where k is, and only there"),
        ({"k": None}, "v: got a tensor, allowed: None where k is, and only there"),
        ({"k": torch.zeros(2, 2, 2, 16)}, r"k: got \[2, 2, 2, 16\] of float32 .*, allowed: \[2, 2, 3, 16\] of float32"),
        ({"v": torch.zeros(2, 2, 3, 16).half()}, "v: got .* of float16"),
        ({"keys": torch.zeros(2, 2, 200, 8)}, r"keys: got .*, allowed: \[2, 2, 200, 16\]"),
        ({"values": torch.zeros(2, 2, 100, 16)}, r"values: got .*, allowed: \[2, 2, 200, 16\]"),
        ({"keys": torch.zeros(2, 2, 200, 16, dtype=torch.float64)}, "keys: got .*float64"),
        ({"slots": torch.zeros(2, 3, dtype=torch.int32)}, "slots: got .* of int32"),
        ({"seen": torch.zeros(2, 3, 1, dtype=torch.int64)}, "seen: got "),
        ({"cos": torch.zeros(2, 3, 12)}, r"angles, cos: got .*, allowed: \[2, 3, 16\]"),
        ({"sin": torch.zeros(2, 3, 8)}, r"angles, sin: got .*, allowed: \[2, 3, 16\]"),
        ({"sinks": torch.zeros(3)}, r"sinks: got .*, allowed: \[4\]"),
        ({"counter": torch.zeros(2, dtype=torch.int32)}, "counter: got .*, allowed: at least 8 of int32"),
    ],
)  # fmt: skip
def test_wrong_arguments_are_refused(changed, told):
    with pytest.raises(ValueError, match=told):
        case().run("reference", **changed)


def test_more_refusals():
    with pytest.raises(ValueError, match="q: got 9 tokens of a row, allowed: up to 8"):
        case(tokens=9).run()
    assert_right(case(tokens=9), "reference")
    of = case(size=7, angles="none")
    with pytest.raises(ValueError, match="angles, cos: .*none, as D is odd"):
        of.run(cos=torch.zeros(2, 3, 7), sin=torch.zeros(2, 3, 7))
    keys = torch.zeros(2, 200, 2, 16, device=DEVICE).transpose(1, 2)
    given = {n: None if x is None else x.to(DEVICE) for n, x in case().given.items() if n not in ("cos", "sin")}
    with pytest.raises(ValueError, match="keys: got strides .*, allowed: contiguous"):
        store_and_attend(keys=keys, values=keys, **given)


@pytest.mark.parametrize("backend", BACKENDS)
def test_its_schema(backend):
    of = case()
    given = of.given
    arguments = (
        *(given[n] for n in "qkv"),
        of.keys,
        of.values,
        given["slots"],
        given["seen"],
        given["cos"],
        given["sin"],
    )
    counter = torch.zeros(8, dtype=torch.int32)
    arguments = tuple(x.to(DEVICE) for x in arguments)
    more = (None, counter.to(DEVICE), 0.25, 0.0)
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(handle(f"store_and_attend_{backend}"), (*arguments, *more), test_utils=checks)
