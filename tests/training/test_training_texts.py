"""Files of texts: what they may hold, what is refused by its line, and what is left out."""

from __future__ import annotations

import json

import pytest
from specdec import load_embedded_pair
from specdec.training.texts import SHORTEST, read_documents, split


@pytest.fixture(scope="module")
def tokenizer():
    found = load_embedded_pair()[2]
    said, asks = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}", "<assistant>"
    found.chat_template = said + "{% if add_generation_prompt %}" + asks + "{% endif %}"
    return lambda: found


def lines(path, *rows: object):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_rows_have_a_text_messages_or_a_prompt(tmp_path, tokenizer):
    said = [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "b."}]
    rows = (
        {"text": "one", "id": 3},
        {"messages": said},
        {"prompt": "p", "completion": "c"},
        {"prompt": "q"},
        {"text": " "},
    )
    path = lines(tmp_path / "x.jsonl", *rows)
    path.write_text(path.read_text() + "\n")
    assert read_documents(path, tokenizer) == ["one", "<user>a?<assistant>b.", "pc", "q"]


def test_results_of_a_job_follow_their_prompts(tmp_path, tokenizer):
    """In the order in which they ended; a failed one is left out."""
    rows = [{"id": "a", "prompt": 1, "text": " = 1", "status": "OK"},
            {"id": 0, "prompt": 0, "text": "", "status": "too long"},
            {"id": 3, "prompt": 0, "text": "half", "status": "ERROR", "finish_reason": "failed"},
            {"id": 2, "prompt": 2, "text": "", "status": "OK"}]  # fmt: skip
    path = lines(tmp_path / "x.jsonl", *rows)
    assert read_documents(path, tokenizer, ["import", "x", "y"]) == ["x = 1", "y"]
    with pytest.raises(
        ValueError, match="^data: got line 4 .*the text of prompt 2, allowed: those of the prompts given, 2"
    ):
        read_documents(path, tokenizer, ["import", "x"])
    with pytest.raises(ValueError, match="^data: got line 1 .*the text of prompt 1, allowed: .*given, 0"):
        read_documents(path, tokenizer)


def test_another_file_is_one_text(tmp_path, tokenizer):
    (tmp_path / "x.py").write_text("a\n\nb\n")
    assert read_documents(tmp_path / "x.py", tokenizer) == ["a\n\nb\n"]


def test_parquet_and_saved_datasets(tmp_path, tokenizer):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"text": ["a", None], "prompt": [None, "b"]}), tmp_path / "x.parquet")
    assert read_documents(tmp_path / "x.parquet", tokenizer) == ["a", "b"]
    (tmp_path / "y.parquet").write_text("no")
    with pytest.raises(ValueError, match="^data: got .*y.parquet.*allowed: a Parquet file"):
        read_documents(tmp_path / "y.parquet", tokenizer)
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": ["c", "d"]}).save_to_disk(tmp_path / "saved")
    assert read_documents(tmp_path / "saved", tokenizer) == ["c", "d"]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ('{"text": "a"}\n{"text": "b', "line 2 of .*, where the file ends in the middle of a line"),
        ('{"text": "a"}\n{"text": b}\n', r"line 2 of .*x.jsonl' \(Expecting value"),
        ("[1]\n", r"line 1 of .*, \[1\], allowed: an object"),
        ('{"texts": "a"}\n', "line 1 of .*, with the keys .*texts.*allowed: one of text, messages, prompt"),
        ('{"text": 3}\n', "line 1 of .*: text: got 3, allowed: a text"),
        ('{"text": "\\ud800"}\n', "lone surrogates"),
        ('{"messages": [{"role": "cat", "content": "x"}]}\n', "line 1 of .*messages: got"),
        ("\n", "without a text"),
        ("", "without a text"),
    ],
)
def test_wrong_rows_are_refused_by_their_line(tmp_path, tokenizer, content, told):
    (tmp_path / "x.jsonl").write_text(content)
    with pytest.raises(ValueError, match=f"^data: .*{told}"):
        read_documents(tmp_path / "x.jsonl", tokenizer)


def test_files_that_cannot_be_read(tmp_path, tokenizer):
    with pytest.raises(ValueError, match=r"^data: got .*none.*No such file"):
        read_documents(tmp_path / "none.jsonl", tokenizer)
    (tmp_path / "x.txt").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ValueError, match="^data: got .*not UTF-8"):
        read_documents(tmp_path / "x.txt", tokenizer)


def test_duplicates_evaluation_prompts_and_held_out_texts_are_left_out():
    prompt, short = "x" * SHORTEST, "y" * (SHORTEST - 1)
    texts = [f"text {i}" for i in range(2000)]
    corpus = split([*texts, "text 7 ", f"before {prompt} after", f"has {short}"], [prompt, short])
    assert (corpus.duplicates, corpus.known) == (1, 1)
    assert f"has {short}" in [*corpus.training, *corpus.held_out]
    assert sorted([*corpus.training, *corpus.held_out]) == sorted([*texts, f"has {short}"])
    assert 30 < len(corpus.held_out) < 100 and corpus == split(
        [*texts, "text 7 ", f"a {prompt}", f"has {short}"], [prompt]
    )
    own = split([*texts, "mine"], [], ["mine", "text 3"])
    assert own.held_out == ["mine", "text 3"] and own.known == 2 and len(own.training) == 1999
