"""Suffix automata against searches of the whole text; the drafter's proposals, memories and limits."""

from __future__ import annotations

import itertools
import math
import sys
import threading
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from specdec import Request, Scheduler, SpeculativeDecoder, SuffixDrafter, SuffixMemories, SuffixMemory
from specdec.drafters.suffix_automaton import ANY, Cursor, SuffixAutomaton, native
from support.drafting import Repeats, check_plain_texts, copied, draft, found, start
from support.models import generate, prompts, tiny_model

exploring = settings(max_examples=100, deadline=None, derandomize=True)
texts = st.lists(st.integers(0, 2), max_size=30)


# ---- the automaton ---------------------------------------------------------------------------------------


def earlier_suffix(text: list[int], longest: int = ANY) -> tuple[int, int]:
    """(length, end) of the longest suffix that also ends before the text does, where it last does."""
    for length in range(min(len(text) - 1, longest), 0, -1):
        for end in range(len(text) - 1, length - 1, -1):
            if text[end - length : end] == text[-length:]:
                return length, end
    return 0, 0


def suffix_in(other: list[int], text: list[int]) -> tuple[int, int]:
    """(length, end) of the longest suffix of ``text`` that stands in ``other``, where it first does."""
    for length in range(min(len(text), len(other)), 0, -1):
        for end in range(length, len(other) + 1):
            if other[end - length : end] == text[-length:]:
                return length, end
    return 0, 0


def text_of(automaton: SuffixAutomaton) -> list[int]:
    """The whole text, with -1, -2, ... as separators."""
    text, separators = [], 0
    while (missing := len(automaton) - len(text)) > 0:
        piece = automaton.copied(len(text), missing)
        if len(piece) < missing:
            separators += 1
            piece.append(-separators)
        text += piece
    return text


@exploring
@given(texts)
def test_longest_suffix(text):
    automaton = SuffixAutomaton()
    for known in range(len(text) + 1):
        assert text_of(automaton) == text[:known]
        assert automaton.longest_suffix() == earlier_suffix(text[:known])
        automaton.extend(text[known : known + 1])


@exploring
@given(
    texts,
    st.integers(1, 3),
    st.sampled_from([1, 3, 5, ANY]),
    st.sampled_from([0.4, 1, 1.5, 2.0, math.inf]),
    st.integers(1, 8),
    st.data(),
)
def test_a_look_is_all_of_it_at_once(text, least, longest, factor, most, data):
    """What follows at the end of the text is not counted, unless it is the first of its kind."""
    automaton, known = SuffixAutomaton(), 0
    while known < len(text):
        known = data.draw(st.integers(known + 1, len(text)))  # several tokens may be new
        length, end = earlier_suffix(text[:known], longest)
        expected = [], 0, (0, 0)
        if length >= least:
            tokens, last = copied(text[:known], end, max(1, int(min(most, factor * length)))), text[known - 1]
            following = [text[i] for i in range(1, known) if text[i - 1] == last]
            counted = [text[i] for i in range(1, known - 1) if text[i - 1] == last].count(tokens[0])
            expected = tokens, length, (len(following), max(counted, 1))
        assert automaton.look(text[:known], least, longest, factor, most) == expected
        assert len(automaton) == known and text_of(automaton) == text[:known]


@exploring
@given(st.lists(texts, max_size=4), st.lists(texts, max_size=4), texts)
def test_cursor_sees_the_text_as_it_was(before, after, other):
    """No match crosses two texts, nor reaches what came after the cursor, however often states were split."""
    automaton, seen = SuffixAutomaton(), []
    for i, text in enumerate(before, 1):
        automaton.extend(text)
        automaton.separate()
        seen += [*text, -i]
    cursor = Cursor(automaton)
    assert text_of(automaton) == seen
    for known, token in enumerate(other):
        cursor.follow([token])
        assert cursor.followed == known + 1
        assert cursor.longest_suffix() == suffix_in(seen, other[: known + 1])
        if known < len(after):
            automaton.extend(after[known])
            automaton.separate()


