"""--json-schema and --regex of ``generate`` and ``chat``, and the same as keys of lines."""

from __future__ import annotations

import json
import re

import jsonschema
import pytest
from specdec.cli import app
from support.commands import PROMPT, invoke, refused, rows
from support.failing_grammars import let_objects_fail
from support.grammars import SCHEMAS
from support.hostile_grammars import HOSTILE
from typer.testing import CliRunner

NUMBER = ("--regex", "[0-9]{2,4}")


def test_a_regex(tmp_path):
    plain, *others = (rows(PROMPT, *NUMBER, "--drafter", name)[0] for name in ("none", "model", "suffix"))
    assert re.fullmatch("[0-9]{2,4}", plain["text"]) and plain["finish_reason"] == "eos"
    assert all(other["text"] == plain["text"] for other in others)


def test_a_schema_as_json_and_as_a_file(tmp_path):
    schema = json.dumps(SCHEMAS["enum"])
    (tmp_path / "schema.json").write_text(f"\ufeff{schema}")  # as editors on Windows write it
    given, of_file = (rows(PROMPT, "--json-schema", each)[0] for each in (schema, tmp_path / "schema.json"))
    jsonschema.validate(json.loads(given["text"]), SCHEMAS["enum"])
    assert of_file["text"] == given["text"]


@pytest.mark.parametrize("job", [False, True])
def test_lines_have_grammars_of_their_own(tmp_path, job):
    lines = [
        {"prompt": PROMPT, "json_schema": SCHEMAS["array"]},
        {"prompt": PROMPT, "regex": "yes|no"},
        {"prompt": PROMPT, "json_schema": None, "max_new_tokens": 5},
        {"prompt": PROMPT, "json_schema": json.dumps(SCHEMAS["tuple"])},
    ]
    path, output = tmp_path / "lines.jsonl", tmp_path / "out.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = rows("--batch-file", path, *(("--output", output) if job else ()))
    texts = {row["id"]: row["text"] for row in found}
    jsonschema.validate(json.loads(texts[0]), SCHEMAS["array"])
    assert texts[1] in ("yes", "no") and texts[2] == rows(PROMPT, "--max-new-tokens", 5)[0]["text"]
    jsonschema.validate(json.loads(texts[3]), SCHEMAS["tuple"])


@pytest.mark.parametrize("job", [False, True])
def test_a_grammar_that_fails_in_the_middle_of_a_text_fails_its_line_alone(tmp_path, monkeypatch, pair, job):
    let_objects_fail(monkeypatch, pair[2])
    lines = [{"prompt": PROMPT, "json_schema": {"type": "object"}}, {"prompt": PROMPT, "max_new_tokens": 5}]
    path, output = tmp_path / "lines.jsonl", tmp_path / "out.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    more = ("--output", output) if job else ()
    result = CliRunner().invoke(
        app, ["generate", "--json", "--device", "cpu", "--batch-file", str(path), *map(str, more)]
    )
    found = (output.read_text() if job else result.stdout).splitlines()
    failed, fine = sorted(map(json.loads, found), key=lambda row: row["id"])
    assert (failed["finish_reason"], failed["text"]) == ("failed", "{")
    assert failed["error"].startswith("GrammarError: grammar: Parser Error")
    assert fine["text"] == rows(PROMPT, "--max-new-tokens", 5)[0]["text"] and "error" not in fine
    assert failed["status"] == "ERROR" and fine["status"] == "OK"
    assert result.exit_code == (3 if job else 0) and (job or "prompt 0: GrammarError: grammar:" in result.output)


def test_a_chat_answers_in_the_form():
    result = CliRunner().invoke(app, ["chat", *NUMBER, "--device", "cpu"], input="x = \ny = \n")
    assert result.exit_code == 0 and re.fullmatch(r"([0-9]{2,4}\n){2}", result.stdout), result.output


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (("--regex", "a", "--json-schema", "{}"), "--json-schema / --regex: got both, allowed: one of the two"),
        (("--regex", "(?=a)b"), "--regex: llguidance cannot hold it: .*look-around"),
        (("--regex", ""), "--regex: got '', allowed: a regular expression"),
        (("--json-schema", '{"uniqueItems": true}'), "--json-schema: llguidance cannot hold it: Unimplemented keys"),
        (("--json-schema", "{"), "--json-schema: got '{', allowed: a JSON Schema"),
        (("--json-schema", "missing.json"), "--json-schema: got 'missing.json', allowed: a JSON Schema that begins"),
        (("--regex", "a", "--min-new-tokens", 2), "--min-new-tokens: got 2 with a grammar"),
        (("--regex", "a", "--drafter", "suffix", "--tree", 4), "got one with tree=4"),
    ],
)
def test_what_cannot_be_is_refused_by_its_option(options, told):
    message = refused("generate", PROMPT, *options)
    assert re.search(told, message), message


def test_a_line_that_cannot_be_is_named(tmp_path):
    path = tmp_path / "lines.jsonl"
    path.write_text(json.dumps({"prompt": "x"}) + "\n" + json.dumps({"prompt": "x", "regex": "["}) + "\n")
    message = refused("generate", "--batch-file", path)
    assert re.search("line 2 of .*lines.jsonl.*: regex: llguidance cannot hold it", message), message


def test_a_line_whose_grammar_costs_too_much_fails_alone(tmp_path):
    """Also one that would end the process; the others have the texts that they have without it."""
    honest = [{"prompt": PROMPT, "regex": "[0-9]{3}"}, {"prompt": PROMPT, "json_schema": SCHEMAS["array"]}]
    path, output = tmp_path / "lines.jsonl", tmp_path / "out.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in honest))
    alone = {row["id"]: row["text"] for row in rows("--batch-file", path)}
    deep, large = (json.loads(HOSTILE[name][0]().text) for name in ("references", "multiples"))
    hostile = [{"id": f"h{i}", "prompt": PROMPT, "json_schema": schema} for i, schema in enumerate((deep, large))]
    path.write_text("".join(json.dumps(line) + "\n" for line in (honest[0], *hostile, {**honest[1], "id": 1})))
    result = invoke("generate", "--batch-file", path, "--output", output, "--no-progress")
    assert result.exit_code == 3, result.output
    found = {row["id"]: row for row in map(json.loads, output.read_text().splitlines())}
    assert {id: row["text"] for id, row in found.items() if row["finish_reason"] != "failed"} == alone
    errors = [found[f"h{i}"]["error"] for i in range(2)]
    assert re.search("json_schema: llguidance cannot hold it: .* too deeply", errors[0]), errors
    assert re.search("json_schema: llguidance cannot hold it: it takes more than", errors[1]), errors
    assert "--json-schema: llguidance cannot hold it: it nests" in refused(
        "generate", PROMPT, "--json-schema", json.dumps(deep)
    )


@pytest.mark.parametrize("number", ["0.123456789012345678", "1234567890123456789"])
def test_digits_of_schemas_are_not_lost_on_the_way(tmp_path, number):
    path = tmp_path / "lines.jsonl"
    path.write_text(f'{{"prompt": "x", "json_schema": {{"const": {number}}}, "temperature": 0.50}}\n')
    for given in (("--batch-file", path), (PROMPT, "--json-schema", f'{{"const": {number}}}')):
        assert f"got const with {number}" in refused("generate", *given)
