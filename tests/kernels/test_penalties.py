"""Penalties, biases, bans and early ends against transformers' processors, or a plain definition where it has none.

Of a draft's row, lse, log q of the drawn token, and the log-probabilities of the most likely tokens are compared. Of
the rows of a step, the log-probabilities of the emitted tokens are compared."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import BACKENDS
from transformers.generation import logits_process as processors

from specdec_kernels import DraftChildren, SamplingParams, Status, TokenTable, draft_children
from specdec_kernels.testing import StepInputs, device_of

INF = float("inf")
FIRST = 5  # absolute position of the step's first token


@dataclasses.dataclass
class Text:
    """One sequence's past, with its penalties, biases and bans."""

    prompt: list[int]
    generated: list[int]
    bias: dict[int, float] = dataclasses.field(default_factory=dict)
    ends: tuple[int, ...] = ()
    min_new_tokens: int = 0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0

    def scores(self, logits: torch.Tensor, drafts: list[int]) -> torch.Tensor:
        """[V] float64: logits [V] after transformers' processors, after these drafts."""
        generated = self.generated + drafts
        tokens, scores = torch.tensor([self.prompt + generated]), logits.double()[None]
        size = logits.shape[0]
        finite = {(t,): b for t, b in self.bias.items() if b != -INF and t < size}
        if finite:
            scores = processors.SequenceBiasLogitsProcessor(finite)(tokens, scores)
        inside = tokens[tokens < size][None]  # transformers 5.17 fails on ids beyond the vocabulary
        scores = processors.RepetitionPenaltyLogitsProcessor(self.repetition)(inside, scores)
        for token in {*generated}:
            if token < size:
                scores[0, token] -= self.presence + self.frequency * generated.count(token)
        if banned := [[t] for t, b in self.bias.items() if b == -INF and t < size]:
            scores = processors.NoBadWordsLogitsProcessor(banned)(tokens, scores)
        if self.ends:
            least = processors.MinNewTokensLengthLogitsProcessor(len(self.prompt), self.min_new_tokens, [*self.ends])
            scores = least(tokens, scores)
        return scores[0]


def table_of(texts: list[Text], entries: int | None = None) -> TokenTable:
    """The table of these texts, with ``entries`` columns or as many as needed."""
    tokens = [sorted({*text.prompt, *text.generated, *text.bias}) for text in texts]
    width = max(map(len, tokens)) if entries is None else entries

    def column(values: list[list], fill, dtype: torch.dtype) -> torch.Tensor:
        padded = [row + [fill] * (width - len(row)) for row in values]
        return torch.tensor(padded, dtype=dtype).reshape(len(texts), width)

    each = list(zip(texts, tokens, strict=True))
    most = max(len(text.ends) for text in texts)
    ends = torch.tensor([[*text.ends, *[-1] * (most - len(text.ends))] for text in texts]) if most else None
    first_end = torch.tensor([FIRST - len(text.generated) + text.min_new_tokens for text in texts])
    return TokenTable(
        column(tokens, SamplingParams.TABLE_PADDING, torch.int64),
        column([[text.bias.get(t, 0.0) for t in ids] for text, ids in each], 0.0, torch.float32),
        column([[t in text.prompt for t in ids] for text, ids in each], False, torch.bool),
        column([[text.generated.count(t) for t in ids] for text, ids in each], 0, torch.int32),
        ends,
        None if ends is None else first_end,
    )


def params_of(texts: list[Text], **more) -> SamplingParams:
    return SamplingParams(
        **more,
        repetition_penalty=torch.tensor([text.repetition for text in texts]),
        presence_penalty=torch.tensor([text.presence for text in texts]),
        frequency_penalty=torch.tensor([text.frequency for text in texts]),
    )


def step_of(texts: list[Text], target: torch.Tensor, drafts: list[list[int]], **more) -> StepInputs:
    """One step of every text, with one-hot drafts unless ``more`` gives q."""
    batch = len(texts)
    more = {"draft_logits": None, "params": params_of(texts), "table": table_of(texts), **more}
    return StepInputs(
        target, torch.tensor(drafts, dtype=torch.int64).reshape(batch, -1), seed=torch.arange(batch),
        position=torch.full((batch,), FIRST), **more,
    )  # fmt: skip