@exploring
@given(st.lists(texts, min_size=1, max_size=4))
def test_earlier_suffixes_do_not_cross_separators(parts):
    automaton, whole = SuffixAutomaton(), []
    for i, part in enumerate(parts[:-1], 1):
        automaton.extend(part)
        automaton.separate()
        whole += [*part, -i]
    automaton.extend(parts[-1])
    whole += parts[-1]
    length, end = automaton.longest_suffix()
    assert (length, end) == earlier_suffix(whole)
    assert length <= len(parts[-1]) and all(token >= 0 for token in whole[end - length : end])
    for place in range(len(whole)):  # nor does a copy
        up_to_separator = list(itertools.takewhile(lambda token: token >= 0, copied(whole, place, 9)))
        assert automaton.copied(place, 9) == up_to_separator


@exploring
@given(texts, st.sampled_from([1, 2, 3, ANY]))
def test_what_follows(text, longest):
    """Of every suffix that occurs before: the tokens after it in the order in which they came, and how often. What ends
    the text is not counted before something follows it."""
    automaton = SuffixAutomaton(text)
    suffixes = automaton.suffixes(1, longest, len(text))
    assert next(iter(suffixes), (0,))[0] == earlier_suffix(text, longest)[0]
    for length, state in suffixes:
        suffix = text[-length:]
        ends = [end for end in range(length, len(text)) if text[end - length : end] == suffix]
        whole, counted = (
            dict.fromkeys(text[end] for end in ends),
            Counter(text[end] for end in ends if end + 1 < len(text)),
        )
        assert [(t, n) for t, _, n in automaton.following(state)] == [(t, max(counted[t], 1)) for t in whole]
    assert automaton.suffixes(2, ANY, 1) == [each for each in automaton.suffixes(1, ANY, 9) if each[0] >= 2][:1]


def test_what_an_automaton_cannot_hold_is_refused():
    automaton = SuffixAutomaton([1, 2, 1])
    for tokens, error in (
        ([2**31], OverflowError),
        ([-(2**40)], OverflowError),
        (["1"], TypeError),
        ([1.0], TypeError),
    ):
        with pytest.raises(error):
            automaton.extend([5, *tokens])
        with pytest.raises(error):
            Cursor(automaton).follow(tokens)
        with pytest.raises(error):
            automaton.look([1, 2, 1, 5, *tokens], 1, ANY, 2.0, 4)
    assert automaton.look([1], 1, ANY, 2.0, 4) == ([2, 1], 1, (1, 1))  # nothing is new
    assert len(automaton) == 3 and automaton.longest_suffix() == (1, 1)
    for call in (lambda: automaton.copied(3, 1), lambda: automaton.copied(-1, 1), lambda: automaton.copied(0, -1)):
        with pytest.raises(IndexError, match="allowed: 0 to 2"):
            call()
    for state in (-1, 10**6):
        with pytest.raises(IndexError, match=f"state: got {state}"):
            automaton.following(state)


def test_size_and_work_are_linear():
    """At most 2 n states and 3 n transitions (Blumer et al.), and of a text with a period the right length."""
    for text in ([0] * 3000, [0, 1] * 1500, prompts(1, 3000, 3000)[0]):
        automaton = SuffixAutomaton(text)
        tokens, states, edges = native.sizes(automaton._native)
        assert tokens == len(text) and states <= 2 * len(text) and edges <= 3 * len(text)
    automaton = SuffixAutomaton([0] * 3000)
    length, end = automaton.longest_suffix()
    assert length == 2999 and 2999 <= end < 3000
    automaton.extend([1])
    assert automaton.longest_suffix() == (0, 0)
    automaton.extend([0, 0])
    length, end = automaton.longest_suffix()
    assert length == 2 and 2 <= end <= 3000


# ---- the drafter -----------------------------------------------------------------------------------------


