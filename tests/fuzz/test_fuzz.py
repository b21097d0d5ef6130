"""``python -m tests.fuzz`` finds what differs, and its cases are what they say; the sanitized steps run."""

from __future__ import annotations

import json
import re

import pytest
import torch
from support.benches import run_main

from . import compare, random_cases, sanitize
from .random_cases import Limits, random_case

CPU = torch.device("cpu")
SMALL = ("--max-vocabulary", "1100", "--max-logits", "2000")


def compared(*arguments: str):
    return run_main(compare, *SMALL, *arguments)


# The fibers and Triton's interpreter run what a GPU runs; on a GPU the stage `fuzz` does.
@pytest.mark.skipif(torch.cuda.is_available(), reason="cuda and triton get GPU tensors only")
@pytest.mark.parametrize(
    ("backend", "steps"), [("cpu", 60), ("cuda", 25), pytest.param("triton", 2, marks=pytest.mark.nightly)]
)
def test_backends_agree_on_random_cases(tmp_path, backend, steps):
    path = tmp_path / "out.json"
    done = compared("--backends", backend, "--steps", str(steps), "--json", path)
    assert done.exit_code == 0, done.output
    content = json.loads(path.read_text())
    (row,) = content["rows"]
    assert content["complete"] and content["disagreements"] == [] and content["steps"] == steps
    assert row["backend"] == backend and row["cases"] > steps
    for counts in row["counts"].values():
        assert sum(counts.values()) == row["cases"]
    assert row["counts"].keys() >= {"rule", "form_of_q", "distribution", "dtype", "draft_dtype", "layout", "corner"}


@pytest.mark.nightly
def test_backends_agree_on_thousands_of_cases_of_all_sizes():
    done = run_main(compare, "--cases", "20000")
    assert done.exit_code == 0 and "cpu: 200" in done.output, done.output


@pytest.mark.parametrize("name", ["tokens", "num_accepted", "status", "raise"])
def test_a_planted_disagreement_is_found_and_shown_again(monkeypatch, tmp_path, name):
    """One sequence of one step is wrong: exit code 1, and a command that shows it alone."""
    right, calls = compare.step_of, []

    def wrong(backend, inputs):
        out = right(backend, inputs)
        calls.append(backend)
        # Once more in the second run, whose only step this is.
        if len(calls) in (5, 6):
            if name == "raise":
                raise RuntimeError("launch failed")
            changed = getattr(out, name).clone()
            changed.view(-1)[-1] += 1
            out = out._replace(**{name: changed})
        return out

    monkeypatch.setattr(compare, "step_of", wrong)
    found = compared("--steps", "20", "--json", tmp_path / "out.json")
    assert found.exit_code == 1 and "DIFFERENT: step 4, backend cpu" in found.output
    assert ("launch failed" if name == "raise" else "the first is") in found.output
    content = json.loads((tmp_path / "out.json").read_text())
    (told,) = content["disagreements"]
    assert "step 4" in told and not content["complete"] and content["rows"][0]["cases"] > 0
    command = re.search(r"again: python -m tests.fuzz (.*)", found.output)
    again = run_main(compare, *command[1].split())
    assert again.exit_code == 1 and "DIFFERENT: step 4, backend cpu" in again.output


def test_all_disagreements_are_collected(monkeypatch, tmp_path):
    """As many as are asked for, each with its command; a device that has failed ends the run."""
    right = compare.step_of

    def wrong(backend, inputs):
        out = right(backend, inputs)
        return out._replace(status=out.status + 1) if len(inputs.seed) % 2 else out

    monkeypatch.setattr(compare, "step_of", wrong)
    done = compared("--steps", "60", "--disagreements", "3", "--json", tmp_path / "out.json")
    content = json.loads((tmp_path / "out.json").read_text())
    steps = [re.search(r"step (\d+), .*--first (\d+) ", told, re.DOTALL).groups() for told in content["disagreements"]]
    assert done.exit_code == 1 and len({*steps}) == 3 and all(a == b for a, b in steps)
    assert content["steps"] == int(steps[-1][0]) + 1 < 60
    monkeypatch.setattr(compare, "usable", lambda device: False)
    done = compared("--steps", "60", "--disagreements", "3")
    assert done.exit_code == 1 and done.output.count("DIFFERENT") == 1


def test_a_planted_draft_is_found(monkeypatch):
    right = compare.draft_of

    def wrong(backend, inputs, logits, offset):
        drawn = right(backend, inputs, logits, offset)
        return drawn._replace(tokens=(drawn.tokens + 1) % logits.shape[-1]) if logits.shape[-1] > 1 else drawn

    monkeypatch.setattr(compare, "draft_of", wrong)
    done = compared("--steps", "20")
    assert done.exit_code == 1 and "draft_step number" in done.output


