"""Texts and their tokens do not depend on how a sequence was divided into steps."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable
from types import SimpleNamespace
from unittest.mock import Mock

from hypothesis import given, settings
from hypothesis import strategies as st
from specdec import FinishReason, Output, Request, SequenceState
from specdec.detokenize import Detokenizer
from specdec.result import Producer
from specdec.serving.server.decoded_text import DecodedText, Piece
from specdec.serving.server.stop_cut import StopCut

STOPS = ([], ["\n"], ["ö=", "€€"], ["x", "= y"])


class Engine:
    """Streams the steps of one sequence, so many at a time, and then one by one."""

    def __init__(self, request: Request, steps: list[list[int]], counts: Iterable[int]):
        self.request, self.steps, self.counts = request, steps, iter(counts)

    async def arrivals(self, number: int):
        sequence = SequenceState(number, self.request, list(self.request.prompt), [])
        sequence.text += itertools.chain(*self.steps)
        updates = [
            Output(sequence, step, [Producer.ACCEPTED] * (len(step) - 1) + [Producer.BONUS], drafts=step[:-1])
            for step in self.steps
        ]
        sequence.finish_reason = FinishReason.EOS
        updates.append(Output(sequence, [], [], finish_reason=FinishReason.EOS))
        while updates:  # as a reader finds them who is late now and then
            count = next(self.counts, 1)
            yield updates[:count]
            del updates[:count]


def pieces(
    tokenizer, steps: list[list[int]], strings: list[str], keep: bool, counts: Iterable[int] = ()
) -> list[Piece]:
    request = Request(tokenizer("def f(x):").input_ids)
    lane = SimpleNamespace(engine=Engine(request, steps, counts))

    async def read() -> list[Piece]:
        text = DecodedText(Detokenizer(tokenizer), lane, 0, request, Mock(), StopCut(strings, keep))
        return [piece async for piece in text.pieces()]

    return asyncio.run(read())


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_steps_of_any_length(pair, data):
    tokenizer = pair[2]
    said = data.draw(st.text(" x=yö€😀\n", max_size=12))
    tokens = [*tokenizer(said).input_ids, *data.draw(st.lists(st.sampled_from([0, 163, 98, 9]), max_size=3)), 0]
    strings, keep = data.draw(st.sampled_from(STOPS)), data.draw(st.booleans())
    ends = sorted(data.draw(st.sets(st.integers(1, len(tokens) - 1)))) if len(tokens) > 1 else []
    steps = [tokens[a:b] for a, b in itertools.pairwise([0, *ends, len(tokens)])]
    alone = pieces(tokenizer, [[token] for token in tokens], strings, keep)
    counts = data.draw(st.lists(st.integers(1, 3), max_size=6))
    divided = pieces(tokenizer, steps, strings, keep, counts)

    text = "".join(piece.text for piece in divided)
    assert text == "".join(piece.text for piece in alone)
    whole = tokenizer.decode(tokens, skip_special_tokens=True)
    cut = StopCut(strings, keep)
    assert text == cut.push(whole) + cut.finish()

    told = [token for piece in divided for token in piece.tokens]
    assert [(token.id, token.start) for token in told] == [(t.id, t.start) for piece in alone for t in piece.tokens]
    assert [token.id for token in told] == tokens[: len(told)]
    assert len(told) == len(tokens) or cut.found and all(token.start < len(text) for token in told)

    shown = [step for piece in divided for step in piece.steps]
    assert [token.id for step in shown for token in step.tokens] == [token.id for token in told]
    assert text.startswith("".join(token.text for step in shown for token in step.tokens))
    seen, length, spelled = 0, 0, 0
    for piece in divided:  # nothing comes before its text
        seen, length = seen + len(piece.tokens), length + len(piece.text)
        spelled += sum(len(token.text) for step in piece.steps for token in step.tokens)
        assert spelled <= length
        assert piece is divided[-1] or all(token.start < length for token in told[:seen])


def test_a_step_waits_for_all_of_its_text(pair):
    tokens = pair[2](" = x").input_ids
    assert pair[2].decode(tokens[0]) == " ="
    assert pieces(pair[2], [tokens[:1], tokens[1:]], ["= y"], False)[0].steps == []
