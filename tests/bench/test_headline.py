"""headline.py: what it runs, what it says of what is not here, and the tables that it writes of made-up results."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace

import headline
import headline_tables as tables
import pytest
import torch
from headline import BY_NAME, HEADLINES, Headline
from support import ROOT
from support.bench_results import cell, results
from support.benches import run_main

STAMP = {
    "command": "python bench/x.py --quick --json build/x.json", "commit": "f" * 40, "dirty": False,
    "date": "2026-01-02T03:04:05", "threads": 2, "instruction_set": "avx2", "hardware": {"cpu": "Example CPU"},
    "versions": {"torch": "2.13.0+cpu", "transformers": "5.23.0"},
}  # fmt: skip


def summary(median: float) -> dict[str, float]:
    return {"median": median, "q1": median / 2, "q3": 2 * median, "rounds": 5}


def test_every_result_is_shown_and_every_program_is_there():
    assert [headline.name for headline in HEADLINES] == [shown.file for shown in tables.SIX]
    for each in HEADLINES:
        for command in (each.command, each.quick):
            program = shlex.split(command)[0]
            assert program == "-m" or (ROOT / program).is_file()
        assert ("{json}" in each.command) == ("{json}" in each.quick) == ("--json" in each.command and "-m" != program)


def test_the_page_has_all_of_them():
    page = (ROOT / "docs/numbers.md").read_text()
    assert all(f"### {shown.title}" in page for shown in tables.SIX if shown.title)


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A folder with a page, and results that a stand-in for a benchmark makes."""
    (tmp_path / "bench.py").write_text(
        "import json, sys\n"
        "content = json.loads(sys.argv[1])\n"
        "if sys.argv[-2] == '--json': open(sys.argv[-1], 'w').write(json.dumps(content))\n"
        "else: print(json.dumps(content))\n"
    )
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/numbers.md").write_text("# Numbers\n\nWhat is what.\n\n## The six\n\nold\n\n## Older\n\nkept\n")
    for module in (headline, tables):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(headline, "RESULTS", tmp_path / "bench/results")
    monkeypatch.setattr(headline, "PAGE", tmp_path / "docs/numbers.md")
    monkeypatch.setattr(headline, "TRIED", tmp_path / "build/headline")

    def use(**commands: Headline) -> None:
        for name, made in commands.items():
            monkeypatch.setitem(BY_NAME, name, made)

    return tmp_path, use


JOB = STAMP | {
    "rows": [
        {"method": "transformers", "prompts_per_second": summary(2.0), "tokens_per_second": summary(100.0),
         "times_transformers": summary(1.0)},
    ]
}  # fmt: skip


def command(content: dict, *more: str) -> str:
    return shlex.join(["bench.py", json.dumps(content).replace("{", "{{").replace("}", "}}"), *more])


def test_a_result_is_made_and_its_table_is_written(repository):
    folder, use = repository
    made = command(JOB, "--json") + " {json}"
    use(job=Headline("job", made, made))
    done = run_main(headline, "job")
    assert done.exit_code == 0, done.output
    page = (folder / "docs/numbers.md").read_text()
    assert page.startswith("# Numbers\n\nWhat is what.\n\n## The six\n\n### 1. Verifying") and "old\n" not in page
    assert page.endswith("\n\n## Older\n\nkept\n")
    assert "| transformers | 2.00 (1.00 to 4.00) | 100 (50.0 to 200) | 1.00 (0.500 to 2.00) |" in page
    said = " ".join(page.split())
    assert "Example CPU, 2 threads (avx2); commit ffffffffff, 2026-01-02; torch 2.13.0, transformers 5.23.0." in said
    assert "`python bench/x.py --quick` made `bench/results/cpu/job.json`." in said
    assert "Not measured yet: `python bench/headline.py clients`." in page
    assert run_main(headline, "--tables").exit_code == 0
    assert (folder / "docs/numbers.md").read_text() == page


def test_a_quick_run_leaves_the_page_alone(repository):
    folder, use = repository
    before = (folder / "docs/numbers.md").read_text()
    use(job=Headline("job", "{json}", command(JOB, "--json") + " {json}"))
    done = run_main(headline, "job", "--quick")
    assert done.exit_code == 0, done.output
    assert (folder / "docs/numbers.md").read_text() == before
    assert "| transformers | 2.00" in (folder / "build/headline/numbers.md").read_text()


def test_what_a_command_prints_becomes_a_result_without_samples(repository):
    folder, use = repository
    printed = results([cell("transformers", None), cell("plain", None), cell("model", 4)])
    printed["cells"][0]["rounds"] = [printed["cells"][0]["rounds"][0] | {"inter_token": [0.1] * 9}]
    use(smollm2=Headline("smollm2", command(printed), ""))
    done = run_main(headline, "smollm2")
    assert done.exit_code == 0, done.output
    content = json.loads((folder / "bench/results/cpu/smollm2.json").read_text())
    assert content["complete"] and content["commit"] and content["hardware"] and "sources" not in content
    assert "inter_token" not in content["cells"][0]["rounds"][0] and content["format"] == "specdec bench 1"
    page = (folder / "docs/numbers.md").read_text()
    assert "| greedy | draft model, K = 4 | 228 | 2.85 | 2.28 | 3.36 |" in page


