"""Suites: conversations in which a method hears its own answers, their tables by hand, and answer files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from specdec.evaluation.bench.answers import Choice, answer_lines, file_name, load_answers, read_answers, to_text
from specdec.evaluation.bench.grid import BenchCell, Grid, Method, Setting
from specdec.evaluation.bench.session import BenchSettings
from specdec.evaluation.bench.suite_session import SuiteSession
from specdec.evaluation.bench.suite_table import suite_results, table
from specdec.evaluation.bench.suites import SUITES
from specdec.evaluation.bench.talks import VICUNA, Speaker, SuiteQuestion, TalkFormat, vicuna_text
from specdec.evaluation.contenders import Arrival, Run
from specdec.evaluation.work_counter import silent
from support.chatml import chatml

# ---- the table, by hand


def choice(tokens: list[int], seconds: list[float], lengths: list[int], text: str = "a") -> dict:
    turns = [f"{text}{i}" for i in range(len(tokens))]
    return {"turns": turns, "new_tokens": tokens, "wall_time": seconds, "accept_lengths": lengths}


def answers(name: str, choices: dict[str, list[dict]], suite: str = "spec-bench"):
    lines = [{"question_id": i, "category": c, "choices": choices[c], "suite": suite} for i, c in enumerate(choices)]
    return read_answers(lines, name, name)


OURS = {
    "writing": [choice([4, 2], [1.0, 0.5], [2, 2, 2])],  # 4 tokens/s
    "qa": [choice([10], [1.0], [5, 5])],  # 10
    "coding": [choice([3], [1.5], [3])],  # 2
}
PLAIN = {
    "writing": [choice([6], [3.0], [1] * 6, "b")],  # 2
    "qa": [choice([4], [2.0], [1] * 4)],  # 2
    "coding": [choice([1], [1.0], [1])],  # 1
}


def rows_of(suite: str, ours: dict = OURS, plain: dict = PLAIN) -> dict[tuple[str, str], dict]:
    first, second = answers("ours", ours, suite), answers("plain", plain, suite)
    rows = table([first, second], {"over_plain": second}, second)
    return {(row["group"], row["method"]): row for row in rows}


def test_spec_bench_counts_steps_and_the_mean_speed_of_questions():
    rows = rows_of("spec-bench")
    assert [*dict.fromkeys(group for group, _ in rows)] == ["mt_bench", "qa", "overall"]
    mt, qa, overall = (rows[group, "ours"] for group in ("mt_bench", "qa", "overall"))
    assert [row["questions"] for row in (mt, qa, overall)] == [2, 1, 3]
    assert mt["mean_accepted"] == (2 + 2 + 2 + 3) / 4 and overall["mean_accepted"] == pytest.approx(19 / 6)
    assert mt["tokens_per_second"]["median"] == (4 + 2) / 2  # not 9 tokens in 3 seconds, of which it would be as much
    assert overall["tokens_per_second"]["median"] == pytest.approx((4 + 2 + 10) / 3)  # nor 19 tokens in 4 seconds
    assert mt["speedup"]["over_plain"]["median"] == 3 / 1.5 and qa["speedup"]["over_plain"]["median"] == 5
    assert overall["speedup"]["over_plain"]["median"] == pytest.approx((16 / 3) / (5 / 3))
    assert [row["equal"] for row in (mt, qa, overall)] == [1, 1, 2]
    assert rows["overall", "plain"]["equal"] == 3 and rows["overall", "plain"]["mean_accepted"] == 1


def test_speed_bench_counts_questions_by_their_own_categories():
    rows = rows_of("speed-bench")
    assert [*dict.fromkeys(group for group, _ in rows)] == ["writing", "qa", "coding", "overall"]
    assert rows["overall", "ours"]["mean_accepted"] == pytest.approx((2 + 5 + 3) / 3)


def test_speed_ups_are_taken_within_rounds():
    """Where the second round is slow for all, no ratio shows it; and a question is equal only if all rounds are."""
    slow = {"qa": [choice([10], [1.0], [5, 5]), choice([10], [10.0], [5, 5], "other")]}
    rows = rows_of("spec-bench", slow, {"qa": [choice([4], [2.0], [1] * 4), choice([4], [20.0], [1] * 4)]})
    over = rows["qa", "ours"]["speedup"]["over_plain"]
    assert over["median"] == pytest.approx(5) and over["interval"] == pytest.approx([5, 5]) and over["rounds"] == 2
    assert rows["qa", "ours"]["tokens_per_second"] == {"median": 5.5, "min": 1.0, "max": 10.0}
    assert rows["qa", "ours"]["equal"] == 0


def test_other_questions_are_refused():
    with pytest.raises(ValueError, match="results: got ours and plain with other questions, such as 2, allowed"):
        rows_of("spec-bench", OURS, {name: PLAIN[name] for name in ("writing", "qa")})
    with pytest.raises(ValueError, match="got ours of spec-bench and plain of speed-bench, allowed: one suite"):
        table([answers("ours", OURS), answers("plain", PLAIN, "speed-bench")], {}, None)


def test_groups_stand_in_the_order_of_spec_bench():
    suite = SUITES["spec-bench"]
    there = ["rag", "mine", "stem", "translation", "math", "math_reasoning"]
    assert suite.groups(there) == ["mt_bench", "translation", "math_reasoning", "rag", "mine", "overall"]
    assert suite.mean_accepted([(0, 0), (3, 0)]) is None


# ---- conversations


def test_vicunas_conversation():
    assert vicuna_text(["Hi", "And?"], ["Hello."]) == f"{VICUNA} USER: Hi ASSISTANT: Hello.</s>USER: And? ASSISTANT:"
    assert vicuna_text(["Hi", "And?"], [""]).endswith("USER: Hi ASSISTANT:USER: And? ASSISTANT:")


def test_the_tokenizers_own_template_is_used(pair):
    own = chatml(pair[2])
    form, vicuna = TalkFormat(own), TalkFormat(pair[2])
    text = own.decode(form.prompt(["Hi", "And?"], ["Hello."]))
    said = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello.<|im_end|>\n<|im_start|>user\nAnd?<|im_end|>\n"
    assert text == f"{said}<|im_start|>assistant\n" and form.by_template
    assert vicuna.prompt(["Hi"], []) == pair[2](vicuna_text(["Hi"], [])).input_ids and not vicuna.by_template
    tokens = own(" yes \n<|im_end|>", add_special_tokens=False).input_ids
    assert form.answer(tokens) == "yes"


class Says:
    """Answers every prompt with the same text, token by token or whole, in a second each."""

    name, setting = "says", {}

    def __init__(self, tokens: list[int], whole: bool = False, asked: list | None = None):
        self.tokens, self.whole, self.asked = tokens, whole, [] if asked is None else asked

    def run(self, prompts, seed):
        self.asked.append((prompts[0], len(self.tokens), seed))
        lengths = [len(self.tokens)] if self.whole else [1] * len(self.tokens)
        arrivals = [Arrival(1.0, n) for n in lengths]
        return Run([self.tokens], 1.0, len(lengths), 0, 0, 0, [arrivals])

    def shortened(self, most):
        return Says(self.tokens[:most], self.whole, self.asked)


def question(form: TalkFormat, key: str | int, category: str, *turns: str) -> SuiteQuestion:
    return SuiteQuestion(str(key), category, form.prompt(turns[:1], ()), turns, key)


GRID = Grid((Method("model"),), num_drafts=(2,))
CELLS = GRID.cells(Setting())


def session(pair, texts: dict[str, str], form: TalkFormat, questions=None) -> tuple[SuiteSession, dict[str, Says]]:
    """With methods that say these texts, all but the first one as a whole."""
    says = {n: Says(pair[2](t, add_special_tokens=False).input_ids, n != "transformers") for n, t in texts.items()}
    questions = questions or [question(form, 81, "writing", "A story?", "Shorter?"), question(form, "b", "qa", "Why?")]
    settings = BenchSettings(8, repeats=2, warm_up=0, seed=3)

    def make(cell: BenchCell) -> Says:
        return says[cell.method]

    return SuiteSession(pair[0], make, GRID, "spec-bench", questions, settings, form), says


def test_the_second_turn_has_the_methods_own_answer(pair):
    form = TalkFormat(pair[2])
    texts = {"transformers": "one cat", "plain": "one cat", "model": "two dogs"}
    made, says = session(pair, texts, form)
    lines = list(made.rounds(silent))
    for name, said in texts.items():
        first, second, other = (prompt for prompt, *_ in says[name].asked[:3])
        assert second == form.prompt(["A story?", "Shorter?"], [said])
        assert said in pair[2].decode(second) and said not in pair[2].decode(first)
        assert other == form.prompt(["Why?"], [])
    assert [seed for *_, seed in says["plain"].asked] == [3, 3, 4, 5, 5, 6]  # of a question, and anew in each round
    # The texts of the model are not the target's: it is judged where they first differ, and only the first time.
    told = [(d["methods"][1], d["prompt_id"], d["turn"], d["verdict"]) for d in lines[0]["differences"]]
    assert told == [(CELLS[2].id, "81", 1, "bug"), (CELLS[2].id, "b", 1, "bug")] and not lines[1]["differences"]


def test_texts_that_differ_later_are_judged_by_their_own_prompt(pair):
    form = TalkFormat(pair[2])
    made, says = session(pair, dict.fromkeys(("transformers", "plain", "model"), "one cat"), form)
    genuine = says["model"].run

    def later(prompts, seed):
        done = genuine(prompts, seed)
        if "one cat" in pair[2].decode(prompts[0]):
            done.texts[0] = [*done.texts[0][:-1], 5]
        return done

    says["model"].run = later
    (found,) = next(iter(made.rounds(silent)))["differences"]
    assert (found["prompt_id"], found["turn"], found["position"]) == ("81", 2, len(says["model"].tokens) - 1)


def test_answers_end_at_the_last_position(pair):
    form = TalkFormat(pair[2])
    asked = question(form, 1, "qa", "Why?", "And then?")
    says = Says(pair[2]("one cat and two", add_special_tokens=False).input_ids)
    longest = len(form.prompt(asked.turns, [form.answer(says.tokens)]))
    new = len(says.tokens)
    for positions, turns, last in ((longest + new, 2, new), (longest + 2, 2, 2), (longest, 1, new)):
        says.asked.clear()
        talk = Speaker(says, form, new, positions).run([asked], 0)
        assert (len(talk.turns), len(talk.turns[-1].tokens)) == (turns, last)
    cut = Speaker(says, form, new, longest, cut=True).run([asked], 0)
    whole = form.prompt(asked.turns, [cut.turns[0].answer])
    assert len(cut.turns) == 2 and cut.turns[1].prompt == whole[new:] and len(cut.turns[1].tokens) == new


# ---- results and answer files


def measured(pair) -> tuple[list[dict], dict]:
    form = TalkFormat(pair[2])
    made, _ = session(pair, {"transformers": "one cat", "plain": "one cat", "model": "two dogs"}, form)
    header = {"suite": made.described(), "models": {"target": {"name": "models/Tiny"}}}
    return list(made.rounds(silent)), header


def test_the_results_of_a_suite(pair):
    rounds, header = measured(pair)
    found = suite_results(header, GRID, rounds)
    assert found["name"] == "spec-bench" and "FastChat" in found["prompts"] and found["unasked"] == []
    (of_setting,) = found["tables"]
    rows = {(row["group"], row["method"]): row for row in of_setting["rows"]}
    model, plain = (rows["mt_bench", cell.id] for cell in (CELLS[2], CELLS[1]))
    tokens = {name: len(pair[2](name, add_special_tokens=False).input_ids) for name in ("one cat", "two dogs")}
    assert model["mean_accepted"] == tokens["two dogs"] == model["tokens_per_second"]["median"]  # a second a turn
    assert model["speedup"]["over_plain"]["median"] == tokens["two dogs"] / tokens["one cat"]
    assert (model["equal"], plain["equal"], plain["questions"]) == (0, 1, 1)
    assert rows["overall", CELLS[0].id]["mean_accepted"] == 1 and rows["overall", CELLS[1].id]["equal"] == 2


def test_answer_files_are_read_again(pair, tmp_path):
    rounds, _ = measured(pair)
    lines = answer_lines(rounds[::-1], CELLS[2].id, "spec-bench", "models/Tiny")
    file = tmp_path / file_name(CELLS[2].id)
    assert file.name == "model-token-k=2-t=0-b=1.jsonl"
    file.write_text(to_text(lines))
    first = json.loads(file.read_text().splitlines()[0])
    assert (first["question_id"], first["category"]) == (81, "writing") and first["tstamp"] > 1e9
    assert first["model_id"] == f"Tiny {CELLS[2].id}" and [each["index"] for each in first["choices"]] == [0, 1]
    new = len(pair[2]("two dogs", add_special_tokens=False).input_ids)
    said = {"turns": ["two dogs"] * 2, "decoding_steps": [1, 1], "new_tokens": [new] * 2, "wall_time": [1.0, 1.0]}
    assert first["choices"][1] == {"index": 1, **said, "accept_lengths": [new] * 2}
    read = load_answers(file)
    assert read == read_answers(lines, file.stem, "") and read.rounds == 2 and [*read.choices] == [81, "b"]
    assert read.choices[81][0] == Choice(("two dogs",) * 2, (new, new), (1.0, 1.0), (new, new), (1, 1))


SPEC_BENCHS = {  # as its own programs write them: older ones say "idxs"
    **{"question_id": 81, "category": "writing", "answer_id": "aXbY", "model_id": "vicuna-7b-v1.3-sps", "tstamp": 1.5},
    "choices": [{"index": 0, "idxs": [3, 1], **choice([4, 2], [1.0, 0.5], [2, 2, 2])}],
}


def written(path: Path, *lines: object) -> Path:
    file = path / "theirs.jsonl"
    file.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return file


def test_spec_benchs_own_files_are_read(tmp_path):
    read = load_answers(written(tmp_path, SPEC_BENCHS, ""))
    assert read.suite == "spec-bench" and read.choices[81][0].speed == 4 and read.categories == {81: "writing"}


@pytest.mark.parametrize(
    ("line", "told"),
    (
        ("{", "'{' in line 2 of .*theirs.jsonl.*, allowed: JSON"),
        ({"turns": ["x"]}, "question_id None in line 2 of"),
        ({**SPEC_BENCHS, "question_id": 2, "choices": []}, "turns None of a choice in line 2"),
        ({**SPEC_BENCHS, "question_id": 2, "choices": [choice([1], [0.0], [1])]}, r"wall_time \[0.0\] of a choice"),
        (
            {**SPEC_BENCHS, "question_id": 2, "suite": "mine"},
            "suite 'mine' in line 2 .* allowed: spec-bench, sp",
        ),
        (SPEC_BENCHS, "with a question twice, allowed: each question once"),
        ({**SPEC_BENCHS, "question_id": 2, "choices": SPEC_BENCHS["choices"] * 2}, "numbers of choices"),
    ),
)
def test_what_is_no_answer_file_is_refused(tmp_path, line, told):
    with pytest.raises(ValueError, match=f"results: got .*{told}"):
        load_answers(written(tmp_path, SPEC_BENCHS, line))


def test_an_empty_answer_file_is_refused(tmp_path):
    with pytest.raises(ValueError, match="without a line"):
        load_answers(written(tmp_path))
    with pytest.raises(ValueError, match="No such file"):
        load_answers(tmp_path / "none.jsonl")
