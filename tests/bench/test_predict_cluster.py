"""predict_cluster.py: its arithmetic by hand, what it reads of steps, and what it says of GPUs."""

from __future__ import annotations

import contextlib
import json

import cluster_job
import figures_cluster
import predict_cluster
import pytest
import report
import torch
from cluster_costs import Costs, Text, together
from cluster_gpus import Asked, OnGpu, measured_steps, pair_on, steps_measured, verification
from cluster_job import Case, Record, costs_of
from predict_cluster import cluster
from results import FOLDER, Results
from specdec.jobs.shard import WHOLE, Shard
from support.benches import run_main

COSTS = Costs(steps=(2.0, 3.0), tau=2.0, token=0.1, prompt=0.5)
ASKED = Asked(prompts=400, prompt_tokens=512, new_tokens=256, alpha=0.7, price=3.0, startup=60.0, load=1.0)


def test_a_job_by_hand():
    """Two rows: texts of 2 and 4 steps begin, and after 2 steps a third one, of 1 step."""
    read = (0.5 + 1.0) + (0.5 + 2.0) + 0.5
    assert COSTS.of_job([Text(10, 4), Text(20, 8), Text(0, 2)]) == pytest.approx(read + 2 * 3 + 1 * 3 + 1 * 2)
    assert COSTS.of_job([]) == 0


def test_a_job_whose_rows_are_always_busy_takes_what_its_texts_do():
    text = Text(30, 12)
    assert COSTS.of_job([text] * 40) == pytest.approx(40 * COSTS.of_text(text))
    assert COSTS.of_job([text] * 41) > 41 * COSTS.of_text(text)  # the last row alone


def test_processes_share_cores():
    alone, slower = {1: 1.0}, {1: 1.0, 2: 1.5}
    assert together([4.0] * 4, 2, alone) == pytest.approx(8)
    assert together([4.0] * 4, 2, slower) == pytest.approx(12)
    assert together([1.0, 3.0], 2, slower) == pytest.approx(1.5 + 2)
    assert together([4.0, 1.0, 1.0], 2, alone) == pytest.approx(1.5 + 3)  # three share two cores, then one has its own
    assert together([2.0, 2.0, 2.0], 8, slower) == pytest.approx(3)  # as of two, where three were not measured


def test_costs_are_means_of_steps_by_busy_rows():
    steps = [(1, 2.0, 1), (3, 4.0, 6), (3, 6.0, 9), (3, 5.0, 4)]
    found = costs_of(Record(steps, [(10, 1.0), (30, 3.0)], seconds=23.0, prompts=4), 4)
    assert found == Costs([2.0, 3.5, 5.0, 5.0], tau=2.0, token=0.1, prompt=0.5)


class Link:
    """A parent that asks for one shard."""

    def __init__(self, *told: object):
        self.told, self.sent = [*told, "begin", None], []

    def recv(self) -> object:
        return self.told.pop(0)

    def send(self, what: object) -> None:
        self.sent.append(what)


def test_a_process_notes_what_it_does(tmp_path, monkeypatch):
    threads: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    path, tokenizer = tmp_path / "job.jsonl", cluster_job.load_embedded_pair()[2]
    texts = cluster_job.write_prompts(path, tokenizer, 1, 5)
    assert sorted(text.new for text in texts) == [16, 36, 56, 76, 96]
    link = Link((path, Shard(1, 2)))
    cluster_job.work(link, Case("embedded pair", 2, 2, 5))
    first, second, (begun, ended, record) = link.sent
    assert (first, second, threads[0], record.prompts) == ("ready", "ready", 1, 2)
    assert sum(tokens for *_, tokens in record.steps) == texts[1].new + texts[3].new
    assert sum(tokens for tokens, _ in record.read) == texts[1].prompt + texts[3].prompt
    assert {live for live, *_ in record.steps} <= {1, 2} and record.seconds == ended - begun
    costs = costs_of(record, 2)
    assert 1 <= costs.tau <= 3 and min(*costs.steps, costs.token, costs.prompt) > 0


class OneRow:
    """Processes with a row and a core each, whose steps take a second, and side by side two."""

    startup = [1.0]

    def run(self, path, shards):
        new = [json.loads(line)["max_new_tokens"] for line in path.read_text().splitlines()]
        own = [sum(new) if s is WHOLE else sum(new[s.index :: s.count]) for s in shards]
        step = float(len(shards))
        steps = [(1, step, 1)] * sum(own)
        return step * max(own), Record(steps, [(1, 0.0)], step * sum(own), 1)