def test_what_is_not_here_is_said_and_what_fails_is_reported(repository):
    folder, use = repository
    use(
        clients=replace(BY_NAME["clients"], needs=("real_models/none",)),
        decode=replace(BY_NAME["decode"], gpu=True),
        job=Headline("job", "absent.py --json {json}", ""),
        rivals=Headline("rivals", "absent.py --json {json}", "", rivals=True),
    )
    done = run_main(headline, "clients", "decode", "job", "rivals")
    said = " ".join(done.output.split())
    assert done.exit_code == 1
    assert "left out: clients: no real_models/none: python tools/real_models.py" in said
    assert "left out: job: exit code 2" in said
    assert "left out: vllm: no build/vllm/bin/python" in said
    assert torch.cuda.is_available() or "left out: decode: no GPU" in said


def test_the_best_way_of_every_other_program_counts():
    def row(method: str, speed: float, over: float | None = None, busy: int = 0) -> dict:
        row = {"weights": "8 bits", "method": method, "busy": busy, "tokens_per_second": summary(speed)}
        return row if over is None else row | {"over_its_best": summary(over)}

    rows = [
        row("specdec", 100.0, 1.25), row("specdec, suffix", 120.0, 1.5), row("specdec, prompt lookup", 110.0, 1.4),
        row("llama.cpp", 80.0, 1.0), row("llama.cpp, prompt lookup", 60.0, 0.8), row("llama.cpp", 999.0, 1.0, busy=1),
        row("transformers", 20.0), row("transformers, prompt lookup", 30.0),
        {"weights": "8 bits", "prompt": "code", "method": "specdec", "tokens_per_second": summary(5.0)},
    ]  # fmt: skip
    assert tables.rivals({"rows": rows}) == [["8 bits", "100", "120", "80.0", "", "", "30.0", "1.25", "1.50"]]
    shown = next(shown for shown in tables.SIX if shown.file == "rivals")
    head = tables.table(shown.head, tables.rivals({"rows": rows})).splitlines()[0]
    assert "vLLM" not in head and "transformers" in head


def test_times_of_kernels_become_speed_ups():
    step = {
        "B": 1, "K": 5, "V": 128256, "drafts": "typical", "cases": {"step": {"alpha": 0.7612}},
        "seconds": {"cpu": summary(2e-3)},
        "ratios": {"cpu/transformers": summary(0.1), "cpu/floor_all_rows": summary(2.0)},
    }  # fmt: skip
    rows = tables.verification({"rows": [step, step | {"K": 8}]})
    assert rows == [["1", "alpha 0.76", "2.00 ms", "10.0", "", "", "2.00"]]
    goal = {
        "goal": "few", "B": 8, "K": 5, "V": 151936, "drafts": "typical",
        "seconds": {"cuda+stats [cold]": summary(1e-5), "triton+stats [cold]": summary(2e-5)},
        "ratios": {"cuda+stats [cold]/flashinfer [cold]": summary(0.05), "cuda+stats/transformers": summary(0.02)},
    }  # fmt: skip
    rows = tables.goals({"rows": [goal, goal | {"drafts": "all_accepted"}]})
    assert rows == [["`few`", "B = 8, K = 5, V = 151936", "10.0 us", "20.0 us", "20.0", "", "50.0"]]


def test_crowds_and_decoding_have_their_rows():
    crowd = {"crowd": "half", "tokens_per_second": summary(200.0), "of_free": summary(1.0), "lost": 0}
    crowds = [crowd | {"obeying": 64, "valid": 63}, crowd | {"crowd": "free", "obeying": 0, "valid": 0}]
    found = tables.clients({"rows": crowds})
    assert found[0][0] == "half of them obey a JSON Schema" and found[0][-2:] == ["63 of 64", "0"]
    assert found[1][-2:] == ["", "0"]
    methods = [("transformers", 40.0, 1.0), ("plain graphs", 150.0, 1.0), ("specdec K=4 graphs", 300.0, 4.0)]
    row = {
        "B": 1, "methods": [{"name": n, "tokens_per_second": summary(s), "tau": t} for n, s, t in methods],
        "found": {"baseline": "plain graphs", "fastest": "specdec K=4 graphs",
                  "times": {"transformers": summary(7.5), "baseline": summary(2.0)}},
    }  # fmt: skip
    assert tables.decoding({"rows": [row]})[0][:4] == ["1", "40.0", "150", "300"]
