"""The CUDA kernels of recurrent layers beside the reference: in every dtype, with sizes that fill tiles and sizes that
do not, over steps of ragged feeds. What a token gives in float32 is tested in tests/kernels/test_recurrent.py."""

from __future__ import annotations

import random

import pytest
import torch
from simt import kernels, recurrent_kernels
from support.recurrences import Convolution, Delta, Layer, Ssd

from specdec_kernels import Feed
from specdec_kernels.backends import reference_recurrent

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU the kernels themselves run")

PLACES = 12
LAYERS = {
    "convolution": lambda **s: Convolution(4, channels=200, **s),
    "convolution of 3": lambda **s: Convolution(4, channels=33, taps=3, **s),
    "convolution of 16": lambda **s: Convolution(4, channels=7, taps=16, silu=False, bias=False, **s),
    "convolution of 1": lambda **s: Convolution(4, channels=40, taps=1, silu=False, **s),
    "delta": lambda **s: Delta(4, heads=4, key_heads=2, dk=32, dv=40, **s),
    "delta of 128": lambda **s: Delta(4, heads=2, key_heads=1, dk=128, dv=16, **s),
    "delta of 256": lambda **s: Delta(4, heads=1, key_heads=1, dk=256, dv=8, by_channel=True, **s),
    "delta of odd sizes": lambda **s: Delta(4, heads=3, key_heads=3, dk=131, dv=11, normalize=False, **s),
    "mamba-1": lambda **s: Ssd(4, heads=70, size=1, groups=1, states=16, by_number=True, **s),
    "ssd of 64": lambda **s: Ssd(4, heads=4, size=12, groups=2, states=64, **s),
    "ssd of 128": lambda **s: Ssd(4, heads=2, size=20, groups=1, states=128, skip=False, **s),
    "ssd of 256": lambda **s: Ssd(4, heads=2, size=9, groups=2, states=256, **s),
    "ssd of odd sizes": lambda **s: Ssd(4, heads=3, size=5, groups=3, states=130, by_number=True, **s),
}
KINDS = pytest.mark.parametrize("kind", LAYERS)
DTYPES = pytest.mark.parametrize("dtype", kernels.DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


def feeds(seed: int) -> list[tuple]:
    """Arguments of ``Layer.feed``: a prompt; then steps of chains and trees of some rows, each of which begins behind
    what was accepted before, and commits all of it or a part."""
    chance, columns = random.Random(seed), 6
    most = [9, 3, 0, 1]  # how far a row was fed without a gap
    commits = [*most]
    found: list[tuple] = [({r: dict(enumerate(range(n))) for r, n in enumerate(most)}, {}, {}, 9, True, None, None)]
    for step in range(6):
        tree, fed = step % 2 == 1, {}
        parents = torch.tensor([[-1, *(chance.randrange(-1, c) for c in range(1, columns))] for _ in most])
        starts = [
            chance.randint(low, min(high, low + PLACES - columns)) for low, high in zip(commits, most, strict=True)
        ]
        for row, start in enumerate(starts):
            if chance.random() < 0.25:
                continue
            own: dict[int, int] = {}
            for c in range(columns):  # in a tree nothing follows what is no token
                if chance.random() < 0.8 and (not tree or parents[row, c] == -1 or int(parents[row, c]) in own):
                    own[c] = 100 * step + c
            if own:
                commits[row] = chance.randint(max(commits[row], start - 1), start)
                first_gap = next((c for c in range(columns) if c not in own), columns)
                most[row] = start + (first_gap if tree else len(own))
            fed[row] = own
        found.append(
            (fed, dict(enumerate(starts)), dict(enumerate(commits)), columns, False, None, parents if tree else None)
        )
    return found


def same_bits(mine: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(mine.nan_to_num(), other.nan_to_num()) and torch.equal(mine.isnan(), other.isnan())


def close(mine: torch.Tensor, other: torch.Tensor) -> bool:
    """But for what both have untouched, NaN."""
    bound = {torch.float32: 2e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}[mine.dtype]
    apart = (mine - other).abs().nan_to_num()
    return bool((apart <= bound * other.abs().nan_to_num().clamp(min=1.0)).all()) and torch.equal(
        mine.isnan(), other.isnan()
    )


def held(layer: Layer) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """(States that contain a token, what is to be equal to the last bit: windows and bases.)"""
    windows = layer.windows()
    if isinstance(layer, Convolution):
        return [], windows
    state, base = layer.held[0][:2]
    return [state[base > 0]], [*windows, base]


@KINDS
@DTYPES
def test_steps_are_those_of_the_reference(kind, dtype):
    mine, other = (LAYERS[kind](backend=b, dtype=dtype, window=PLACES) for b in ("cuda", "reference"))
    for fed, *how in feeds(len(kind)):
        got, want = mine.feed(fed, *how), other.feed(fed, *how)
        assert got.isfinite().all() and close(got, want)
        for a, b in zip(*(held(layer)[1] for layer in (mine, other)), strict=True):
            assert same_bits(a, b)
        for a, b in zip(*(held(layer)[0] for layer in (mine, other)), strict=True):
            assert close(a, b)


@pytest.mark.parametrize("kind", ["convolution", "delta", "mamba-1", "ssd of 128"])
def test_every_launch_gives_the_same_bits(kind, monkeypatch):
    """With one to four warps in a block, which are neighbouring tiles or leaves of a tree, several to a warp."""
    first = None
    for threads in (32, 64, 96, 128):
        monkeypatch.setattr(kernels, "_grids", iter([{"threads": threads}] * 20))
        layer = LAYERS[kind](backend="cuda", window=PLACES)
        results = [layer.feed(fed, *how) for fed, *how in feeds(1)]
        results += [t.clone() for group in held(layer) for t in group]
        first = first or results
        assert all(map(same_bits, results, first)), threads


@pytest.mark.parametrize("kind", ["convolution", "delta", "ssd of 64"])
def test_a_tree_that_is_a_chain(kind):
    """Gives the chain's results and leaves behind what it does, to the last bit."""
    outs = []
    for parents in (None, torch.arange(-1, 5).expand(4, 6)):
        layer = LAYERS[kind](backend="cuda", window=PLACES)
        layer.feed({0: dict(enumerate(range(8)))}, {}, {}, 8)
        outs.append([layer.feed({0: {c: c for c in range(6)}}, {0: 5}, {0: 4}, 6, parents=parents)])
        outs[-1] += [t.clone() for group in held(layer) for t in group]
    assert all(map(same_bits, *outs))


@pytest.mark.parametrize("weight", [1.0, 0.37, 1e-3, 300.0])
@DTYPES
def test_results_round_as_torch_rounds(dtype, weight):
    """A convolution of one input is a product: of every float16, or as many of the others."""
    x = torch.arange(2**16).to(torch.int16).view(torch.bfloat16 if dtype == torch.float32 else dtype).to(dtype)
    window = torch.zeros(1, 1, 2**16, dtype=dtype)
    weights = torch.full((2**16, 1), weight)
    zero, valid = torch.zeros(1, dtype=torch.int64), torch.ones(1, 1, dtype=torch.bool)
    # One block after the other, whose threads are fibers, would take long: only every 37th number.
    picked = slice(None, None, 37)
    arguments = (x[None, None, picked], weights[picked], None, False, zero, valid, None, 0)
    mine, other = window[..., picked].clone(), window[..., picked].clone()
    got = recurrent_kernels.conv_window(mine, *arguments)
    want = reference_recurrent.conv_window(other, *arguments)
    assert same_bits(got.float(), want.float()) and same_bits(mine.float(), other.float())


def test_a_wrong_parent_reads_nothing_else():
    """Values that a device cannot be asked about end the path, and no walk goes on for ever."""
    layer = LAYERS["delta"](backend="cuda", window=PLACES)
    wrong = torch.tensor([[3, 7, -9, 3, 1 << 40]] * 4)
    inputs = [x[None, None].expand(4, 5, *x.shape).float().contiguous() for x in layer.inputs(1)]
    layer.run([x[:1, :1] for x in inputs], Feed(*(torch.zeros(1, dtype=torch.int64),) * 2, torch.ones(1, 1) > 0))
    start, valid = torch.ones(4, dtype=torch.int64), torch.ones(4, 5, dtype=torch.bool)
    q, *others = inputs
    out = recurrent_kernels.delta_step(*layer.held[0], q, *others, start, start, valid, wrong, 0, False, True)
    alone = torch.full_like(wrong, -1)
    want = reference_recurrent.delta_step(*layer.held[0], q, *others, start, start, valid, alone, 0, False, True)
    assert out.shape == want.shape and close(out[0], want[0])
