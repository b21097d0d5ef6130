"""Top-k, top-p and min-p keep the tokens that transformers' warpers keep, with the same probabilities.

Transformers runs in float64 on the same numbers. What its filters keep with slightly smaller and slightly larger
probabilities bounds what a kernel may keep whose sums are rounded. Ties at the cutoff are kept, all of them: of a tie
at the edge of top-p transformers keeps those that its sort happens to put last."""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.arrangements import only
from transformers.generation import logits_process as warpers

from specdec_kernels import SamplingParams, draft_step, speculative_step
from specdec_kernels.testing import assert_statistics_close, device_of

INF = float("inf")
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = (F32, BF16, F16)
# The relative error of a sum of weights for logits of magnitude 1. float32 rounds l / T in proportion to its size.
SLACK = {"reference": 2e-7, "cpu": 4e-6, "triton": 4e-6, "cuda": 4e-6}
exploring = functools.partial(settings, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


class Setting(NamedTuple):
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


TOP_K = (0, 1, 2, 50, "V", "V + 1")
TOP_P = (0.0, 1e-4, 0.1, 0.5, 0.9, 0.95, 0.999, 1.0)
MIN_P = (0.0, 0.01, 0.5, 1.0)
SETTINGS = list(itertools.product((0.5, 1.0, 1.7), TOP_K, TOP_P, MIN_P))


def some_settings(vocabulary: int, number: int, random_state: int) -> list[Setting]:
    sizes = {"V": vocabulary, "V + 1": vocabulary + 1}
    chosen = random.Random(random_state).sample(SETTINGS, number)
    return [Setting(t, sizes.get(k, k), p, m) for t, k, p, m in chosen]


def _masked(row: torch.Tensor) -> torch.Tensor:
    return row.masked_fill(torch.arange(len(row)) % 3 == 1, -INF)


# Each makes a row from normal random numbers [V] and a dtype.
KINDS = {
    "normal": lambda x, dtype: 2 * x,
    "peaked": lambda x, dtype: 8 * x,
    "masked": lambda x, dtype: _masked(2 * x),
    "flat": lambda x, dtype: torch.full_like(x, 0.7),
    "two_levels": lambda x, dtype: torch.where(x > 0.5, 1.5, -0.5),
    "ties": lambda x, dtype: (2 * x).round() / 2,
    "huge": lambda x, dtype: 1e4 * x.clamp(-1, 1),
    "offset": lambda x, dtype: 1e3 + 2 * x,
    "zeros": lambda x, dtype: torch.where(x > 0, 0.0, -0.0) - 1.5 * (x > 1).float(),
    "denormal": lambda x, dtype: (4 * x).round() * torch.finfo(dtype).smallest_normal / 8,
}


def is_interpreted(backend: str) -> bool:
    return backend == "triton" and device_of(backend).type == "cpu"


def kinds_of(backend: str, dtype: torch.dtype) -> list[str]:
    """All kinds, except denormal bfloat16 for Triton's interpreter, which reads these as 0."""
    return [kind for kind in KINDS if not (is_interpreted(backend) and dtype == BF16 and kind == "denormal")]


def row_of(kind: str, vocabulary: int, dtype: torch.dtype, random_state: int) -> torch.Tensor:
    x = torch.randn(vocabulary, generator=torch.Generator().manual_seed(random_state))
    return KINDS[kind](x, dtype).to(dtype)


def warped(logits: torch.Tensor, setting: Setting, stretch: float = 1.0) -> torch.Tensor:
    """[R, V] scores after transformers' warpers, with the filters' probabilities multiplied by ``stretch``."""
    temperature, top_p, min_p = torch.tensor([setting.temperature, setting.top_p, setting.min_p]).double().tolist()
    chain = [warpers.TemperatureLogitsWarper(temperature)]
    if setting.top_k > 0:
        chain.append(warpers.TopKLogitsWarper(setting.top_k))
    if setting.top_p < 1.0:
        chain.append(warpers.TopPLogitsWarper(min(1.0, top_p * stretch)))
    if setting.min_p > 0.0:
        # A min_p above 1 would keep nothing, so only the largest is kept.
        min_p /= stretch
        chain.append(warpers.MinPLogitsWarper(min_p) if min_p <= 1.0 else warpers.TopKLogitsWarper(1))
    scores = logits.double()
    for warper in chain:
        scores = warper(None, scores)
    return scores


def with_ties(logits: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """[R, V]: the tokens that ``scores`` keep, and those whose logits tie with the smallest one kept."""
    kept = scores > -INF
    smallest = torch.where(kept, logits.double(), INF).amin(-1, keepdim=True)
    return (logits.double() >= smallest) & (logits > -INF)


def drawn(backend: str, logits: torch.Tensor, settings: list[Setting], scalar: bool = False, seed: int = 0):
    """``draft_step`` on rows [R, V], each with its own setting."""
    values = {name: [getattr(s, name) for s in settings] for name in Setting._fields}
    dtypes = {name: torch.int64 if name == "top_k" else torch.float32 for name in values}
    params = SamplingParams(
        **{name: v[0] if scalar else torch.tensor(v, dtype=dtypes[name]) for name, v in values.items()}
    )
    device = device_of(backend)
    seeds = torch.arange(seed, seed + len(logits)).to(device)
    out = draft_step(logits.to(device), params, seed=seeds, position=3, offset=0, backend=backend)
    return type(out)(*(None if t is None else t.cpu() for t in out))


def check(backend: str, logits: torch.Tensor, settings: list[Setting]) -> int:
    """Checks rows that are drawn with their own settings. Returns how many had a filter's edge within rounding."""
    out = drawn(backend, logits, settings)
    kept = (logits.double() >= out.cutoff.double()[:, None]) & (logits > -INF)
    near = 0
    for setting in {*settings}:
        rows = [i for i, s in enumerate(settings) if s == setting]
        x, ours = logits[rows], kept[rows]
        if setting.temperature == 0:
            assert torch.equal(out.tokens[rows], x.float().argmax(-1)) and (out.log_q[rows] == 0).all()
            assert (out.cutoff[rows] == -INF).all() and torch.equal(out.lse[rows], x.float().amax(-1))
            continue
        temperature = float(torch.tensor(setting.temperature))
        sizes = x.double().masked_fill(x == -INF, 0).abs().amax(-1) / temperature
        exact = with_ties(x, warped(x, setting))
        for i, size in enumerate(sizes.tolist()):
            slack, row = SLACK[backend] * (1 + size), x[i : i + 1]
            few, many = (with_ties(row, warped(row, setting, s))[0] for s in (1 - slack, 1 + slack))
            context = f"{setting} {row.tolist() if row.shape[1] < 40 else row.shape}"
            assert not (few & ~ours[i]).any(), f"a token is missing: {context}"
            assert not (ours[i] & ~many).any(), f"too many tokens: {context}"
            near += not torch.equal(ours[i], exact[i])
        scaled = (x.double() / temperature).masked_fill(~ours, -INF)
        lse = scaled.logsumexp(-1)
        assert_statistics_close(out.lse[rows], lse.float(), lse.abs() + sizes)
        log_q = scaled.log_softmax(-1).gather(1, out.tokens[rows, None]).squeeze(-1)
        assert (log_q > -INF).all(), f"a token was drawn that is filtered out: {setting}"
        assert_statistics_close(out.log_q[rows], log_q.float(), lse.abs() + log_q.abs() + sizes)
    assert not out.status.any()
    return near


def sizes_and_dtypes() -> Iterator:
    """float16 is read as bfloat16 is, but for its bits: every day in one size."""
    for vocabulary, dtype in itertools.product((1, 2, 5, 33, 1000, 1025, 5000), DTYPES):
        nightly = dtype == torch.float16 and vocabulary != 1025
        yield pytest.param(vocabulary, dtype, marks=[pytest.mark.nightly] * nightly, id=f"{vocabulary}-{dtype}")


@pytest.mark.parametrize(("vocabulary", "dtype"), sizes_and_dtypes())
def test_as_transformers(backend, vocabulary, dtype):
    """Every kind of row with a sample of all combinations, mixed in one batch. Triton's interpreter, which takes a
    tenth of a second per row, has three kinds with one combination."""
    number, kinds = 24 if vocabulary < 1024 else 12, [*KINDS]
    case = vocabulary + DTYPES.index(dtype)
    if is_interpreted(backend):
        number, kinds = 1, random.Random(case).sample(kinds_of(backend, dtype), 3)
    chosen = some_settings(vocabulary, number, case)
    rows = torch.stack([row_of(kind, vocabulary, dtype, vocabulary) for kind in kinds])
    check(backend, rows.repeat(len(chosen), 1), [s for s in chosen for _ in kinds])


@pytest.mark.parametrize("setting", [Setting(0.7, 50, 0.9, 0.05), Setting(1.0, 0, 0.95), Setting(1.3, 128_257, 0.5)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_vocabulary(dtype, setting):
    rows = torch.stack([row_of(kind, 128_256, dtype, 0) for kind in ("normal", "ties", "zeros")])
    check("cpu", rows, [setting] * 3)


@pytest.mark.parametrize("vocabulary", [40, 1400])
def test_top_k_of_numbers_around_zero(fast_backend, vocabulary):
    """Both zeros, which compare equal, and their neighbours: the cutoff is the reference's."""
    around = torch.tensor([0.0, -0.0, 2e-45, -2e-45, 1e-40, -1e-40, 1e-30, -1e-30, -3.0])
    number, generator = 3 if is_interpreted(fast_backend) else 300, torch.Generator().manual_seed(vocabulary)
    rows = []
    for i in range(number):
        some = around[torch.randperm(len(around), generator=generator)[: 3 + i % 4]]
        rows.append(some[torch.randint(0, len(some), (vocabulary,), generator=generator)])
    chosen = [Setting(1.0, int(torch.randint(1, vocabulary + 1, (), generator=generator))) for _ in rows]
    ours, expected = (drawn(backend, torch.stack(rows), chosen) for backend in (fast_backend, "reference"))
    assert torch.equal(ours.cutoff, expected.cutoff) and torch.equal(ours.tokens, expected.tokens)


@pytest.mark.parametrize("kind", ["normal", "masked", "huge"])
def test_ordinary_rows_have_no_near_ties(backend, kind):
    """In ordinary rows the tolerance above is never needed: the kept tokens are exactly those of transformers."""
    number = 4 if is_interpreted(backend) else 60
    chosen = some_settings(500, number, 3)
    rows = torch.stack([row_of(kind, 500, F32, i) for i in range(number)])
    assert check(backend, rows, chosen) == 0


@exploring(max_examples=80)
@given(data=st.data())
def test_any_filters_on_cpu(data):
    explore(data, "cpu")


@exploring(max_examples=6)
@given(data=st.data())
def test_any_filters_on_triton(data):
    explore(data, "triton")


@exploring(max_examples=40)
@given(data=st.data())
def test_any_filters_on_reference(data):
    explore(data, "reference")


def explore(data: st.DataObject, backend: str) -> None:
    dtype = data.draw(st.sampled_from(DTYPES), "dtype")
    vocabulary = data.draw(st.one_of(st.integers(1, 12), st.integers(1000, 1050)), "V")
    kinds = data.draw(st.lists(st.sampled_from(kinds_of(backend, dtype)), min_size=1, max_size=4), "kinds")
    number = st.floats(0, 1, width=32)
    setting = st.builds(
        Setting,
        st.one_of(st.just(0.0), st.floats(0.0625, 8, width=32)),
        st.one_of(st.just(0), st.integers(1, vocabulary + 1)),
        st.one_of(st.sampled_from(TOP_P), number),
        st.one_of(st.sampled_from(MIN_P), number),
    )
    chosen = [data.draw(setting, "setting") for _ in kinds]
    rows = torch.stack([row_of(kind, vocabulary, dtype, i) for i, kind in enumerate(kinds)])
    check(backend, rows, chosen)


# ---- What is drawn ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "kept"),
    [
        (Setting(1.0, 3), {0, 2, 5}),
        (Setting(1.0, 2), {0, 2, 5}),  # 2 and 5 tie for the second place
        (Setting(1.0, 1), {0}),
        (Setting(1.0, 0, 0.0), {0}),
        (Setting(1.0, 0, 0.6), {0, 2, 5}),
        (Setting(1.0, 0, 1.0, 0.3), {0, 2, 5}),
        (Setting(2.0, 0, 1.0, 0.3), {0, 1, 2, 5}),
        (Setting(1.0, 0, 0.9), {0, 1, 2, 5}),
        (Setting(1.0, 4, 0.9), {0, 2, 5}),  # top_p of the tokens that top_k leaves
        (Setting(1.0), {0, 1, 2, 3, 5}),
    ],
)
def test_draws_are_all_of_the_kept_tokens_and_no_other(backend, setting, kept):
    row = torch.tensor([3.0, 1.0, 2.0, 0.5, -INF, 2.0])
    seeds = 4 if is_interpreted(backend) else 400
    assert only(drawn(backend, row.expand(seeds, -1), [setting], scalar=True).tokens, kept)


def test_a_number_is_a_setting_of_every_sequence(backend):
    """A number gives the same results, bit for bit, as a tensor of equal values, and None as the neutral value."""
    rows, setting = row_of("normal", 70, F32, 5).expand(6, -1), Setting(0.8, 9, 0.9, 0.02)
    for got, want in zip(
        drawn(backend, rows, [setting], scalar=True)[:5], drawn(backend, rows, [setting] * 6)[:5], strict=True
    ):
        assert torch.equal(got, want)
    neutral, plain = drawn(backend, rows, [Setting()] * 6), drawn(backend, rows, [Setting()], scalar=True)
    assert all(map(torch.equal, neutral[:5], plain[:5]))


# ---- Rows that the cpu backend samples -------------------------------------------------------------------------------

LONG = 20_011  # its last block of 1024 is not whole


def sampled(vocabulary: int) -> torch.Tensor:
    """Which tokens are in the sample (csrc/cpu/block_nucleus.h)."""
    block, stretch = torch.arange(vocabulary) // 1024, torch.arange(vocabulary) % 1024 // 64
    return (stretch == block * 5 % 16) & (block < vocabulary // 1024)


def _unlike(x: torch.Tensor, of_sample: torch.Tensor) -> torch.Tensor:
    return torch.where(sampled(len(x)), of_sample, x)


def _peak(x: torch.Tensor, size: float) -> torch.Tensor:
    """A token that the sample does not see weighs ``size`` times as much as all others."""
    return torch.where(torch.arange(len(x)) == 1023, x.logsumexp(0) + math.log(size), x)


MISLEADING = {
    "low": lambda x: _unlike(x, x - 4),
    "high": lambda x: _unlike(x, x + 4),
    "higher": lambda x: _unlike(x, x + 40),
    "wide": lambda x: _unlike(x, 9 * x),
    "narrow": lambda x: _unlike(3 * x, x),
    "equal": lambda x: _unlike(x, torch.full_like(x, -0.7)),
    "two": lambda x: _unlike(x, x.sign()),
    "banned": lambda x: _unlike(x, torch.full_like(x, -INF)),
    "all_but_it_banned": lambda x: torch.where(sampled(len(x)), x, -INF),
    "peak": lambda x: _peak(x, 1.0),
    "high_peak": lambda x: _peak(x, 1e6),
    "few_levels": lambda x: (3 * x).round() / 3,
    "unequal_blocks": lambda x: 2 * x - torch.arange(len(x)) / len(x) * 9,
}
ALONE = [Setting(t, 0, p, m) for t, m in ((1.0, 0.0), (0.6, 0.01), (1.7, 0.0), (1.0, 0.4)) for p in TOP_P[:-1]]


@pytest.mark.parametrize("kind", [*MISLEADING, *(pytest.param(kind, marks=pytest.mark.nightly) for kind in KINDS)])
def test_top_p_does_not_depend_on_the_sample(kind):
    if kind in KINDS:
        row = row_of(kind, LONG, F32, 8)
    else:
        row = MISLEADING[kind](torch.randn(LONG, generator=torch.Generator().manual_seed(8)))
    check("cpu", row.expand(len(ALONE), -1), ALONE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("std", [0.0, 0.3, 1.0, 3.0, 8.0, 300.0])
def test_top_p_of_flat_and_peaked_rows(std, dtype):
    rows = std * torch.randn(4, LONG, generator=torch.Generator().manual_seed(9))
    rows[1, ::3] = -INF
    check("cpu", rows.to(dtype).repeat(3, 1), [Setting(1.0, 0, p) for p in (0.95, 0.5, 0.999) for _ in rows])


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("kind", ["low", "peak", "unequal_blocks", "few_levels"])
def test_a_model_that_drafts_for_itself(kind, rule):
    """p and q are the same, bit for bit, so all its drafts are accepted."""
    row = MISLEADING[kind](torch.randn(LONG, generator=torch.Generator().manual_seed(10)))
    params, seeds = SamplingParams(0.8, top_p=0.9, min_p=0.001), torch.arange(40)
    drafts = draft_step(row.expand(40, -1), params, seed=seeds, position=3, offset=0, rule=rule)
    more = {"params": params, "seed": seeds, "position": 3, "rule": rule}
    out = speculative_step(row.expand(40, 2, -1), drafts.tokens[:, None], row.expand(40, 1, -1), **more)
    assert (out.num_accepted == 1).all() and not out.status.any()


@pytest.mark.parametrize("kind", ["low", "peak", "unequal_blocks", "few_levels", "equal"])
def test_threads_and_dtypes_of_a_sampled_row(kind):
    """Threads change nothing, nor does a dtype that holds the same numbers, nor penalties that change none."""
    row = MISLEADING[kind](torch.randn(LONG, generator=torch.Generator().manual_seed(11))).bfloat16()
    chosen = [Setting(t, 0, p) for t in (0.7, 1.0) for p in (0.3, 0.95)]
    results = []
    for threads, dtype in ((1, F32), (2, BF16), (3, F32)):
        torch.set_num_threads(threads)
        results.append(drawn("cpu", row.to(dtype).expand(4, -1), chosen)[:5])
    for result in results[1:]:
        assert all(map(torch.equal, result, results[0]))


# ---- Properties ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["normal", "ties", "two_levels", "masked"])
def test_a_shift_moves_the_cutoff(backend, kind):
    """Logits are on a grid, where a shift is exact. min-p is left out, since its cutoff is not on the grid."""
    rows = ((row_of(kind, 200, F32, 1) * 64).round() / 64).expand(8, -1)
    chosen = [Setting(t, k, p) for t in (0.5, 2.0) for k in (0, 9) for p in (0.3, 1.0)]
    plain, shifted = drawn(backend, rows, chosen), drawn(backend, rows + 16, chosen)
    assert torch.equal(shifted.cutoff, plain.cutoff + 16)


@pytest.mark.parametrize("name", ["top_k", "top_p", "min_p"])
def test_a_stricter_filter_keeps_fewer(backend, name):
    """The cutoff does not fall when a filter becomes stricter, nor does q of a kept token."""
    values = {"top_k": (0, 40, 12, 5, 2, 1), "top_p": (1.0, 0.99, 0.7, 0.3, 0.0), "min_p": (0.0, 0.01, 0.2, 0.7, 1.0)}
    rows = row_of("ties", 60, F32, 2).expand(len(values[name]), -1)
    out = drawn(backend, rows, [Setting()._replace(**{name: value}) for value in values[name]])
    assert (out.cutoff.diff() >= 0).all() and (out.lse.diff() <= 0).all()
    assert out.cutoff[0] == -INF and out.cutoff[-1] == rows[0].max()


def test_filters_that_keep_all_change_nothing(backend):
    """The draw is the same, bit for bit, as without filters, although a cutoff is computed."""
    rows = row_of("normal", 1100, F32, 3).expand(4, -1)
    plain = drawn(backend, rows, [Setting()], scalar=True)
    for setting in (Setting(1.0, 1100), Setting(1.0, 2**24), Setting(1.0, 0, 1.0, 1e-30)):
        out = drawn(backend, rows, [setting] * 4)
        assert torch.equal(out.tokens, plain.tokens)
        assert_statistics_close(out.lse, plain.lse, plain.lse)


def test_greedy_sequences_have_no_filters(backend):
    rows = row_of("ties", 40, F32, 4).expand(3, -1)
    filtered = drawn(backend, rows, [Setting(0.0, 2, 0.1, 0.5)] * 3)
    assert all(map(torch.equal, filtered[:5], drawn(backend, rows, [Setting(0.0)] * 3)[:5]))