def test_a_check_compares_the_prediction_with_what_was_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(predict_cluster, "processes", lambda *_: contextlib.nullcontext(OneRow()))
    monkeypatch.setattr(report, "usable_cores", lambda: [0, 1])
    results = report.Report("cluster", torch.device("cpu"), None, None)
    predict_cluster.check(results, Case("one row", 0, 1, 2), [1, 2], 2, tmp_path)
    one, two = results.rows
    assert one["predicted"]["median"] == one["measured"]["median"] == 16 + 96
    assert two["slowdown"][2]["median"] == 2.0 and two["measured"]["median"] == 2 * 96
    # When the short text has ended, the other process is alone, which this one does not know.
    assert two["predicted"]["median"] == pytest.approx(2 * 16 + (96 - 16))


# ---- On GPUs


def test_shapes_are_those_of_the_models():
    pair = pair_on("H100 SXM", 0.7)
    assert (pair.target.parameters, pair.draft.parameters) == (8_030_261_248, 1_235_814_400)
    assert pair.target.cached == 2 * 32 * 8 * 128 and pair.draft.cached == 2 * 16 * 8 * 64


def loop(pair: str, *rows: dict) -> str:
    return json.dumps({"pair": pair, "quick": False, "rows": rows})


def row(B: int, context: int, **speeds: float) -> dict:
    methods = [
        {"name": f"{kind} graphs", "tau": 2.0 if kind == "specdec" else 1.0, "tokens_per_second": {"median": speed}}
        for kind, speed in speeds.items()
    ]
    return {"B": B, "K": 2, "context": context, "new_tokens": 128, "methods": methods}


def test_measured_steps_take_the_place_of_the_roofline(tmp_path):
    pair, path = pair_on("H200 SXM", 0.7), tmp_path / "h200" / "decode.json"
    path.parent.mkdir()
    assert steps_measured("H200 SXM", ASKED, tmp_path) == ("by roofline", {"plain": {}, "specdec": {}})
    assert measured_steps(path, pair, 640) == {"plain": {}, "specdec": {}}
    plain, drafts = pair.predict(8, 640, 0), pair.predict(8, 640, 2)
    seconds = drafts.draft_seconds + drafts.target_seconds
    at_8 = row(8, 512, plain=8 / plain.plain_step / 3, specdec=8 * 2.0 / seconds / 1.5)
    path.write_text(loop("8b+1b", at_8, row(8, 8192, plain=1.0, specdec=1.0)))
    found = measured_steps(path, pair, 640)
    assert found == {"plain": {8: pytest.approx(3)}, "specdec": {8: pytest.approx(1.5)}}
    assert steps_measured("H200 SXM", ASKED, tmp_path) == ("measured", found)
    (tmp_path / "h100").mkdir()
    path.rename(path := tmp_path / "h100" / "decode.json")
    told, of_another = steps_measured("H200 SXM", ASKED, tmp_path)
    assert told == "as an H100's" and of_another == steps_measured("H100 SXM", ASKED, tmp_path)[1]
    assert of_another["plain"][8] < 3  # the H100's roofline is longer
    path.write_text(loop("8b", at_8))
    assert measured_steps(path, pair, 640) == {"plain": {}, "specdec": {}}
    measured, by_roofline = (OnGpu(pair, ASKED, 1e-3, factors) for factors in (found, {"plain": {}, "specdec": {}}))
    assert measured.costs(8, 0).steps[-1] == pytest.approx(3 * plain.plain_step) and measured.costs(8, 0).tau == 1.0
    costs = by_roofline.costs(8, 2)
    assert costs.steps[-1] == pytest.approx(seconds + 1e-3 * 8 * 3) and costs.tau == pytest.approx(1 + 0.7 + 0.49)
    assert by_roofline.of_text(8, 2) == pytest.approx(costs.of_text(Text(512, 256)))


def test_drafts_pay_as_long_as_they_yield_more():
    pair = pair_on("H200 SXM", 0.7)
    gpu = OnGpu(pair, ASKED, 1e-6, {"plain": {}, "specdec": {}})
    assert gpu.of_text(8, gpu.best(8)) == min(gpu.of_text(8, k) for k in range(1, 17)) < gpu.of_text(8, 0)
    most = gpu.pays_up_to(400)
    assert 8 < most < 400 and gpu.pays_up_to(8) == 8
    assert gpu.of_text(most, gpu.best(most)) < gpu.of_text(most, 0)
    assert gpu.of_text(most + 1, gpu.best(most + 1)) >= gpu.of_text(most + 1, 0)
    never = OnGpu(pair_on("H200 SXM", 0.0), ASKED, 1e-6, {"plain": {}, "specdec": {}})
    assert never.pays_up_to(8) == 0


