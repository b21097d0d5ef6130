"""Stop strings: the same cut however a text is divided, also inside of characters' tokens."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from specdec.detokenize import Detokenizer
from specdec.serving.server.stop_cut import StopCut, TextStop

TEXT = st.text("ab\n", max_size=12)
STRINGS = st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=4)


def expected(text: str, strings: list[str], keep: bool) -> str:
    """The string that is complete first ends the text; of several, the longest."""
    for end in range(1, len(text) + 1):
        complete = [s for s in strings if text[:end].endswith(s)]
        if complete:
            return text[: end if keep else end - max(map(len, complete))]
    return text


@given(st.lists(TEXT, max_size=5), STRINGS, st.booleans())
@example(["a", "aab"], ["aab"], False)  # a beginning within a beginning
@example(["ab", "ab\n"], ["abab\n", "b"], False)
@example(["aba"], ["abab"], False)  # what was held back comes at the end
@example(["ab"], ["b", "ab"], False)
def test_any_division_gives_the_same(parts, strings, keep):
    cut = StopCut(strings, keep)
    told, final = "", ""
    for part in parts:
        told += part
        final += cut.push(part)
        whole = expected(told, strings, keep)
        assert whole.startswith(final)
        assert cut.found == any(s in told for s in strings)
        if not cut.found:  # nothing is held back without need
            held = whole[len(final) :]
            assert held == "" or any(s.startswith(held) for s in strings)
    assert final + cut.finish() == expected("".join(parts), strings, keep)
    assert cut.finish() == ""


def test_a_long_string_is_no_burden():
    """A search that began anew at each character would take hours."""
    cut = StopCut(["a" * 100_000 + "b"])
    assert cut.push("a" * 200_000) == "a" * 100_000
    assert cut.push("bx") == "" and cut.found


@pytest.mark.parametrize(
    ("text", "strings"),
    [
        ("return x\n\n\ndef g():", ["\n\n"]),  # within a token, or over two
        ("a = 'äöü€😀' # done", ["€"]),  # characters of several tokens
        ("print('x')", ["rint", "('x"]),
        ("def f(self):", ["absent"]),
    ],
)
def test_a_text_stop_ends_with_the_token_that_completes_a_string(pair, text, strings):
    tokenizer = pair[2]
    prompt, tokens = tokenizer("\n").input_ids, tokenizer(text).input_ids
    ends = [n for n in range(1, len(tokens) + 1) if any(s in tokenizer.decode(tokens[:n]) for s in strings)]
    for size in (1, 2, 5):  # tokens of a step
        stop, kept = TextStop(Detokenizer(tokenizer), prompt, strings), None
        for begin in range(0, len(tokens), size):
            step = tokens[begin : begin + size]
            if (kept := stop.first_end(0, [*prompt, *tokens[:begin], *step], len(step))) is not None:
                kept += begin
                break
        assert kept == min(ends, default=None)


def test_a_text_stop_does_not_begin_in_the_prompt(pair):
    prompt, new = pair[2]("x = 1\n").input_ids, pair[2]("\n").input_ids
    assert TextStop(Detokenizer(pair[2]), prompt, ["\n\n"]).first_end(0, [*prompt, *new], 1) is None
