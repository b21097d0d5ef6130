"""Every line of the corner table (docs/numerics.md), in every backend."""

from __future__ import annotations

import pytest
import torch
from conftest import FAST_BACKENDS

from specdec_kernels import SamplingParams, Status, draft_step
from specdec_kernels.testing import StepInputs, device_of, random_step

INF, NAN = float("inf"), float("nan")
# What is written into a row; empty: -inf everywhere.
FAULTS = {"nan": [NAN], "positive_infinity": [INF], "nan_and_infinity": [NAN, INF], "empty": []}
TARGET = {
    "nan": Status.TARGET_NAN,
    "positive_infinity": Status.TARGET_POSITIVE_INFINITY,
    "nan_and_infinity": Status.TARGET_NAN,
    "empty": Status.TARGET_EMPTY,
}
DRAFT = {fault: Status(flag << 3) for fault, flag in TARGET.items()}


def seeds(backend: str) -> int:
    """How many seeds a statement about "whatever u" is tried with."""
    return 24 if backend == "triton" and not torch.cuda.is_available() else 2000


def step(target: list, tokens: list, draft: list | None, n: int, temperature: float = 1.0, **more) -> StepInputs:
    """The step with target rows [K+1, V], tokens [K], draft rows [K, V], for n seeds."""
    rows = torch.tensor(target)
    return StepInputs(
        rows.expand(n, -1, -1),
        torch.tensor(tokens, dtype=torch.int64).expand(n, -1),
        None if draft is None else torch.tensor(draft).reshape(-1, rows.shape[1]).expand(n, -1, -1),
        SamplingParams(temperature=temperature),
        torch.arange(n),
        torch.zeros(n, dtype=torch.int64),
        **more,
    )


def drafted(backend: str, logits: torch.Tensor, temperature: float = 1.0, **options):
    arguments = {"seed": 0, "position": 0, "offset": 0, **options}
    out = draft_step(logits.to(device_of(backend)), SamplingParams(temperature), **arguments, backend=backend)
    return type(out)(*(t.cpu() for t in out))