def likely(backend: str, inputs: StepInputs, logits: torch.Tensor, width: int) -> DraftChildren:
    """The most likely tokens of q for logits [B, V], after the drafts."""
    inputs, depth = inputs.to(device_of(backend)), inputs.draft_tokens.shape[1]
    out = draft_children(
        logits.to(device_of(backend)), width, inputs.params, seed=inputs.seed, position=inputs.position, offset=depth,
        table=inputs.table, drafts=inputs.draft_tokens, sampled=False, backend=backend,
    )  # fmt: skip
    return DraftChildren(*(t.cpu() for t in out))


def assert_distribution(backend: str, texts: list[Text], logits: torch.Tensor, drafts: list[list[int]], **more) -> None:
    """Asserts that q for logits [B, V], after these drafts, is the softmax of transformers' scores."""
    offset = len(drafts[0])
    inputs = step_of(texts, logits[:, None].expand(-1, offset + 1, -1), drafts, **more)
    width = min(logits.shape[1], 16 if is_interpreted(backend) else 1024)
    out = inputs.draft(logits, offset, backend)
    # The CUDA kernels have no children, which show all of q: of theirs, the drawn token's probability and lse are seen.
    children = likely("cpu" if backend == "cuda" else backend, inputs, logits, width)
    for b, text in enumerate(texts):
        scores = text.scores(logits[b], drafts[b])
        want, ids = scores.log_softmax(-1), children.tokens[b]
        ids = ids[ids >= 0]
        assert len({*ids.tolist()}) == len(ids) == min(width, int((want > -INF).sum()))
        got = torch.cat([children.log_q[b, : len(ids)], out.log_q[b, None]])
        torch.testing.assert_close(got.double(), want[torch.cat([ids, out.tokens[b, None]])], rtol=2e-6, atol=2e-5)
        for lse in (out.lse[b], children.lse[b]):
            assert lse.item() == pytest.approx(float(scores.logsumexp(-1)), rel=2e-6, abs=2e-5)
        torch.testing.assert_close(want[ids], want.topk(len(ids)).values, rtol=2e-6, atol=2e-5)
    assert not out.status.any() and not children.status.any()


def is_interpreted(backend: str) -> bool:
    """Whether this is Triton's interpreter, which needs a tenth of a second per row."""
    return backend == "triton" and device_of(backend).type == "cpu"


def rows(*shape: int, random_state: int = 0) -> torch.Tensor:
    return 2 * torch.randn(shape, generator=torch.Generator().manual_seed(random_state))


