"""Which random numbers a whole text is drawn with. The independence of steps rests on it, and the distribution of a
single step does not show it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from support.exact import Rows

from specdec_kernels import SamplingParams, draft_step, speculative_step
from specdec_kernels.backends import reference

VOCABULARY, LENGTH = 6, 12
Number = tuple[int, int, int, int, int]  # seed, position, offset, stream, index


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> Counter[Number]:
    """How often each random number was requested. Blocks have four tokens here, so that there are two of them."""
    used: Counter[Number] = Counter()
    philox = reference.philox

    def recording(seed, index, position, offset, stream):
        for s, p, row in zip(seed.tolist(), position.tolist(), index.tolist(), strict=True):
            used.update((s, p, offset, stream, n) for n in row)
        return philox(seed, index, position, offset, stream)

    monkeypatch.setattr(reference, "philox", recording)
    monkeypatch.setattr(reference, "BLOCK", 4)
    return used


def steps(rule: str, num_drafts: int, *, one_hot: bool = False) -> Iterator[list[int]]:
    """What every step emits until the text has at least LENGTH tokens. The models depend on the last token."""
    target, draft = (Rows.random(VOCABULARY, 1, random_state).table.float() for random_state in (1, 2))
    text: list[int] = []
    while len(text) < LENGTH:
        common = {"params": SamplingParams(), "seed": 3, "position": len(text), "rule": rule, "backend": "reference"}
        row = [text[-1] + 1 if text else 0]  # the row of the tables for this last token
        drawn = []
        for i in range(num_drafts):
            drawn.append(draft_step(draft[row[-1:]], offset=i, **common))
            row.append(int(drawn[-1].tokens) + 1)
        q: dict = {"draft_logits": None}
        if not one_hot and rule != "coupled":
            q["draft_logits"] = draft[None, row[:-1]]
        out = speculative_step(target[None, row], torch.tensor([row[1:]], dtype=torch.int64) - 1, **q, **common)
        emitted = out.tokens[0, : int(out.num_emitted)].tolist()
        text += emitted
        yield emitted


@pytest.mark.parametrize(("rule", "form"), [(r, f) for r in ("token", "block") for f in ("full", "one_hot")])
def test_no_number_serves_twice(used, rule, form):
    """In a whole decoded text, no two decisions use the same random number. Otherwise ``block`` would be biased, since
    it uses the numbers of positions that it then does not decide."""
    emitted = list(steps(rule, 3, one_hot=form == "one_hot"))
    assert {1} < {len(tokens) for tokens in emitted}, "some drafts are accepted, not all"
    assert len(used) > 100
    assert max(used.values()) == 1, [number for number, times in used.items() if times > 1][:5]


def test_coupled_noise_belongs_to_its_position(used):
    """A random number belongs to a token and an absolute position. Draft and target of that position use it in every
    step that reaches the position, until a step decides it, and never afterwards."""
    length, seen, again = 0, set(), set()
    for emitted in steps("coupled", 3):
        assert {(seed, offset, stream) for seed, _, offset, stream, _ in used} == {(3, 0, reference.RACE)}
        assert {index for *_, index in used} == set(range(VOCABULARY))
        positions = {position for _, position, *_ in used}
        assert positions == set(range(length, length + 4))  # no position that was decided already
        assert {used[number] for number in used if number[1] < length + 3} == {2}  # its draft and its target
        length += len(emitted)
        again |= positions & seen
        seen |= positions
        used.clear()
    assert again


@pytest.mark.parametrize("num_drafts", [1, 2, 4])
def test_coupled_text_is_that_of_plain_sampling(num_drafts):
    """The texts are equal token for token, whatever K: noise is used again only at positions that were not decided."""
    plain = sum(steps("coupled", 0), [])
    assert len(plain) == LENGTH
    assert sum(steps("coupled", num_drafts), [])[:LENGTH] == plain


def scrambled_beyond(monkeypatch: pytest.MonkeyPatch, last: torch.Tensor) -> None:
    """Replaces the random numbers of positions after ``last`` [B]."""
    philox = reference.philox

    def other(seed, index, position, offset, stream):
        after = (position > last)[:, None]
        return torch.where(after, philox(seed + 1, index, position, offset, stream),
                           philox(seed, index, position, offset, stream))  # fmt: skip

    monkeypatch.setattr(reference, "philox", other)


def test_coupled_step_depends_on_no_noise_after_its_end(monkeypatch):
    """This is why random numbers may be used again: where a step ends, and what it emits, depends only on the numbers
    up to that position."""
    batch, num_drafts = 500, 3
    target, draft = (Rows.random(VOCABULARY, num_drafts, random_state) for random_state in (4, 5))

    def step():
        common = {"params": SamplingParams(), "seed": torch.arange(batch), "position": 7, "rule": "coupled"}
        number, rows, drafts = torch.zeros(batch, dtype=torch.int64), [target.table[0].expand(batch, -1)], []
        for i in range(num_drafts):
            drafts.append(draft_step(draft.table[number], offset=i, backend="reference", **common).tokens)
            number = number * VOCABULARY + drafts[-1] + 1
            rows.append(target.table[number])
        return speculative_step(torch.stack(rows, 1), torch.stack(drafts, 1), None, backend="reference", **common)

    out = step()
    assert set(out.num_accepted.tolist()) == {0, 1, 2, 3}
    with monkeypatch.context() as patch:
        scrambled_beyond(patch, 7 + out.num_accepted)
        assert torch.equal(step().tokens, out.tokens)
    with monkeypatch.context() as patch:  # numbers of one position earlier do change the step
        scrambled_beyond(patch, 6 + out.num_accepted)
        assert (step().tokens != out.tokens).any(1).float().mean() > 0.5
