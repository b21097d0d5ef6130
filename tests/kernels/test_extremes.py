"""The ends of what each parameter may be: every backend agrees with float64 there, and beyond them they are refused."""

from __future__ import annotations

import itertools

import pytest
import torch

from specdec_kernels import SamplingParams, Status, TokenTable, draft_step, speculative_step
from specdec_kernels.testing import device_of

INF = float("inf")
ENDS = {
    "temperature": (1e-3, 1.0, 1e30),
    "top_k": (1, 2, 2**24),
    "top_p": (0.0, 1e-45, 0.6, 1 - 2**-24),
    "min_p": (1e-45, 0.3, 1.0),
    "repetition_penalty": (1e-3, 1e3),
    "presence_penalty": (-1e3, 1e3),
    "frequency_penalty": (-1e3, 1e3),
}
PENALTIES = [{}, *({name: value} for name in SamplingParams.PENALTIES for value in ENDS[name])]
FILTERS = [{}, *({name: value} for name in SamplingParams.FILTERS for value in ENDS[name])]
B, V = 4, 9


def rows() -> torch.Tensor:
    """[B, V] logits far enough apart for every decision to be clear, and one that is masked."""
    order = torch.stack([torch.randperm(V, generator=torch.Generator().manual_seed(b)) for b in range(B)])
    logits = 0.37 * order.float() - 1.1
    logits[:, 2] = -INF
    return logits


def table_of(bias: float = 0.0) -> TokenTable:
    ids = torch.tensor([[0, 3, 5, 7]]).expand(B, -1).contiguous()
    biases = torch.tensor([[bias, 0.0, 0.0, 0.0]]).expand(B, -1).contiguous()
    return TokenTable(ids, biases, ids == 3, (ids == 5).int() * 2)


def compare(backend: str, params: SamplingParams, table: TokenTable | None) -> None:
    device, logits = device_of(backend), rows()
    common = {"seed": 5, "position": 3, "rule": "coupled"}

    def run(logits, table, backend):
        drawn = draft_step(logits, params, offset=0, table=table, backend=backend, **common)
        target = logits[:, None].repeat(1, 2, 1)
        step = {"params": params, "table": table, "log_probs": True, "backend": backend, **common}
        return drawn, speculative_step(target, drawn.tokens[:, None], None, **step)

    moved = None if table is None else TokenTable(*(None if t is None else t.to(device) for t in table))
    ours, theirs = run(logits.to(device), moved, backend), run(logits.double(), table, "reference")
    for got, wanted in zip(ours, theirs, strict=True):
        assert got.tokens.tolist() == wanted.tokens.tolist() and got.status.tolist() == wanted.status.tolist()
    size = theirs[0].lse.abs()  # float32 has lse and l / T to some 1e-7 of it
    for got, wanted in ((ours[0].lse, theirs[0].lse), (ours[0].log_q, theirs[0].log_q)):
        assert (got.cpu().double() - wanted).abs().le(1e-5 + 4e-7 * size).all(), (got, wanted)
    got, wanted = ours[1].log_probs.cpu().double(), theirs[1].log_probs
    assert torch.equal(got.isnan(), wanted.isnan())
    assert (got - wanted).nan_to_num().abs().le(1e-5 + 4e-7 * size[:, None]).all(), (got, wanted)


@pytest.mark.parametrize("temperature", ENDS["temperature"])
@pytest.mark.parametrize("filters", FILTERS, ids=str)
def test_filters(backend, filters, temperature):
    compare(backend, SamplingParams(temperature=temperature, **filters), None)


@pytest.mark.parametrize("penalty", PENALTIES, ids=str)
def test_penalties(backend, penalty):
    for temperature in ENDS["temperature"][1:]:
        compare(backend, SamplingParams(temperature=temperature, **penalty), table_of())


@pytest.mark.parametrize("bias", [-1e30, -1e9, 1e9, 1e30])
def test_biases(backend, bias):
    """Also where l / T is beyond what float32 resolves: a token that is forced has probability 1."""
    for temperature in (1e-3, 0.7, 1.0):
        params, table, device = SamplingParams(temperature=temperature), table_of(bias), device_of(backend)
        table = TokenTable(*(None if t is None else t.to(device) for t in table))
        drawn = draft_step(rows().to(device), params, seed=5, position=3, offset=0, table=table, backend=backend)
        forced = (drawn.tokens == 0).tolist()
        assert forced == [bias > 0] * B and drawn.status.tolist() == [int(Status.OK)] * B
        assert drawn.log_q.isfinite().all() and (drawn.log_q <= 1e-3).all()
        if bias > 0:
            assert drawn.log_q.tolist() == [0.0] * B