def test_a_cluster_is_as_fast_as_its_last_shard():
    pair, texts, startup = pair_on("H100 SXM", 0.7), ASKED.texts(), 60 + 16.060522496
    costs = Costs([1.0] * 4, 1.0, 0.0)
    one, many = (cluster(pair, costs, 0, ASKED, texts, gpus) for gpus in (1, 50))
    assert one["job_seconds"] == pytest.approx(startup + costs.of_job(texts))
    assert one["gpu_hours"] == pytest.approx(one["job_seconds"] / 3600)
    works = [costs.of_job(texts[i::50]) for i in range(50)]
    assert many["job_seconds"] == pytest.approx(startup + max(works)) and many["last_work"] == max(works)
    assert many["mean_work"] == pytest.approx(sum(works) / 50)
    assert many["gpu_hours"] == pytest.approx(50 * (startup + many["mean_work"]) / 3600)
    assert many["price_per_million"] == pytest.approx(many["gpu_hours"] * 3.0 * 1e6 / 400)
    assert many["prompts_per_second"] == pytest.approx(50 * one["prompts_per_second"])
    assert one["prompts_per_second"] == pytest.approx(4 * 400 / sum(text.new for text in texts))
    dearer = cluster(pair, costs, 0, ASKED._replace(price=6.0), texts, 50)
    assert dearer["price_per_million"] == pytest.approx(2 * many["price_per_million"])
    assert max(text.new for text in texts) <= 4 * 256


CHECK = {
    "part": "check", "case": "120m", "num_drafts": 2, "rows": 4, "cores": 2, "prompts": 40, "prompt_tokens": 2200,
    "new_tokens": 2240, "startup": {"median": 5.0}, "slowdown": {"1": {"median": 1.0}, "2": {"median": 1.07}},
    "tau": {"median": 2.1}, "tau_of_job": {"median": 2.2}, "step": {"median": 0.044}, "token": {"median": 0.0025},
    "predicted": {"median": 8.4},
}  # fmt: skip


def checked(processes: int, ratio: float) -> dict:
    measured, over = {"median": 8.0, "rounds": 3}, {"median": ratio, "q1": ratio, "q3": ratio}
    return {**CHECK, "processes": processes, "measured": measured, "predicted/measured": over}


def test_pages_say_what_was_predicted(tmp_path):
    """The command's own rows for GPUs, and rows of a check."""
    path = tmp_path / "cluster.json"
    done = run_main(predict_cluster, "--processes", 0, "--gpus", "1,8", "--prompts", 500, "--json", path)
    assert done.exit_code == 0, done.output
    content = json.loads(path.read_text())
    content["rows"] += [checked(1, 1.05), checked(4, 0.85)]
    path.write_text(json.dumps(content))
    results = Results(tmp_path)
    table, said, went_in, _ = figures_cluster.check(results).split("\n\n")
    assert "| 120m" in table and "| 2 | 1 | 8.40 s | 8.00 s | 1.05 (1.05 to 1.05) | 5.00 |" in table.replace(" †", "")
    said = " ".join(said.split())
    assert said.startswith("1 of 2 are within 10%; at worst it is off by 15.0%.")
    (line,) = went_in.replace(" †", "").splitlines()[2:]
    assert line == "| 120m | 2 | 4 | 40, 2,240 | 44.0 ms | 2.50 ms | 2.10 (2.20) | 2: 1.07 | 5.00 s |"
    many, about, one, _ = figures_cluster.gpus(results).split("\n\n")
    assert len(many.splitlines()) == 2 + 2 * 2 * 2 and "| H200 SXM † | 8 | 0 |" in many
    assert "Predicted, not measured" in about and "$3 for a GPU and hour" in about
    assert len(one.splitlines()) == 2 + 2 * 3


def test_the_kernels_seconds_are_those_of_the_h200():
    seconds = verification(FOLDER.parent / "h200" / "goals.json")
    assert seconds == pytest.approx(29.3e-6 / (32 * 9), rel=1e-2)
