"""Every line of the table of corners (docs/numerics.md), in every backend and with every rule. Rows without a
distribution are in test_faults.py."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from support.arrangements import INF, NAN, drafted, identical, only, rules_for, seeds, step

from specdec_kernels import SamplingParams, Status
from specdec_kernels.ops import RULES
from specdec_kernels.testing import device_of, random_step

DRAFTED_RULES = RULES[:2]  # those that take q

# ---- Acceptance ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_greedy_ties_go_to_the_lowest_id(backend, dtype):
    """Ties within a vector of lanes, across lanes, and across blocks of 1024."""
    for ties in ([0, 1], [5, 6, 7], [3, 1030, 1400], [1023, 1024], [1300, 1499], range(1500)):
        logits = torch.full((1, 1500), -1.0, dtype=dtype)
        logits[0, list(ties)] = 2.0
        assert drafted(backend, logits, 0.0).tokens.tolist() == [min(ties)]
        for token, accepted in ((min(ties), 1), (max(ties), 0)):
            for rule in rules_for(backend, max(ties)):
                inputs = step([[0.0] * 1500] * 2, [token], None, 1, 0.0, rule=rule)
                out = inputs.replace(target_logits=logits.expand(2, -1)[None]).run(backend)
                assert out.num_accepted.tolist() == [accepted]
                assert out.tokens[0].tolist() == [min(ties), min(ties) if accepted else -1]


def test_greedy_takes_zero_of_either_sign_for_the_same(backend):
    for row in ([-1.0, -0.0, 0.0], [-1.0, 0.0, -0.0]):
        assert drafted(backend, torch.tensor([row]), 0.0).tokens.tolist() == [1]
        assert step([row], [], None, 1, 0.0).run(backend).tokens.tolist() == [[1]]


@pytest.mark.parametrize("rule", DRAFTED_RULES)
def test_greedy_ignores_draft_logits(backend, rule):
    """At temperature 0 a draft is accepted iff it has the target's largest logit, whatever q is, or without q."""
    for draft in ([[5.0, 0.0, 0.0]], [[NAN, 0.0, 0.0]], [[-INF] * 3], None):
        for token, accepted in ((1, 1), (0, 0)):
            out = step([[0.0, 3.0, 1.0], [2.0, 0.0, 0.0]], [token], draft, 2, 0.0, rule=rule).run(backend)
            assert out.num_accepted.tolist() == [accepted] * 2 and out.status.tolist() == [0, 0]
            assert out.tokens.tolist() == [[1, 0] if accepted else [1, -1]] * 2


TEMPERATURES, DTYPES, VOCABULARIES = (0.001, 0.3, 1.0, 2.5), (torch.float32, torch.bfloat16, torch.float16), (7, 1300)


def every_other_one_nightly() -> Iterator:
    """Of vocabularies, dtypes and temperatures, so that each two of them meet every day."""
    for (i, vocabulary), (j, dtype), (k, temperature) in itertools.product(
        *map(enumerate, (VOCABULARIES, DTYPES, TEMPERATURES))
    ):
        marks = [pytest.mark.nightly] * ((i + j + k) % 2)
        yield pytest.param(vocabulary, dtype, temperature, marks=marks, id=f"{vocabulary}-{dtype}-{temperature}")