def propose(
    text: list[int], earlier: list[list[int]], most: int, min_match: int, max_spec_factor: float
) -> tuple[list[int], int]:
    """What a suffix drafter is to propose, and how many tokens match, from its definition."""
    (length, end), source = earlier_suffix(text), text
    past = []
    for i, old in enumerate(earlier):
        past += [*old, -1 - i]
    longest, there = suffix_in(past, text)
    if longest > length and past[there] >= 0:
        length, end, source = longest, there, past
    if length < min_match:
        return [], 0
    proposal = copied(source, end, max(1, math.floor(min(most, max_spec_factor * length))))
    ends = [i for i, token in enumerate(proposal) if token < 0]
    return (proposal[: ends[0]] if ends else proposal), length


@exploring
@given(
    earlier=st.lists(texts.filter(bool), max_size=3),
    known=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=15), min_size=1, max_size=3),
    growth=st.lists(st.lists(st.tuples(st.integers(0, 5), st.lists(st.integers(0, 2), max_size=6)), max_size=3)),
    min_match=st.integers(1, 3),
    factor=st.sampled_from([0.5, 1, 1.5, 3.0, math.inf]),
)
def test_proposals_are_those_of_a_search(earlier, known, growth, min_match, factor):
    """Texts grow by 0 to 6 tokens between steps, and some do not draft."""
    memory = SuffixMemory()
    memory.add(earlier)
    for drafter, remembered in (
        (SuffixDrafter(memory, min_match, factor), earlier),
        (SuffixDrafter(min_match=min_match, max_spec_factor=factor), []),
    ):
        grown = [list(text) for text in known]
        session = start(drafter, grown)
        memory.add([[0, 1, 2]])  # too late to be seen
        for changes in [[], *growth]:
            allowed = [4] * len(grown)
            for b, (most, new) in enumerate(changes[: len(grown)]):
                grown[b] += new
                allowed[b] = most
            if max(allowed):
                pairs = zip(grown, allowed, strict=True)
                expected = [propose(t, remembered, most, min_match, factor) if most else ([], 0) for t, most in pairs]
                assert [*zip(*found(session, grown, allowed)[:2], strict=True)] == expected


def test_examples():
    memory = SuffixMemory()
    memory.add([[9, 1, 2, 3, 7, 8], [1, 2, 4]])
    drafter = SuffixDrafter(memory, max_spec_factor=math.inf)
    assert draft(start(drafter, [[5, 1, 2]]), [[5, 1, 2]], 9) == [[3, 7, 8]]  # not on into the next text
    assert draft(start(drafter, [[9, 1, 2, 5, 9, 1, 2]]), [[9, 1, 2, 5, 9, 1, 2]], 1) == [[5]]  # as long: its own
    assert draft(start(drafter, [[4, 6, 1, 2, 4]]), [[4, 6, 1, 2, 4]], 2) == [[6, 1]]  # the longer match ends a text
    assert draft(start(SuffixDrafter(), [[1, 2, 5, 1, 2]]), [[1, 2, 5, 1, 2]], 9) == [[5, 1, 2, 5]]  # 2.0 times 2


def test_repeated_text_is_drafted_well():
    text = prompts(1, 30, 30)[0] * 4
    result = generate(
        tiny_model(), SuffixDrafter(), [text[:40]] * 2, 8, max_new_tokens=81, logits_processor=[Repeats(30)]
    )
    assert result.tokens == [(text * 2)[40:121]] * 2
    assert result.stats.tau == 9


def test_memory_makes_the_second_time_fast():
    memory, ids = SuffixMemory(), prompts(3, 20, 20)
    plain = generate(tiny_model(), None, ids, 0, max_new_tokens=50).tokens
    taus = []
    for _ in range(2):
        result = generate(tiny_model(), SuffixDrafter(memory), ids, 8, max_new_tokens=50)
        assert result.tokens == plain
        taus.append(result.stats.tau)
    assert len(memory) == 2 * 3 * 50
    assert taus[0] < 2 and taus[1] > 5