def test_near_ties_that_go_the_other_way_are_few(monkeypatch):
    """A margin of nothing excuses every difference, but not so many of them."""
    monkeypatch.setattr(compare, "assert_same_step", lambda actual, expected, margin, context: len(margin))
    done = compared("--steps", "10")
    assert done.exit_code == 1 and "near-ties" in done.output.split("DIFFERENT")[1]


def test_time_and_cases_end_a_run():
    done = compared("--cases", "1")
    assert done.exit_code == 0 and "1 steps" in done.output
    done = compared("--seconds", "0.000001")
    assert done.exit_code == 0 and "0 steps" in done.output


def test_a_number_gives_the_same_case_again():
    for number in range(20):
        one, same = (random_case(number, CPU, Limits(1000, 8, 2000)) for _ in range(2))
        assert one.traits == same.traits and one.inputs.target_logits.stride() == same.inputs.target_logits.stride()
        pairs = zip(one.inputs.tensors(), same.inputs.tensors(), strict=True)
        assert all(a.equal(b) or torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in pairs)


def test_cases_have_every_trait():
    """Over a few hundred numbers, everything that is drawn from comes up; and structures repeat where they have to."""
    structures = [random_cases.Structure.of(n) for n in range(600)]
    assert {(s.rule, s.form) for s in structures} == set(random_cases.RULES_AND_FORMS)
    assert {(s.dtype, s.draft_dtype) for s in structures} == {
        (a, b) for a in random_cases.DTYPES for b in random_cases.DTYPES
    }
    for name, values in (("filters", 2), ("table", 3), ("log_probs", 2), ("ragged", 2)):
        assert len({getattr(s, name) for s in structures}) == values
    cases = [random_case(n, CPU, Limits(300, 8, 1000), variants=3) for n in range(60)]
    assert len({c.structure for c in cases}) <= 3
    assert {c.traits["layout"] for c in cases} == set(random_cases.LAYOUTS)
    assert {c.traits["corner"] for c in cases} == set(random_cases.CORNERS)
    shapes = {tuple(c.inputs.target_logits.shape) for c in cases}
    assert {rows - 1 for _, rows, _ in shapes} == set(range(9)) and len({v for *_, v in shapes}) > 10
    assert any(c.inputs.target_logits.stride(0) == 0 for c in cases if len(c.inputs.seed) > 1)
    assert any(c.inputs.target_logits.isnan().any() for c in cases)
    assert any((c.inputs.draft_tokens < -1).any() for c in cases)


@pytest.mark.parametrize("layout", random_cases.LAYOUTS)
def test_layouts_keep_values(layout):
    t = torch.randn(3, 4, 37)
    view = random_cases.LAYOUTS[layout](t)
    assert torch.equal(view, t[:1].expand(3, 4, 37) if layout == "expanded" else t)
    if layout != "contiguous":
        assert not view.is_contiguous()
    if layout == "unaligned":
        assert view.storage_offset() % 4 and view.stride(1) % 2


@pytest.mark.parametrize(
    "arguments, named",
    [(("--backends", "reference"), "backends"), (("--cases", "0"), "--cases"), (("--device", "tpu"), "device")],
)
def test_a_bad_option_is_named(arguments, named):
    done = run_main(compare, *arguments)
    assert done.exit_code == 2 and named in done.output


# ---- What compute-sanitizer watches


@pytest.mark.nvcc
@pytest.mark.parametrize("backend", ["cpu", "cuda"])
def test_sanitized_steps_run(backend, capsys):
    """Also on fibers, which see what a sanitizer would."""
    device = "cuda" if backend == "cuda" and torch.cuda.is_available() else "cpu"
    sanitize.main(device=device, backend=backend, seconds=1.0 if backend == "cpu" else 4.0)
    done = int(capsys.readouterr().out.split()[1])
    assert done >= 10


def test_sanitized_steps_have_every_rule_form_and_distribution():
    makers = sanitize.cases()
    early = [m.args[1:] for m in makers[:60] if m.func is sanitize.made]
    assert {rule for _, rule, _, _ in early} == {"token", "block", "coupled"}
    assert {form for _, _, form, _ in early} == set(sanitize.FORMS)
    assert {distribution for *_, distribution in early} == set(sanitize.DISTRIBUTIONS) and {
        s for s, *_ in early
    } == set(sanitize.SHAPES)
    many = [m for m in makers[:60] if m.func is sanitize.many_rows]
    assert [m.args for m in many] == [("token",), ("block",), ("coupled",)]
    assert many[0]().draft_logits is not None and many[2]().draft_logits is None