@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize("temperature", [1e-3, 0.7, 1.0, 1e3])
@pytest.mark.parametrize("large", [1e6, 3e9, 1e20, 3.2e38])
def test_logits_beyond_what_float32_resolves(backend, large, temperature, filtered):
    """The largest logit has probability 1, and where l / T is no number of float32 any more, the row has a fault."""
    rows = torch.tensor(
        [[-1.0, 0.0, large, 1.0], [large, -large, large / 2, 7.0], [-large, -large, -large, -large / 2]]
    )
    device, limit = device_of(backend), torch.finfo(torch.float32).max
    filters = {"top_k": (0, 2, 0), "top_p": (0.9, 1.0, 1.0), "min_p": (0.0, 0.0, 0.5)}
    filters = {name: torch.tensor(values, device=device) for name, values in filters.items()}
    params = SamplingParams(temperature=temperature, **filters if filtered else {})
    common = {"params": params, "seed": 5, "position": 3, "backend": backend}
    scaled = (rows.double().amax(-1) / temperature).tolist()
    faults = [int(Status.TARGET_POSITIVE_INFINITY) if x > limit else int(Status.TARGET_EMPTY) if x < -limit else 0
              for x in scaled]  # fmt: skip
    best = [token if fault == 0 else -1 for token, fault in zip((2, 0, 3), faults, strict=True)]
    drawn = draft_step(rows.to(device), offset=0, **common)
    assert drawn.tokens.tolist() == best and drawn.status.tolist() == [8 * fault for fault in faults]
    for rule, draft in (("token", 1), ("token", 2), ("block", 1), ("block", 2), ("coupled", 1)):
        drafts, q = torch.full((3, 1), draft), torch.zeros(3, 1, 4)
        target = torch.stack([rows, torch.zeros_like(rows)], 1)
        out = speculative_step(
            target.to(device), drafts.to(device), None if rule == "coupled" else q.to(device), rule=rule,
            log_probs=True, **common,
        )  # fmt: skip
        assert out.tokens[:, 0].tolist() == best and out.status.tolist() == faults, rule
        assert out.log_probs[:, 0].nan_to_num(0.0).tolist() == [0.0] * 3, rule


@pytest.mark.parametrize("lowest", [-200.0, -2000.0])
def test_a_ratio_beyond_float32_keeps_no_draft_after_an_impossible_one(backend, lowest):
    """Rule `block`: the first draft has p(x) = 0, and the second p(x) / q(x) = infinity. 0 times that is 0."""
    device = device_of(backend)
    target, q = torch.zeros(64, 4, 4), torch.zeros(64, 3, 4)
    target[:, 0, 0], target[:, 1, 1], q[:, 1, 1] = -INF, 50.0, lowest
    out = speculative_step(
        target.to(device), torch.tensor([[0, 1, 2]]).expand(64, 3).to(device), q.to(device), rule="block",
        params=SamplingParams(), seed=torch.arange(64).to(device), position=3, backend=backend,
    )  # fmt: skip
    assert out.num_accepted.tolist() == [0] * 64 and (out.tokens[:, 0] > 0).all()


def test_masked_tokens_stay_masked_where_denormal_numbers_are_zero():
    """On devices, and in threads, that take them for 0. At a higher temperature 1 / T would be one."""
    torch.set_flush_denormal(True)
    try:
        for params in ({}, {"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.3}):
            compare("cpu", SamplingParams(temperature=1e30, **params), None)
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("name", ENDS)
def test_beyond_the_ends_is_refused(name):
    """As a number and in a tensor."""
    values = (-1, -(2**31), 2**31, 2**62, 2**63, -(2**63), 10**400, 3.4e38, -3.4e38, INF, -INF, float("nan"))
    for value, as_tensor in itertools.product(values, (False, True)):
        if (name.startswith(("presence", "frequency")) and value == -1) or (name == "temperature" and 0 < value < 1e30):
            continue  # it may be that
        if as_tensor and (isinstance(value, int) and not -(2**63) <= value < 2**63):
            continue  # no tensor of torch holds it
        with pytest.raises(ValueError, match=rf"^{name}: got .+, allowed: "):
            SamplingParams(**{name: torch.tensor([value]) if as_tensor else value})