@pytest.mark.parametrize(("vocabulary", "dtype", "temperature"), every_other_one_nightly())
def test_equal_models_are_always_accepted(backend, dtype, temperature, vocabulary):
    n = max(2, seeds(backend) // (1 if vocabulary < 1024 else 12))
    row = torch.randn(1, vocabulary, generator=torch.Generator().manual_seed(1)).to(dtype)
    many, seed = row.expand(n, -1), torch.arange(n).to(device_of(backend))
    for rule in rules_for(backend, int(10 * temperature) + vocabulary):
        first, second = (drafted(backend, many, temperature, seed=seed, rule=rule, offset=i) for i in range(2))
        tokens = torch.stack([first.tokens, second.tokens], 1)
        inputs = step([[0.0]] * 3, [0, 0], None, n, temperature, rule=rule)
        inputs = inputs.replace(target_logits=row.expand(n, 3, -1), draft_tokens=tokens)
        statistics = tuple(torch.stack([getattr(d, name) for d in (first, second)], 1) for name in ("cutoff", "lse"))
        forms = [{"draft_logits": row.expand(n, 2, -1), "draft_stats": stats} for stats in (None, statistics)]
        for form in forms if rule in DRAFTED_RULES else [{}]:
            out = inputs.replace(**form).run(backend)
            assert (out.num_accepted == 2).all() and (out.status == 0).all() and (out.num_emitted == 3).all()
            assert torch.equal(out.tokens[:, :2], tokens)


@pytest.mark.parametrize("rule", RULES)
def test_equal_filtered_models_are_always_accepted(backend, rule):
    """With the same logits, q equals p after filters and penalties, which count drafts."""
    both = rule in DRAFTED_RULES and backend != "triton"
    for form in ({}, {"stats": True}) if both else ({},):
        for random_state in range(3 if backend != "triton" else 1):
            sampling = {
                "top_k": (0, 9),
                "top_p": (0.8, 1.0, 0.5),
                "min_p": (0.02, 0.0),
                "frequency_penalty": (0.7, 0.0),
            }
            sampling |= {"temperature": (0.7, 1.3), "table": 6}
            inputs = random_step(
                12 if backend != "triton" else 3, 3, 40, rule=rule, random_state=random_state, **sampling
            )
            tokens, drawn = inputs.draft_tokens[:, :0], []
            for i in range(3):
                inputs = inputs.replace(draft_tokens=tokens)
                drawn.append(inputs.draft(inputs.target_logits[:, i], i, backend))
                tokens = torch.cat([tokens, drawn[-1].tokens[:, None]], 1)
            q = {"draft_logits": inputs.target_logits[:, :3] if rule in DRAFTED_RULES else None}
            if form:
                q["draft_stats"] = tuple(torch.stack([getattr(d, n) for d in drawn], 1) for n in ("cutoff", "lse"))
            out = inputs.replace(draft_tokens=tokens, **q).run(backend)
            assert (out.num_accepted == 3).all() and torch.equal(out.tokens[:, :3], tokens)


@pytest.mark.parametrize("rule", DRAFTED_RULES)
def test_no_residual_mass_accepts(backend, rule):
    """q > p everywhere, because of an lse that is too small, so the residual has no mass: both drafts are accepted all
    the same, and a bonus token follows."""
    row, n = [0.3, -0.2, 1.0, 0.5], seeds(backend)
    for drafts in ([2], [2, 3, 0]):
        k = len(drafts)
        lse = torch.tensor(row).logsumexp(0).expand(n, k) - 0.5
        inputs = step([row] * (k + 1), drafts, [row] * k, n, draft_stats=(torch.full((n, k), -INF), lse), rule=rule)
        out = inputs.run(backend)
        assert (out.num_accepted == k).all() and (out.tokens[:, :k].cpu() == torch.tensor(drafts)).all()
        assert (out.num_emitted == k + 1).all() and only(out.tokens[:, k], {0, 1, 2, 3})
        assert (out.status == 0).all()


@pytest.mark.parametrize("rule", DRAFTED_RULES)
def test_no_residual_mass_and_p_zero_draws_from_p(backend, rule):
    """As above, but p(x) = 0: the draft must not be accepted."""
    n = seeds(backend)
    target, draft = [0.3, -0.2, -INF, 0.5], [0.3, -0.2, 1.0, 0.5]
    lse = torch.tensor(target).logsumexp(0).expand(n, 1) - 0.5
    statistics = (torch.full((n, 1), -INF), lse)
    out = step([target, target], [2], [draft], n, draft_stats=statistics, rule=rule).run(backend)
    assert (out.num_accepted == 0).all() and (out.tokens[:, 0] != 2).all() and (out.tokens[:, 0] >= 0).all()
    assert only(out.tokens[:, 0], {0, 1, 3})


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("draft", [None, [[0.0, 4.0, 0.0]]], ids=["one_hot", "full"])
def test_p_zero_is_never_accepted(backend, draft, rule):
    """Neither a masked token nor one that a filter drops is accepted."""
    for target, filters in (
        ([1.0, -INF, 0.5], {}),
        ([1.0, -0.5, 0.5], {"top_k": 2}),
        ([1.0, -0.5, 0.5], {"min_p": 0.5}),
    ):
        inputs = step([target, [0.0] * 3], [1], draft, seeds(backend), rule=rule, **filters)
        if draft and filters:  # q without filters, which would leave the draft alone
            inputs = inputs.replace(draft_logits=None if rule == "coupled" else inputs.draft_logits)
        out = inputs.run(backend)
        assert (out.num_accepted == 0).all() and (out.status == 0).all()
        assert only(out.tokens[:, 0], {0, 2}) and (out.tokens[:, 1] == -1).all()


@pytest.mark.parametrize("rule", DRAFTED_RULES)
@pytest.mark.parametrize("form", ["full", "filtered", "cutoff", "reduced"])
def test_q_zero_rejects_and_says_so(backend, form, rule):
    """The recovered token comes from max(0, p - q), which has no mass at token 0, where q > p."""
    n = seeds(backend)
    target = [[0.0, 0.0, 0.0, 0.0], [0.0] * 4]
    full = step(target, [1], [[2.0, -INF, 0.0, -1.0]], n, rule=rule)
    filtered = full.replace(draft_logits=torch.tensor([[[2.0, -9.0, 0.0, -1.0]]]).expand(n, -1, -1))
    log_q = torch.tensor([2.0, 0.0, -1.0]).log_softmax(0)
    inputs = {
        "full": full,
        "filtered": filtered.replace(params=SamplingParams(top_k=3)),
        "cutoff": filtered.replace(draft_stats=(torch.full((n, 1), -1.0), (2.0 - log_q[0]).expand(n, 1))),
        "reduced": full.replace(draft_logits=full.draft_logits[..., [0, 2, 3]], d2t=torch.tensor([0, 2, 3])),
    }[form]
    out = inputs.run(backend)
    assert (out.num_accepted == 0).all() and (out.status == Status.DRAFT_ZERO_PROBABILITY).all()
    assert only(out.tokens[:, 0], {1, 2, 3})


# ---- Tokens ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draft_logits", [False, True], ids=["one_hot", "full"])
@pytest.mark.parametrize(
    ("token", "status"),
    [(-1, 0), (-2, 128), (6, 128), (2**31, 128), (2**32 + 1, 128), (2**62, 128), (-(2**63), 128)],
)
def test_draft_token_out_of_range(backend, token, status, draft_logits):
    """It ends that sequence's drafts, also if its id would be valid after truncation to 32 bits."""
    row, n = [0.5, 1.0, -1.0, 0.0, 0.2, 0.3], 2
    draft = [row] * 3 if draft_logits else None
    target = [
        [-INF, 0.0, *[-INF] * 4],
        row,
        row,
        row,
    ]  # row 0 accepts token 1 with certainty, for q = target or one-hot
    if draft:
        draft[0] = target[0]
    for rule in rules_for(backend, token):
        out = step(target, [1, token, 2], draft, n, rule=rule).run(backend)
        alone = step(target, [1, 0, 2], draft, n, rule=rule, num_drafts=torch.ones(n, dtype=torch.int64)).run(backend)
        assert (out.status == status).all() and (out.num_accepted == 1).all()
        assert torch.equal(out.tokens, alone.tokens)


# ---- Shapes, memory --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("sampling", [{}, {"top_k": (3,), "table": 4, "stats": True}], ids=["plain", "all"])
def test_empty_batch(backend, rule, sampling):
    inputs = random_step(0, 3, 20, rule=rule, log_probs=True, **sampling)
    out = inputs.run(backend)
    assert [tuple(t.shape) for t in out] == [(0, 4), (0,), (0,), (0,), (0, 4), (0, 4)]
    drawn = inputs.draft(torch.zeros(0, 20), 0, backend)
    assert [tuple(t.shape) for t in drawn] == [(0,)] * 5


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("form", [{}, {"kind": "one_hot"}, {"stats": True, "table": 4, "top_p": 0.9}], ids=str)
def test_no_drafts(backend, form, rule):
    out = random_step(5, 0, 20, random_state=14, rule=rule, log_probs=True, **form).run(backend)
    assert out.tokens.shape == (5, 1) and ((out.tokens >= 0) & (out.tokens < 20)).all()
    assert not out.num_accepted.any() and not out.status.any() and (out.num_emitted == 1).all()
    assert (out.log_probs <= 0).all() and (out.raw_log_probs < 0).all()


@pytest.mark.parametrize("rule", RULES)
def test_draft_logits_without_drafts(backend, rule):
    """[B, 0, V] is a valid q."""
    inputs = random_step(3, 0, 20, rule=rule)
    out = inputs.run(backend)
    if rule in DRAFTED_RULES:
        for draft_logits in (None, torch.zeros(3, 0, 20)):
            assert identical(inputs.replace(draft_logits=draft_logits).run(backend), out)
    assert out.tokens.shape == (3, 1)


@pytest.mark.parametrize("rule", RULES)
def test_one_token(backend, rule):
    """V = 1: everything is certain, at any temperature and with any filters."""
    n = 1 if backend == "triton" else 4
    for temperature in (0.0, 1.0):
        for filters in ({}, {"top_k": 5}, {"top_p": 0.0}, {"min_p": 1.0}):
            inputs = step([[0.7]] * 3, [0, 0], [[-3.0]] * 2, n, temperature, rule=rule, log_probs=True, **filters)
            out = inputs.run(backend)
            assert (out.tokens == 0).all() and (out.num_accepted == 2).all() and (out.status == 0).all()
            assert (
                torch.allclose(out.log_probs, torch.zeros(n, 3), atol=1e-6) and (out.raw_log_probs.abs() < 1e-6).all()
            )


@pytest.mark.parametrize("rule", RULES)
def test_every_slot_is_defined(backend, rule):
    """Accepted drafts, one token, then -1, whatever the memory held before."""
    for random_state, sampling in enumerate(
        ({}, {"top_p": (0.9, 0.4), "table": 4}, {"kind": "one_hot", "log_probs": True})
    ):
        inputs = random_step(6, 3, 30, temperature=(0.0, 1.0), random_state=random_state, rule=rule, **sampling)
        inputs = inputs.replace(num_drafts=torch.arange(6) % 4, target_logits=inputs.target_logits.clone())
        inputs.target_logits[4, 1] = NAN
        garbage = [torch.full((6, 4), 2**40, device=device_of(backend)) for _ in range(16)]
        del garbage  # the outputs are likely to get these freed blocks
        out = inputs.run(backend)
        for b in range(6):
            n, tokens = int(out.num_accepted[b]), out.tokens[b].tolist()
            emitted = n if out.status[b] & Status.TARGET_NAN else n + 1
            assert out.num_emitted[b] == emitted and n <= int(inputs.num_drafts[b])
            assert tokens[:n] == inputs.draft_tokens[b, :n].tolist()
            assert all(0 <= t < 30 for t in tokens[:emitted])
            assert tokens[emitted:] == [-1] * (4 - emitted)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("form", [{"stats": True}, {"reduced": 700}, {"kind": "one_hot"}], ids=str)
def test_inputs_are_never_written(backend, form, rule):
    """Neither the gaps of a view nor NaN rows are written."""
    sampling = {"temperature": (0.0, 1.0), "top_k": (9, 0), "top_p": (1.0, 0.9), "table": 5, "presence_penalty": (0.5,)}
    inputs = random_step(3, 2, 1100, random_state=15, rule=rule, log_probs=True, **sampling, **form)
    inputs = inputs.replace(num_drafts=torch.tensor([2, 1, 0]))
    inputs.target_logits[2, 0] = NAN
    inputs = inputs.to(device_of(backend))
    tensors = [*inputs.tensors(), *([] if inputs.d2t is None else [inputs.d2t])]
    before = [t.clone() for t in tensors]
    inputs.run(backend)
    inputs.replace(d2t=None).draft(inputs.target_logits[:, 1], 1, backend)
    assert identical(tensors, before)


@pytest.mark.large
@pytest.mark.parametrize("axis", ["batch", "row"])
def test_offsets_beyond_31_bits(backend, axis):
    """Views whose last element lies more than 2^31 elements after the first. Only few pages are touched."""
    shape, far = (2, 3, 1100), 2**31 + 5000
    strides = (far, 1100, 1) if axis == "batch" else (4000, far // 2, 1)
    inputs = random_step(2, 2, 1100, dtype=torch.bfloat16, random_state=16)
    buffer = torch.empty(far + 8000, dtype=torch.bfloat16, device=device_of(backend))
    target = buffer.as_strided(shape, strides)
    target.copy_(inputs.target_logits)
    near = inputs.run(backend)
    assert identical(inputs.replace(target_logits=target).run(backend), near)
    drafts = target[:, 2] if axis == "row" else target[:, 0]
    assert identical(drafted(backend, drafts), drafted(backend, drafts.contiguous()))
