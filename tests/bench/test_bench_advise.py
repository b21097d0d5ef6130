"""bench_advise.py: what is predicted stands beside what is measured with the same K."""

from __future__ import annotations

import json
from types import SimpleNamespace

import bench_advise
import pytest
from bench_advise import Pair
from specdec.evaluation.advise import AdviseSettings
from specdec.evaluation.advise.machine_trouble import Threads
from support.benches import run_main
from support.models import prompts, tunable_pair


def test_the_advised_k_is_measured_and_texts_are_compared():
    target, draft = tunable_pair(0.0)
    advice = SimpleNamespace(verdict=SimpleNamespace(num_drafts=3), settings=AdviseSettings(tokens=8))
    found = bench_advise.compare(Pair(target, draft, prompts(2, 3, 5)), advice, 1)
    assert found["tau"] == 4.0 and found["greedy_equal"] is True and found["speedup"]["rounds"] == 1


def test_pairs_are_named():
    refused = run_main(bench_advise, "--pairs", "embedded;nonesuch")
    assert refused.exit_code == 2 and "nonesuch" in refused.output


@pytest.mark.nightly
def test_the_report_of_advice(tmp_path, monkeypatch):
    monkeypatch.setattr(Threads, "oversubscribed", False)
    done = run_main(bench_advise, "--quick", "--threads", 1, "--json", tmp_path / "out.json")
    assert done.exit_code == 0, done.output
    (row,) = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert row["pair"] == "embedded" and row["measured"]["greedy_equal"] and row["K"] in (1, 2)
    ratio = row["predicted"]["speedup"] / row["measured"]["speedup"]["median"]
    assert row["predicted_over_measured"] == pytest.approx(ratio)
