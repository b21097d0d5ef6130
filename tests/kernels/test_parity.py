"""Every backend's tokens, counts and status equal the reference's, and its statistics within TOLERANCES, under every
rule, with filters, tables and every form of q.

Where the reference's decision is within a relative 1e-4 of going the other way, a float32 kernel may decide otherwise.
There must be fewer such near-ties than one sequence in a thousand."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import FAST_BACKENDS
from support.arrangements import LAYOUTS, rules_for

from specdec_kernels import SamplingParams, draft_step
from specdec_kernels.ops import RULES
from specdec_kernels.testing import (
    NEAR_TIE,
    StepInputs,
    assert_same_draft,
    assert_same_step,
    random_step,
    reference_draft,
)

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = (F32, BF16, F16)
VOCABULARIES = (1, 2, 5, 16, 33, 257, 1000, 1024, 1025, 5000)
LARGE = (32_000, 128_256)
MIXED = (0.0, 0.5, 1.0, 1.7)
ALLOWED_NEAR_TIES = 1e-3
FORMS = ("full", "stats", "reduced", "one_hot")  # of q
# For the rule that takes no q: drafts of a model, and others.
RULES_AND_FORMS = (*itertools.product(("token", "block"), FORMS), ("coupled", "reduced"), ("coupled", "one_hot"))
# Values that cycle over the sequences of a batch. The cycles have different lengths, so that all combinations occur.
FILTERS = {"top_k": (0, 20, 1, 0, 5), "top_p": (1.0, 0.9, 0.3), "min_p": (0.0, 0.02)}
PENALTIES = {"repetition_penalty": (1.0, 1.3, 0.8), "presence_penalty": (0.0, 0.5), "frequency_penalty": (0.2, -0.1, 0)}
SAMPLING = {
    "plain": {},
    "filters": FILTERS,
    "no entries": {"table": 0, **PENALTIES},
    "bias": {"table": 9},
    "all": {"table": 9, **FILTERS, **PENALTIES},
    "masked": {"allowed": 0.5, "masked_drafts": 2, "table": 9, **FILTERS, **PENALTIES},
}

exploring = functools.partial(settings, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


def form_of(form: str, vocabulary: int) -> dict:
    """``random_step``'s arguments for this form of q."""
    return {
        "full": {},
        "stats": {"stats": True},
        "reduced": {"reduced": (2 * vocabulary + 2) // 3, "stats": vocabulary % 2 == 0},
        "one_hot": {"kind": "one_hot"},
    }[form]


def batch_of(backend: str, vocabulary: int) -> int:
    """A batch size that is large enough to be significant, and small enough for Triton's interpreter."""
    return (3 if vocabulary <= 1025 else 1) if backend == "triton" else (30 if vocabulary <= 1025 else 12)


def compare_steps(backend: str, inputs: StepInputs, context: str = "") -> int:
    return assert_same_step(inputs.run(backend), *inputs.reference(), context)


def expected_draft(inputs: StepInputs, draft_logits: torch.Tensor) -> tuple:
    return reference_draft(inputs, draft_logits, inputs.draft_tokens.shape[1] - 1)


def compare_drafts(backend: str, inputs: StepInputs, draft_logits: torch.Tensor, expected: tuple | None = None) -> int:
    """Compares ``draft_step`` on draft_logits [B, V], as the last draft of a step, with ``expected_draft``. Returns the
    number of drafts that differ by a near-tie."""
    offset = inputs.draft_tokens.shape[1] - 1
    got = inputs.draft(draft_logits, offset, backend)
    expected = expected or expected_draft(inputs, draft_logits)
    return assert_same_draft(got, *expected, inputs, draft_logits, offset)


class Case(NamedTuple):
    """A step, and a draft at its end from ``logits``, if there are some, with what the reference makes of them."""

    context: str
    inputs: StepInputs
    step: tuple
    logits: torch.Tensor | None
    draft: tuple | None


@functools.lru_cache(maxsize=2)  # the backends take turns
def cases(rule: str, form: str, few: bool) -> list[Case]:
    made = []
    dtypes = itertools.cycle(itertools.product(DTYPES, DTYPES))
    for i, (vocabulary, sampling) in enumerate(itertools.product(VOCABULARIES, SAMPLING)):
        # Each form of q with a third of them; fewer if few, since Triton's interpreter needs milliseconds per block.
        if (i + len(form)) % (20 if few else 3):
            continue
        batch, num_drafts = batch_of("triton" if few else "cpu", vocabulary), i % 4
        dtype, draft_dtype = next(dtypes)
        inputs = random_step(
            batch, num_drafts, vocabulary, dtype=dtype, draft_dtype=draft_dtype, temperature=MIXED, rule=rule,
            log_probs=i % 2 == 0, random_state=i, **SAMPLING[sampling], **form_of(form, vocabulary),
        )  # fmt: skip
        inputs = inputs.replace(num_drafts=torch.arange(batch) % (num_drafts + 1) if i % 3 == 0 else None)
        logits = draft = None
        if num_drafts and form != "one_hot":
            logits = inputs.target_logits[:, 0] if inputs.draft_logits is None else inputs.draft_logits[:, -1]
            draft = expected_draft(inputs, logits)
        context = f"V={vocabulary} K={num_drafts} {sampling} {dtype} {draft_dtype}"
        made.append(Case(context, inputs, inputs.reference(), logits, draft))
    return made


# On fibers every day: each rule, and each kernel that reads q. The tests of edges and of reduced vocabularies below
# have the other forms.
ON_FIBERS = (("token", "full"), ("token", "reduced"), ("block", "full"), ("coupled", "reduced"))


def rules_forms_and_backends() -> Iterator:
    for form, backend in itertools.product(RULES_AND_FORMS, FAST_BACKENDS):
        fibers = backend == "cuda" and not torch.cuda.is_available()
        yield pytest.param(*form, backend, marks=[pytest.mark.nightly] * (fibers and form not in ON_FIBERS))


@pytest.mark.parametrize(("rule", "form", "fast_backend"), rules_forms_and_backends())
def test_many_cases(rule, form, fast_backend):
    """Every vocabulary size with every kind of logits, pairs of dtypes in turn and mixed temperatures. There are few
    near-ties."""
    near_ties = sequences = 0
    few = fast_backend == "triton"
    for context, inputs, step, logits, draft in cases(rule, form, few):
        near_ties += assert_same_step(inputs.run(fast_backend), *step, context)
        sequences += len(inputs.seed)
        if logits is not None:
            near_ties += compare_drafts(fast_backend, inputs, logits, draft)
            sequences += len(inputs.seed)
    assert sequences >= (6 if few else 300)
    assert near_ties < max(2, ALLOWED_NEAR_TIES * sequences)


@pytest.mark.parametrize(
    ("rule", "form", "sampling"),
    [("token", "full", "plain"), ("token", "full", "all"), ("block", "stats", "all"), ("block", "reduced", "all"),
     ("block", "one_hot", "filters"), ("coupled", "full", "all")],
)  # fmt: skip
@pytest.mark.parametrize("vocabulary", LARGE)
def test_large_vocabularies(vocabulary, rule, form, sampling):
    for dtype in DTYPES[:: 1 if vocabulary < 100_000 else 2]:
        inputs = random_step(
            3, 1, vocabulary, dtype=dtype, temperature=MIXED, rule=rule, random_state=vocabulary, drafter="cpu",
            **SAMPLING[sampling], **form_of(form, vocabulary),
        )  # fmt: skip
        compare_steps("cpu", inputs, str(dtype))
        if form != "one_hot":
            logits = inputs.target_logits[:, 0] if inputs.draft_logits is None else inputs.draft_logits[:, 0]
            compare_drafts("cpu", inputs, logits)


@pytest.mark.parametrize("rule", ["token", "block"])
def test_listed_tokens_at_the_edges_of_blocks(fast_backend, rule):
    """Where q is of a reduced vocabulary, the first and the last token of a block of 1024 are included."""
    edges, batch = torch.tensor([0, 1023, 1024, 2047, 2048, 2049]), 8 if fast_backend == "triton" else 48
    inputs = random_step(batch, 2, 2050, rule=rule)
    target = torch.full((batch, 3, 2050), -9.0)
    target[..., edges] = inputs.target_logits[..., :6]
    draft = inputs.draft_logits[..., :6]
    tokens = edges[torch.multinomial(draft.softmax(-1).view(-1, 6), 1).view(batch, 2)]
    inputs = inputs.replace(target_logits=target, draft_tokens=tokens, draft_logits=draft, d2t=edges)
    want, margin = inputs.reference()
    assert_same_step(inputs.run(fast_backend), want, margin)


@pytest.mark.parametrize("rule", ["token", "coupled"])
@pytest.mark.parametrize("vocabulary", [40, 2100])
def test_drafts_of_a_reduced_vocabulary(fast_backend, vocabulary, rule):
    """Tables and drawn tokens use the target's ids, and noise uses ids or indices, depending on the rule."""
    batch = batch_of(fast_backend, vocabulary) // 2 + 1
    inputs = random_step(batch, 2, vocabulary, rule=rule, temperature=MIXED, kind="one_hot", **SAMPLING["all"])
    for d2t in (torch.arange(0, vocabulary, 3), torch.tensor([vocabulary - 1]), torch.arange(vocabulary)):
        logits = inputs.target_logits[:, 0, d2t]
        assert compare_drafts(fast_backend, inputs.replace(d2t=d2t), logits) == 0


@pytest.mark.parametrize(("params", "apart"), [({"top_k": 2000}, 1), ({}, 77)])
def test_races_by_words(params, apart):
    """In a race among many, ``cpu`` looks at random words first, and at the logits of few tokens. Where the ids of a
    reduced vocabulary are far apart, it takes few words of each group."""
    logits = torch.randn(64, 4200, generator=torch.Generator().manual_seed(0)) * 0.1
    at = {"seed": torch.arange(64), "position": 0, "offset": 0, "d2t": 50 + apart * torch.arange(4200)}
    drawn, expected = (
        draft_step(logits, SamplingParams(1.0, **params), **at, rule="coupled", backend=b) for b in ("cpu", "reference")
    )
    assert torch.equal(drawn.tokens, expected.tokens)


@pytest.mark.parametrize("sampling", ["plain", "filters"])
@pytest.mark.parametrize("rule", RULES)
def test_near_ties_are_rare(rule, sampling):
    """In ordinary inputs, the reference's margin is rarely small enough for a near-tie."""
    inputs = random_step(
        500, 3, 257, temperature=(0.5, 1.0), random_state=9, rule=rule, drafter="cpu", **SAMPLING[sampling]
    )
    assert (inputs.reference_margin() < NEAR_TIE).double().mean() < 10 * ALLOWED_NEAR_TIES


@exploring(max_examples=100)
@given(data=st.data())
def test_structure_on_cpu(data):
    explore(data, "cpu", most=(5, 4, 3000))


@exploring(max_examples=6)
@given(data=st.data())
def test_structure_on_triton(data):
    explore(data, "triton", most=(3, 3, 1100))


def explore(data: st.DataObject, backend: str, most: tuple[int, int, int]) -> None:
    """A random structure: sizes up to ``most`` (B, K, V), dtypes, rules, sampling parameters, forms of q, raggedness,
    masks, invalid tokens and layouts."""
    batch, num_drafts = data.draw(st.integers(0, most[0]), "batch"), data.draw(st.integers(0, most[1]), "K")
    vocabulary = data.draw(st.one_of(st.integers(1, 40), st.integers(1020, most[2])), "V")
    dtypes = [data.draw(st.sampled_from(DTYPES), name) for name in ("dtype", "draft dtype")]
    sampling = {"temperature": st.sampled_from(MIXED)}
    if data.draw(st.booleans(), "filters"):
        sampling |= {"top_k": st.integers(0, vocabulary + 1), "top_p": st.floats(0, 1), "min_p": st.floats(0, 1)}
    table = data.draw(st.one_of(st.none(), st.integers(0, 12)), "table")
    masks: dict = {}
    if data.draw(st.booleans(), "masks"):
        masks = {"allowed": data.draw(st.floats(0, 1), "allowed"), "masked_drafts": data.draw(st.integers(0, most[1]))}
    if table is not None:
        number = st.floats(-2, 2)
        sampling |= {"repetition_penalty": st.floats(0.5, 2), "presence_penalty": number, "frequency_penalty": number}
    sampling = {
        name: data.draw(st.lists(value, min_size=1, max_size=3), name) for name, value in sampling.items()
    }  # fmt: skip
    rule, form = data.draw(st.sampled_from(RULES_AND_FORMS), "rule and form of q")
    similar = form == "one_hot" or data.draw(st.booleans(), "similar")
    random_state = data.draw(st.integers(0, 1000), "random state")
    inputs = random_step(
        batch, num_drafts, vocabulary, dtype=dtypes[0], draft_dtype=dtypes[1], rule=rule, table=table,
        log_probs=data.draw(st.booleans(), "log probs"), random_state=random_state,
        **masks, **sampling, **({} if similar else {"kind": "opposite"}), **form_of(form, vocabulary),
    )  # fmt: skip
    generator = torch.Generator().manual_seed(random_state)
    if data.draw(st.booleans(), "ragged"):
        inputs = inputs.replace(num_drafts=torch.randint(0, num_drafts + 1, (batch,), generator=generator))
    if data.draw(st.booleans(), "masked"):
        inputs.target_logits[torch.rand(inputs.target_logits.shape, generator=generator) < 0.3] = float("-inf")
    if data.draw(st.booleans(), "strange tokens"):
        strange = torch.rand(inputs.draft_tokens.shape, generator=generator) < 0.2
        tokens = torch.tensor([-1, -2, vocabulary, 2**40])[torch.randint(0, 4, strange.shape, generator=generator)]
        inputs = inputs.replace(draft_tokens=torch.where(strange, tokens, inputs.draft_tokens))
    layout = data.draw(st.sampled_from(sorted(LAYOUTS)), "layout")
    compare_steps(backend, inputs.map(LAYOUTS[layout]))


@pytest.mark.parametrize("position", [0, 2**31 - 1, 2**31, 2**32 - 1, 2**32 + 5, 2**62])
@pytest.mark.parametrize("seed", [0, -1, -(2**63), 2**63 - 1, 2**31, 2**32])
def test_extreme_seeds_and_positions(fast_backend, seed, position):
    for rule in rules_for(fast_backend, seed + position // 3):
        inputs = random_step(2, 1, 20, random_state=3, rule=rule)
        inputs = inputs.replace(seed=torch.full((2,), seed), position=torch.full((2,), position))
        compare_steps(fast_backend, inputs)