def spoil(rows: torch.Tensor, fault: str) -> None:
    """Makes the rows [..., V] ones without a distribution."""
    if fault == "empty":
        rows.fill_(-INF)
    else:
        for distance, value in enumerate(FAULTS[fault]):
            rows[..., rows.shape[-1] // 2 - distance] = value


# ---- Acceptance ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_greedy_ties_go_to_the_lowest_id(backend, dtype):
    """Within a vector of lanes, across lanes, and across blocks of 1024."""
    for ties in ([0, 1], [5, 6, 7], [3, 1030, 1400], [1023, 1024], [1300, 1499], range(1500)):
        logits = torch.full((1, 1500), -1.0, dtype=dtype)
        logits[0, list(ties)] = 2.0
        assert drafted(backend, logits, 0.0).tokens.tolist() == [min(ties)]
        for token, accepted in ((min(ties), 1), (max(ties), 0)):
            inputs = step([[0.0] * 1500] * 2, [token], None, 1, 0.0).replace(target_logits=logits.expand(2, -1)[None])
            out = inputs.run(backend)
            assert out.num_accepted.tolist() == [accepted]
            assert out.tokens[0].tolist() == [min(ties), min(ties) if accepted else -1]


def test_greedy_ignores_draft_logits(backend):
    """At temperature 0 a draft stands iff it is the target's favourite, whatever q, even none."""
    for draft in ([[5.0, 0.0, 0.0]], [[NAN, 0.0, 0.0]], [[-INF] * 3], None):
        for token, accepted in ((1, 1), (0, 0)):
            out = step([[0.0, 3.0, 1.0], [2.0, 0.0, 0.0]], [token], draft, 2, 0.0).run(backend)
            assert out.num_accepted.tolist() == [accepted] * 2 and out.status.tolist() == [0, 0]
            assert out.tokens.tolist() == [[1, 0] if accepted else [1, -1]] * 2


@pytest.mark.parametrize("temperature", [0.001, 0.3, 1.0, 2.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("vocabulary", [7, 1300])
def test_equal_models_are_always_accepted(backend, dtype, temperature, vocabulary):
    n = seeds(backend) // (1 if vocabulary < 1024 else 12)
    row = torch.randn(1, vocabulary, generator=torch.Generator().manual_seed(1)).to(dtype)
    many = row.expand(n, -1)
    first = drafted(backend, many, temperature, seed=torch.arange(n).to(device_of(backend)))
    inputs = step([[0.0]] * 2, [0], [[0.0]], n, temperature).replace(
        target_logits=row.expand(n, 2, -1), draft_tokens=first.tokens[:, None], draft_logits=many[:, None]
    )
    for statistics in (None, (first.cutoff[:, None], first.lse[:, None])):
        out = inputs.replace(draft_stats=statistics).run(backend)
        assert (out.num_accepted == 1).all() and (out.status == 0).all()
        assert torch.equal(out.tokens[:, 0], first.tokens)


def test_no_residual_mass_accepts(backend):
    """q above p everywhere, by an lse that is too small: a rejection has nothing to recover from: the draft stands."""
    row, n = [0.3, -0.2, 1.0, 0.5], seeds(backend)
    lse = torch.tensor(row).logsumexp(0).expand(n, 1) - 0.5
    inputs = step([row, row], [2], [row], n, draft_stats=(torch.full((n, 1), -INF), lse))
    out = inputs.run(backend)
    assert (out.num_accepted == 1).all() and (out.tokens[:, 0] == 2).all() and (out.status == 0).all()


def test_no_residual_mass_and_p_zero_draws_from_p(backend):
    """As above, but the target never yields the draft: it must not stand."""
    n = seeds(backend)
    target, draft = [0.3, -0.2, -INF, 0.5], [0.3, -0.2, 1.0, 0.5]
    lse = torch.tensor(target).logsumexp(0).expand(n, 1) - 0.5
    out = step([target, target], [2], [draft], n, draft_stats=(torch.full((n, 1), -INF), lse)).run(backend)
    assert (out.num_accepted == 0).all() and (out.tokens[:, 0] != 2).all() and (out.tokens[:, 0] >= 0).all()
    assert {*out.tokens[:, 0].tolist()} == {0, 1, 3}


@pytest.mark.parametrize("draft", [None, [[0.0, 4.0, 0.0]]], ids=["one_hot", "full"])
def test_p_zero_is_never_accepted(backend, draft):
    out = step([[1.0, -INF, 0.5], [0.0] * 3], [1], draft, seeds(backend)).run(backend)
    assert (out.num_accepted == 0).all() and (out.status == 0).all()
    assert {*out.tokens[:, 0].tolist()} == {0, 2} and (out.tokens[:, 1] == -1).all()


def test_q_zero_rejects_and_says_so(backend):
    """Recovery is from max(0, p - q), which has no mass at token 0, where q > p."""
    out = step([[0.0, 0.0, 0.0, 0.0], [0.0] * 4], [1], [[2.0, -INF, 0.0, -1.0]], seeds(backend)).run(backend)
    assert (out.num_accepted == 0).all() and (out.status == Status.DRAFT_ZERO_PROBABILITY).all()
    assert {1, 3} <= {*out.tokens[:, 0].tolist()} and 0 not in out.tokens[:, 0]


# ---- Rows without a distribution -------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocabulary", [9, 1100])
@pytest.mark.parametrize("fault", FAULTS)
def test_target_fault(backend, fault, vocabulary):
    """At a consulted row: nothing is emitted from it on. At another: nothing happens. Neighbours: bitwise the same."""
    inputs = random_step(4, 2, vocabulary, random_state=11)
    inputs = inputs.replace(draft_logits=inputs.target_logits[:, :2].clone(), num_drafts=torch.tensor([2, 2, 1, 0]))
    clean = inputs.run(backend)
    tokens = torch.where(clean.tokens[:, :2] >= 0, clean.tokens[:, :2], 0)
    inputs = inputs.replace(draft_tokens=tokens)  # p == q: all accepted
    clean = inputs.run(backend)
    assert clean.num_accepted.tolist() == [2, 2, 1, 0]
    for row in range(3):
        spoiled = inputs.replace(target_logits=inputs.target_logits.clone())
        spoil(spoiled.target_logits[1:, row], fault)
        out = spoiled.run(backend)
        assert torch.equal(out.tokens[0], clean.tokens[0]) and out.status[0] == 0
        for b, num_drafts in ((1, 2), (2, 1), (3, 0)):
            consulted = row <= num_drafts
            want = clean.tokens[b].clone()
            want[row if consulted else 3 :] = -1
            assert out.tokens[b].tolist() == want.tolist()
            assert out.num_accepted[b] == (min(row, num_drafts) if consulted else num_drafts)
            assert out.status[b] == (TARGET[fault] if consulted else 0)


@pytest.mark.parametrize("fault", FAULTS)
def test_target_fault_after_a_rejection_is_not_seen(backend, fault):
    inputs = step([[0.0, -INF, 1.0], [1.0, 0.0, 0.0]], [1], None, 3)
    clean = inputs.run(backend)
    inputs = inputs.replace(target_logits=inputs.target_logits.clone())
    spoil(inputs.target_logits[:, 1], fault)
    assert all(map(torch.equal, inputs.run(backend), clean))
    assert (clean.num_accepted == 0).all()


@pytest.mark.parametrize("stats", [None, "from_the_row", "stale"])
@pytest.mark.parametrize("vocabulary", [9, 1100])
@pytest.mark.parametrize("fault", FAULTS)
def test_draft_fault(backend, fault, vocabulary, stats):
    """The sequence's drafts end there, its token is drawn from the target alone; neighbours are bitwise the same.

    Statistics handed over by draft_step for such a row have lse = NaN. Stale ones, of another row, are the caller's
    fault: then only ids stay within the vocabulary and neighbours untouched.
    """
    inputs = random_step(3, 2, vocabulary, random_state=12, stats=stats is not None)
    clean = inputs.run(backend)
    spoiled = inputs.replace(draft_logits=inputs.draft_logits.clone())
    spoil(spoiled.draft_logits[1, 0], fault)
    if stats == "from_the_row":
        spoiled.draft_stats[1][1, 0] = drafted(backend, spoiled.draft_logits[1:2, 0]).lse[0]
        assert spoiled.draft_stats[1][1, 0].isnan()
    out = spoiled.run(backend)
    for b in (0, 2):
        assert all(torch.equal(got[b], want[b]) for got, want in zip(out, clean, strict=True))
    assert ((out.tokens >= -1) & (out.tokens < vocabulary)).all() and out.tokens[1, 0] >= 0
    if stats == "stale":
        return
    # One number, lse, cannot say which fault it was.
    assert out.status[1] in (DRAFT[fault], Status.DRAFT_NAN if stats else DRAFT[fault])
    assert out.num_accepted[1] == 0 and (out.tokens[1, 1:] == -1).all()
    alone = inputs.replace(num_drafts=torch.zeros(3, dtype=torch.int64)).run(backend)
    assert out.tokens[1, 0] == alone.tokens[1, 0]


@pytest.mark.parametrize("vocabulary", [9, 1100])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_draft_step_fault(backend, fault, vocabulary, temperature):
    logits = torch.randn(4, vocabulary, generator=torch.Generator().manual_seed(13))
    clean = drafted(backend, logits, temperature)
    spoil(logits[2], fault)
    out = drafted(backend, logits, temperature)
    for got, want in zip(out, clean, strict=True):
        assert torch.equal(got[[0, 1, 3]], want[[0, 1, 3]])
    assert out.tokens[2] == -1 and out.status[2] == DRAFT[fault]
    assert out.log_q[2] == -INF and out.lse[2].isnan() and (clean.status == 0).all()


@pytest.mark.parametrize("fast", FAST_BACKENDS)
def test_several_faults_in_one_row(fast):
    """Status says the same in every backend."""
    for values in ([NAN, INF], [NAN, -INF], [INF, -INF], [NAN, INF, -INF], [-INF, -INF]):
        row = [1.0] * (3 - len(values)) + values if values != [-INF, -INF] else [-INF, -INF, -INF]
        inputs = step([row, [0.0] * 3], [0], None, 1)
        assert inputs.run(fast).status.tolist() == inputs.run("reference").status.tolist(), row
        logits = torch.tensor([row])
        assert drafted(fast, logits).status.tolist() == drafted("reference", logits).status.tolist(), row


# ---- Tokens ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draft_logits", [False, True], ids=["one_hot", "full"])
@pytest.mark.parametrize(
    ("token", "status"),
    [(-1, 0), (-2, 128), (6, 128), (2**31, 128), (2**32 + 1, 128), (2**62, 128), (-(2**63), 128)],
)
def test_draft_token_out_of_range(backend, token, status, draft_logits):
    """Ends that sequence's drafts there; ids that would be fine after truncation to 32 bits, too."""
    row, n = [0.5, 1.0, -1.0, 0.0, 0.2, 0.3], 5
    draft = [row] * 3 if draft_logits else None
    target = [
        [-INF, 0.0, *[-INF] * 4],
        row,
        row,
        row,
    ]  # row 0 accepts token 1 with certainty, for q = target or one-hot
    if draft:
        draft[0] = target[0]
    out = step(target, [1, token, 2], draft, n).run(backend)
    alone = step(target, [1, 0, 2], draft, n, num_drafts=torch.ones(n, dtype=torch.int64)).run(backend)
    assert (out.status == status).all() and (out.num_accepted == 1).all()
    assert torch.equal(out.tokens, alone.tokens)


# ---- Shapes, memory --------------------------------------------------------------------------------------------------


def test_empty_batch(backend):
    out = random_step(0, 3, 20).run(backend)
    assert [tuple(t.shape) for t in out] == [(0, 4), (0,), (0,)]
    assert [tuple(t.shape) for t in drafted(backend, torch.zeros(0, 20), seed=0)] == [(0,)] * 5


@pytest.mark.parametrize("one_hot", [False, True])
def test_no_drafts(backend, one_hot):
    inputs = random_step(5, 0, 20, random_state=14)
    out = (inputs.replace(draft_logits=None) if one_hot else inputs).run(backend)
    assert out.tokens.shape == (5, 1) and ((out.tokens >= 0) & (out.tokens < 20)).all()
    assert not out.num_accepted.any() and not out.status.any()


def test_one_token(backend):
    """V = 1: all certain, at any temperature."""
    for temperature in (0.0, 1.0):
        out = step([[0.7]] * 3, [0, 0], [[-3.0]] * 2, 4, temperature).run(backend)
        assert (out.tokens == 0).all() and (out.num_accepted == 2).all() and (out.status == 0).all()


def test_every_slot_is_defined(backend):
    """Accepted drafts, one token, then -1; whatever lay in memory before."""
    for random_state in range(3):
        inputs = random_step(6, 3, 30, temperature=(0.0, 1.0), random_state=random_state)
        inputs = inputs.replace(num_drafts=torch.arange(6) % 4, target_logits=inputs.target_logits.clone())
        inputs.target_logits[4, 1] = NAN
        garbage = [torch.full((6, 4), 2**40, device=device_of(backend)) for _ in range(16)]
        del garbage  # freed blocks that the outputs are likely to get
        out = inputs.run(backend)
        for b in range(6):
            n, tokens = int(out.num_accepted[b]), out.tokens[b].tolist()
            emitted = n if out.status[b] & Status.TARGET_NAN else n + 1
            assert tokens[:n] == inputs.draft_tokens[b, :n].tolist() and n <= int(inputs.num_drafts[b])
            assert all(0 <= t < 30 for t in tokens[:emitted])
            assert tokens[emitted:] == [-1] * (4 - emitted)


def test_inputs_are_never_written(backend):
    """No padding of a view is written either, and no NaN row."""
    inputs = random_step(3, 2, 1100, temperature=(0.0, 1.0), random_state=15, stats=True)
    inputs = inputs.replace(num_drafts=torch.tensor([2, 1, 0]))
    inputs.target_logits[2, 0] = NAN
    inputs = inputs.map(lambda t: t.to(device_of(backend)))
    before = [t.clone() for t in inputs.tensors()]
    inputs.run(backend)
    drafted(backend, inputs.draft_logits[:, 0], temperature=1.0)
    for tensor, copy in zip(inputs.tensors(), before, strict=True):
        assert torch.equal(torch.nan_to_num(tensor), torch.nan_to_num(copy))


@pytest.mark.large
@pytest.mark.parametrize("axis", ["batch", "row"])
def test_offsets_beyond_31_bits(backend, axis):
    """Views whose last elements lie more than 2^31 elements behind the first; only few pages are touched."""
    shape, far = (2, 3, 1100), 2**31 + 5000
    strides = (far, 1100, 1) if axis == "batch" else (4000, far // 2, 1)
    inputs = random_step(2, 2, 1100, dtype=torch.bfloat16, random_state=16)
    buffer = torch.empty(far + 8000, dtype=torch.bfloat16, device=device_of(backend))
    target = buffer.as_strided(shape, strides)
    target.copy_(inputs.target_logits)
    near = inputs.run(backend)
    assert all(map(torch.equal, inputs.replace(target_logits=target).run(backend), near))
    drafts = target[:, 2] if axis == "row" else target[:, 0]
    assert all(map(torch.equal, drafted(backend, drafts), drafted(backend, drafts.contiguous())))