@pytest.mark.parametrize("num_drafts", (1, 3, 8))
@pytest.mark.parametrize("remembers", (False, True))
def test_greedy_and_coupled_texts_are_the_plain_ones(num_drafts, remembers):
    memory = SuffixMemory() if remembers else None
    for _ in range(2):  # the second time, the memory is full
        check_plain_texts(lambda: SuffixDrafter(memory), num_drafts)


# ---- memories --------------------------------------------------------------------------------------------


def test_memories_are_kept_apart():
    """What one user's generations leave behind, no drafter without that very memory proposes."""
    mine, theirs, text = SuffixMemory(), SuffixMemory(), [[1, 2]]
    session = start(SuffixDrafter(mine), text)
    session.end(0, [1, 2, 3, 4])
    assert draft(start(SuffixDrafter(mine), text), text, 2) == [[3, 4]]
    assert draft(start(SuffixDrafter(mine, min_match=2), text), text, 2) == [[3, 4]]
    for other in (SuffixDrafter(theirs), SuffixDrafter(SuffixMemory()), SuffixDrafter()):
        assert draft(start(other, text), text, 2) == [[]]
    start(SuffixDrafter(), text).end(0, [1, 2, 5])
    assert draft(start(SuffixDrafter(), text), text, 2) == [[]]
    assert (len(mine), len(theirs)) == (4, 0)


@pytest.mark.parametrize("tree", (None, 6))
def test_owners_do_not_learn_of_each_other(tree):
    """What a request drafts, and how much of it is accepted, is what it is where no other owner ever was."""
    ids = prompts(3, 20, 20)
    said = [Request(p, 30, eos_token_id=[], owner=owner) for p, owner in zip(ids, ("a", "b", None), strict=True)]

    def stats(*batches: list[Request]) -> list:
        drafter = SuffixDrafter(SuffixMemories())
        s = Scheduler(SpeculativeDecoder(tiny_model(), drafter, 4, tree=tree), rows=3, max_length=60)
        for batch in batches:
            outcomes = sorted(s.run(batch), key=lambda o: o.number)
        assert s.drafter_error is None
        return [(o.tokens, o.stats.steps, o.stats.drafted_by_position, o.stats.accepted) for o in outcomes]

    def by(owner: str | None) -> list[Request]:
        return [replace(r, owner=owner) for r in said]

    assert stats(said, by("c")) == stats(by("c"))  # nobody's texts are in no memory
    assert stats(said, by(None)) == stats(by(None))
    assert stats(said, by("a")) == stats(said[:1], by("a"))
    assert stats(said, by("b")) == stats([said[1]], by("b"))
    again, new = stats(said, said), stats(said)
    assert all(known[1] < first[1] / 2 for known, first in zip(again[:2], new[:2], strict=True))  # their own they know
    assert again[2] == new[2]


def test_the_owner_that_asked_longest_ago_is_forgotten():
    memories = SuffixMemories(max_tokens=5, max_owners=2)
    for owner in ("a", "b", "a", "c"):
        memories.of(owner).add([[1, 2, 3]])
    assert len(memories) == 2
    assert len(memories.of("a")) == 5 - 2 and len(memories.of("c")) == 3 and len(memories.of("b")) == 0
    assert memories.of(None) is None and len(memories) == 2
    text = [[9, 1, 2], [9, 1, 2], [9, 1, 2]]
    session = start(SuffixDrafter(memories), text, owners=["c", "b", None])
    assert draft(session, text, 1) == [[3], [], []]
    for row, new in enumerate(([7], [8], [5])):
        session.end(row, new)
    assert len(memories.of("c")) == 4 and len(memories.of("b")) == 1


@exploring
@given(st.lists(texts, max_size=12), st.integers(1, 20))
def test_memory_is_bounded_and_forgets_the_oldest(added, max_tokens):
    memory, kept = SuffixMemory(max_tokens), []
    for text in added:
        memory.add([text])
        if text:
            kept.append(text[-max_tokens:])
        if sum(map(len, kept)) > max_tokens:
            while len(kept) > 1 and sum(map(len, kept)) > max_tokens // 2:
                kept.pop(0)
        assert len(memory) == sum(map(len, kept)) <= max_tokens
        tokens = text_of(memory._automaton)
        assert [t for t in tokens if t >= 0] == [t for text in kept for t in text]
        assert len(tokens) == len(memory) + len(kept)