TEXTS = {
    "nothing": Text([], []),
    "prompt": Text([3, 1, 3], [], repetition=1.3),
    "prompt and output": Text([3, 1], [4, 4, 7], repetition=1.3),
    "below one": Text([3, 1], [4, 7], repetition=0.6),
    "presence": Text([3, 1], [4, 4, 7], presence=0.7),
    "frequency": Text([3, 1], [4, 4, 4, 7], frequency=0.4),
    "rewards": Text([3], [4, 4], presence=-0.7, frequency=-0.4),
    "bias": Text([3], [4], bias={0: 1.5, 4: -2.0, 9: 0.25}),
    "bans": Text([3], [4], bias={4: -INF, 2: -INF}),
    "ends": Text([3], [4, 4], ends=(2, 60), min_new_tokens=9),
    "other ends": Text([3], [4], ends=(5, 7, 90), min_new_tokens=3),
    "beyond": Text([3, 64, 700], [5, 64, 2**40], bias={66: 2.0, 90: -INF}, repetition=1.2, presence=0.5, frequency=0.2),
    "all": Text([3, 1, 1], [4, 4, 7], {4: 0.5, 3: -1.0, 8: -INF}, (), 0, 1.4, 0.3, 0.2),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("drafts", [[], [7], [4, 4, 11]], ids=len)
def test_every_text_in_one_batch(backend, dtype, drafts):
    """Drafts that occurred in the output, in the prompt only, and new ones; sequences with different penalties."""
    texts = list(TEXTS.values())
    assert_distribution(backend, texts, rows(len(texts), 64).to(dtype), [drafts] * len(texts))


@pytest.mark.parametrize("drafts", [[], [0, 3, 0]], ids=len)
@pytest.mark.parametrize("entries", [0, 1, 9, 40])
def test_width_of_the_table(backend, entries, drafts):
    """No entry, one, one per token of the vocabulary, and padding. Drafts are counted even if there is no entry."""
    vocabulary = 9
    used = list(range(min(entries, vocabulary)))
    texts = [Text(used[::2], used[1::2] * 2, {t: 0.1 * t for t in used}, (), 0, 1.5, 0.5, 0.25)] * 3
    assert_distribution(backend, texts, rows(3, vocabulary), [drafts] * 3, table=table_of(texts, entries))


def test_entries_at_the_borders_of_blocks(backend):
    """At the borders of blocks of 1024 tokens and of vectors of lanes."""
    vocabulary = 2100
    borders = [0, 1, 31, 32, 511, 512, 1022, 1023, 1024, 1025, 2047, 2048, 2099, 2100]
    texts = [
        Text(borders[::2], borders[1::2] + [1024], {t: 6.0 + 0.1 * t % 1 for t in borders}, (), 0, 1.2, 0.5, 0.25),
        Text([], [], {1023: 7.0, 1024: -INF}),
        Text([], [], {1023: -INF, 1024: 7.0}),
    ]
    assert_distribution(backend, texts, rows(3, vocabulary), [[2047, 1023]] * 3)


@pytest.mark.parametrize("token", [0, 1022, 1023, 1024, 2047])
def test_a_single_entry_at_the_border_of_a_block(backend, token):
    """In whole blocks of float32, which are read in place unless the table has an entry in them."""
    text = Text([1], [2], bias={token: 60.0})
    inputs = step_of([text], torch.zeros(1, 1, 2048), [[]])
    assert inputs.run(backend).tokens.tolist() == [[token]]
    assert inputs.draft(torch.zeros(1, 2048), 0, backend).tokens.tolist() == [token]


@pytest.mark.parametrize("drafts", [[], [1, 2]], ids=len)
def test_the_sign_decides_how_repetition_is_penalised(backend, drafts):
    """By the sign after bias, negative logits are multiplied; zeros of either sign and -inf stay as they are."""
    logits = torch.tensor([[-3.0, 2.0, 0.0, -0.0, -INF, 1.0, -1.0]])
    texts = [Text([0, 1, 2, 3, 4, 5, 6], [], {5: -2.0, 6: 2.0}, repetition=1.7, presence=0.1)]
    assert_distribution(backend, texts, logits, [drafts])


def test_filters_see_what_penalties_leave(backend):
    """A penalty removes a token from the top k, a bias adds another one, and the cutoff is an adjusted logit."""
    logits = torch.tensor([[5.0, 4.0, 3.0, 2.0, -1.0]])
    text = Text([0], [1], {4: 5.0}, presence=3.0, repetition=4.0)
    params = params_of([text], top_k=2)
    inputs = step_of([text], logits[:, None], [[]], params=params)
    out = inputs.draft(logits, 0, backend)
    assert likely("cpu" if backend == "cuda" else backend, inputs, logits, 5).tokens.tolist() == [[4, 2, -1, -1, -1]]
    assert out.tokens.item() in (2, 4) and out.cutoff.item() == 3.0
    assert out.lse.item() == pytest.approx(torch.tensor([3.0, 4.0]).logsumexp(0).item())


def test_temperature_zero_takes_the_largest_of_what_penalties_leave(backend):
    logits = rows(2, 1100)
    best = logits.topk(3).indices
    texts = [Text([], [], {int(b[0]): -INF, int(b[1]): -8.0}) for b in best]
    inputs = step_of(texts, logits[:, None], [[]] * 2, params=params_of(texts, temperature=0.0))
    assert inputs.draft(logits, 0, backend).tokens.tolist() == best[:, 2].tolist()
    assert inputs.run(backend).tokens[:, 0].tolist() == best[:, 2].tolist()


# ---- Rows of a step --------------------------------------------------------------------------------------------------


def many(text: Text, backend: str, most: int = 60) -> list[Text]:
    """The number of seeds that the backend is fast enough for."""
    return [text] * (4 if is_interpreted(backend) else most)


@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
@pytest.mark.parametrize(
    ("backend", "name"),
    [(b, n) for b in BACKENDS for n in TEXTS if not is_interpreted(b) or n in ("all", "beyond", "bans")],
)
def test_rows_of_a_step_count_the_drafts_before_them(backend, name, rule):
    """The log-probability of every emitted token is that of transformers' scores after the tokens emitted before it."""
    drafts = [11, 4, 4]
    texts = many(TEXTS[name], backend, 20)
    target = rows(1, 4, 24, random_state=7)
    target[:, [0, 1, 2], drafts] += 5  # makes them likely to be accepted
    out = step_of(
        texts, target.expand(len(texts), -1, -1), [drafts] * len(texts), rule=rule, log_probs=True
    ).run(backend)  # fmt: skip
    want = [texts[0].scores(target[0, j], drafts[:j]).log_softmax(-1) for j in range(4)]
    raw = target[0].double().log_softmax(-1)
    assert not out.status.any() and (out.num_emitted == out.num_accepted + 1).all()
    assert out.num_accepted.max() > 0 or is_interpreted(backend)  # too few sequences there to be sure
    for j in range(4):
        emitted = out.num_emitted > j
        tokens, got = out.tokens[:, j], (out.log_probs[:, j].double(), out.raw_log_probs[:, j].double())
        for of_token, expected in zip(got, (want[j], raw[j]), strict=True):
            torch.testing.assert_close(of_token[emitted], expected[tokens[emitted]], rtol=1e-5, atol=1e-5)
            assert of_token[~emitted].isnan().all() and (tokens[~emitted] == -1).all()


@pytest.mark.parametrize("stats", [False, True])
@pytest.mark.parametrize("rule", ["token", "block"])
def test_q_is_penalised_like_p(backend, rule, stats):
    """The same model drafts and verifies. Every draft is accepted, so q and p of each row count the same drafts."""
    texts = many(Text([3, 1, 1], [4, 4, 7], {4: 0.5, 3: -1.0, 8: -INF}, (2,), 2, 1.4, 0.9, 0.6), backend)
    logits = rows(1, 4, 12).expand(len(texts), -1, -1)
    inputs = step_of(texts, logits, [[]] * len(texts))
    cutoff, lse = [], []
    for i in range(3):
        drawn = inputs.draft(logits[:, i], i, backend)
        inputs = inputs.replace(draft_tokens=torch.cat([inputs.draft_tokens, drawn.tokens[:, None]], 1))
        cutoff.append(drawn.cutoff), lse.append(drawn.lse)
    handed_over = (torch.stack(cutoff, 1), torch.stack(lse, 1)) if stats else None
    out = inputs.replace(draft_logits=logits[:, :3], draft_stats=handed_over, rule=rule).run(backend)
    assert (out.num_accepted == 3).all() and torch.equal(out.tokens[:, :3], inputs.draft_tokens)
    repeated = any(len({*row}) < 3 for row in inputs.draft_tokens.tolist())
    assert repeated or is_interpreted(backend)  # too few sequences there to be sure


@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
def test_ends_come_no_earlier_than_they_may(backend, rule):
    """``first_end`` is in the middle of a step. Before it the end token is not emitted, although it is drafted and by
    far the most likely; at ``first_end`` it is emitted."""
    target = torch.zeros(1, 4, 6)
    target[..., 2] = 20.0
    for first in (1, 2) if is_interpreted(backend) else range(5):
        texts = many(Text([1], [0], {}, (2, 5, 99), 1 + first), backend, 20)
        inputs = step_of(texts, target.expand(len(texts), -1, -1), [[2, 2, 2]] * len(texts), rule=rule)
        out = inputs.run(backend)
        if first == 0:
            assert (out.tokens == 2).all() and (out.num_accepted == 3).all()
        else:
            assert (out.num_accepted == 0).all() and {*out.tokens[:, 0].tolist()} <= {0, 1, 3, 4}
        ordinary = inputs.replace(draft_tokens=torch.tensor([[0, 1, 3]]).expand(len(texts), -1))
        tokens = ordinary.run(backend).tokens
        for j in range(4):
            here = tokens[tokens[:, j] >= 0, j]
            assert (here == 2).all() if j >= first else not ((here == 2) | (here == 5)).any()


def test_ends_are_banned_in_draft_step(backend):
    logits = torch.tensor([[0.0, 0.0, 30.0, 0.0]])
    for offset in range(3):
        texts = [Text([], [], {}, (2,), n) for n in range(4)]
        inputs = step_of(texts, logits[:, None].expand(4, offset + 1, -1), [[0] * offset] * 4)
        tokens = inputs.draft(logits.expand(4, -1), offset, backend).tokens.tolist()
        assert [t == 2 for t in tokens] == [offset >= n for n in range(4)]


# ---- Bans ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("vocabulary", [7, 1100])
def test_bans_that_leave_one_token(backend, vocabulary, temperature, rule):
    left = vocabulary - 3
    texts = [Text([], [], {t: -INF for t in range(vocabulary) if t != left})] * 3
    logits = rows(3, 2, vocabulary)
    logits[:, :, left] = -50.0
    params = params_of(texts, temperature=temperature)
    inputs = step_of(texts, logits, [[left], [0], [-1]], rule=rule, params=params, log_probs=True)
    drawn = inputs.draft(logits[:, 0], 0, backend)
    assert drawn.tokens.tolist() == [left] * 3 and drawn.log_q.tolist() == [0.0] * 3
    out = inputs.run(backend)
    assert out.tokens.tolist() == [[left, left], [left, -1], [left, -1]] and not out.status.any()
    assert out.log_probs[0].tolist() == [0.0, 0.0] and out.num_emitted.tolist() == [2, 1, 1]


@pytest.mark.parametrize("rule", ["token", "block", "coupled"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bans_that_leave_nothing(backend, temperature, rule):
    """The row has no distribution, and the neighbours are not affected."""
    vocabulary = 7
    texts = [Text([], [], {}), Text([], [], {t: -INF for t in range(vocabulary)})]
    logits = rows(2, 2, vocabulary)
    params = params_of(texts, temperature=temperature)
    inputs = step_of(texts, logits, [[2], [2]], rule=rule, params=params, log_probs=True)
    drawn, out = inputs.draft(logits[:, 0], 0, backend), inputs.run(backend)
    assert drawn.tokens[0] >= 0 and drawn.tokens[1] == -1 and drawn.status.tolist() == [0, Status.DRAFT_EMPTY]
    assert out.status.tolist() == [0, Status.TARGET_EMPTY] and out.tokens[1].tolist() == [-1, -1]
    assert out.num_emitted[1] == 0 and out.num_emitted[0] >= 1 and out.log_probs[1].isnan().all()


def test_penalties_may_empty_a_later_row_only(backend):
    """All tokens but one are banned, and that one is an end token which is allowed only from the second row on."""
    texts = [Text([], [], {0: -INF, 1: -INF}, (2,), n) for n in (0, 1, 2)]
    logits = torch.zeros(3, 2, 3)
    out = step_of(texts, logits, [[2]] * 3).run(backend)
    assert out.tokens.tolist() == [[2, 2], [-1, -1], [-1, -1]]
    assert out.status.tolist() == [0, Status.TARGET_EMPTY, Status.TARGET_EMPTY]


# ---- Any table -------------------------------------------------------------------------------------------------------

number = st.floats(-4, 4, width=32)
tokens = st.lists(st.integers(0, 14), max_size=6)
biases = st.dictionaries(st.integers(1, 14), st.one_of(number, st.just(-INF)), max_size=5)
repetitions = st.floats(0.25, 4, width=32)
a_text = st.builds(Text, tokens, tokens, biases, st.just((3, 11)), st.integers(0, 9), repetitions, number, number)
any_texts = given(texts=st.lists(a_text, min_size=1, max_size=4), drafts=st.lists(st.integers(0, 12), max_size=3))


@settings(max_examples=60, deadline=None, derandomize=True)
@any_texts
def test_any_text_on_cpu(texts, drafts):
    assert_distribution("cpu", texts, rows(len(texts), 12), [drafts] * len(texts))


@settings(max_examples=6, deadline=None, derandomize=True)
@any_texts
def test_any_text_on_triton(texts, drafts):
    assert_distribution("triton", texts, rows(len(texts), 12), [drafts] * len(texts))


@settings(max_examples=40, deadline=None, derandomize=True)
@any_texts
def test_any_text_on_reference(texts, drafts):
    assert_distribution("reference", texts, rows(len(texts), 12), [drafts] * len(texts))