def test_a_generation_keeps_the_memory_it_started_with():
    memory, text = SuffixMemory(max_tokens=8), [[1, 2]]
    memory.add([[1, 2, 3, 4]])
    before = start(SuffixDrafter(memory), text)
    memory.add([[5, 1, 2, 6]])
    assert draft(before, text, 2) == [[3, 4]]
    memory.add([[1, 2, 7]])  # the first two are forgotten
    assert draft(before, text, 2) == [[3, 4]]
    assert draft(start(SuffixDrafter(memory), text), text, 2) == [[7]]


def test_memory_shared_by_threads():
    """Each of six generations adds texts and drafts at once; every proposal is the continuation of some text."""
    memory, errors = SuffixMemory(max_tokens=2000), []

    def work(number: int) -> None:
        try:
            for turn in range(40):
                first = 10 * (40 * number + turn)
                text = [10**6]
                session = start(SuffixDrafter(memory, min_match=2, max_spec_factor=math.inf), [text])
                for other in range(0, first, 90):
                    text += [other, other + 1]
                    proposal = draft(session, [text], 3)[0]
                    assert proposal in ([], [other + 2, other + 3, other + 4]), (other, proposal)
                session.end(0, list(range(first, first + 10)))
                session.end(0, list(range(first, first + 10)))
        except Exception as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work, args=(n,)) for n in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not errors
    assert 1000 < len(memory) <= 2000
    tokens = text_of(memory._automaton)
    assert native.sizes(SuffixAutomaton(tokens)._native) == native.sizes(memory._automaton._native)
    assert sum(token < 0 for token in tokens) * 10 == len(memory)


def test_memory_does_not_grow_while_it_is_read():
    memory, text = SuffixMemory(), [[1, 2]]
    memory.add([[1, 2, 3]])
    session, drafts = start(SuffixDrafter(memory), text), []
    threads = [
        threading.Thread(target=lambda: memory.add([[4, 5]])),
        threading.Thread(target=lambda: drafts.extend(draft(session, text, 1))),
    ]
    with memory.reading:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(0.1)
            assert thread.is_alive()
        assert text_of(memory._automaton) == [1, 2, 3, -1]
    for thread in threads:
        thread.join()
    assert drafts == [[3]] and text_of(memory._automaton) == [1, 2, 3, -1, 4, 5, -2]


@pytest.mark.parametrize("wrong", [[1, 2, 2**31], [1, "2"], [1.0]])
def test_a_memory_without_the_texts_that_it_refused(wrong):
    memory = SuffixMemory(6)
    memory.add([[1, 2, 3]])
    with pytest.raises(ValueError, match="^texts: got .*, allowed: lists of token ids"):
        memory.add([[4, 5], wrong, [6]])
    memory.add([[7], [8, 9]])
    assert text_of(memory._automaton) == [7, -1, 8, 9, -2] and len(memory) == 3


@pytest.mark.parametrize(
    "new, arguments",
    (
        (SuffixDrafter, {"memory": []}),
        (SuffixDrafter, {"min_match": 0}),
        (SuffixDrafter, {"min_match": True}),
        (SuffixDrafter, {"max_spec_factor": 0}),
        (SuffixDrafter, {"max_spec_factor": math.nan}),
        (SuffixDrafter, {"max_spec_factor": "2"}),
        (SuffixMemory, {"max_tokens": 0}),
        (SuffixMemory, {"max_tokens": 1.5}),
        (SuffixMemories, {"max_tokens": 0}),
        (SuffixMemories, {"max_owners": 0}),
    ),
)
def test_arguments_are_checked(new, arguments):
    (name,) = arguments
    with pytest.raises(ValueError, match=rf"^{name}: got .*, allowed: "):
        new(**arguments)
