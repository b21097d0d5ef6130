"""bench_throughput.py: jobs, slices, memory, and what it reports."""

from __future__ import annotations

import json

import bench_throughput as jobs
import pytest
import torch
from specdec import Request, Scheduler, SpeculativeDecoder
from specdec.stats import Stats
from support.benches import run_main
from support.models import tiny_model


def test_skewed_lengths_are_the_same_every_time():
    lengths = jobs.skewed_lengths(500)
    assert lengths == jobs.skewed_lengths(500) != jobs.skewed_lengths(500, seed=1)
    assert lengths[:6] == [40, 50, 97, 44, 197, 10]
    assert min(lengths) == 8 and max(lengths) == 256 and 40 < sorted(lengths)[250] < 56
    # What whole batches of eight cost: the longest, for all.
    waste = sum(max(lengths[i : i + 8]) * 8 for i in range(0, 496, 8)) / sum(lengths[:496])
    assert waste > 2


def test_prompts_have_their_lengths(pair):
    prompts = jobs.unseen_code(pair[2], [3, 40, 1])
    assert [len(p) for p in prompts] == [3, 40, 1]
    assert prompts == jobs.unseen_code(pair[2], [3, 40, 1]) != jobs.unseen_code(pair[2], [3, 40, 1], seed=1)


def job(lengths: list[int], whole_batches: bool) -> jobs.Job:
    scheduler = Scheduler(SpeculativeDecoder(tiny_model(), None, 0), rows=2, max_length=16)
    todo = [Request([i + 1, 2], n, eos_token_id=[], id=i) for i, n in enumerate(lengths)]
    return jobs.Job(scheduler, todo, whole_batches)


def test_rows_refill_or_wait():
    """One token a step: rows 4 and 1 + 1 + 2 steps long, or batches of 4 and then 2 steps."""
    refilling, waiting = job([4, 1, 1, 2], False), job([4, 1, 1, 2], True)
    refilled, waited = refilling.run(), waiting.run()
    assert (refilled.steps, refilled.row_steps, refilled.busy) == (4, 8, 1.0)
    assert (waited.steps, waited.row_steps) == (6, 8) and waited.busy == pytest.approx(2 / 3)
    assert refilled.tokens == waited.tokens == 8
    assert refilling.texts == waiting.texts and [len(refilling.texts[i]) for i in range(4)] == [4, 1, 1, 2]
    assert refilling.done and waiting.done and not job([1], False).done


def test_a_job_goes_on_where_it_stopped():
    stopping, whole = job([4, 1, 1, 2], False), job([4, 1, 1, 2], False)
    parts = [stopping.run(2), stopping.run(1), stopping.run()]
    assert [p.steps for p in parts] == [2, 2, 0]  # one ends in each of the first two steps, two in the last
    after = sum(parts[1:], parts[0])
    before = whole.run()
    for name in ("tokens", "steps", "row_steps", "rows"):
        assert getattr(after, name) == getattr(before, name)
    assert after.seconds == pytest.approx(sum(p.seconds for p in parts))
    assert after.parts["target_forwards"] > 0 and stopping.texts == whole.texts
    # What others do in between is no part of it.
    assert sum(after.parts.values()) <= after.seconds


def test_a_request_that_fails_ends_the_job():
    failing = job([4, 1], False)
    failing.scheduler.submit(Request([1], 4, id="cancelled"))
    failing.scheduler.cancel(0)
    with pytest.raises(RuntimeError, match="cancelled"):
        failing.run()


def test_rows_are_compared_by_round():
    def slices(*seconds: float) -> list[jobs.Slice]:
        parts = {"draft_forwards": 0.1, "target_forwards": 0.4, "replays": 0.0}
        return [jobs.Slice(1, s, 10, 5, 5.0, parts) for s in seconds]

    stats = Stats.empty(1)
    stats.record(1, 1, 1, 2, 1)
    done = job([1], False)
    done.stats, done.texts = [stats], {0: [1]}
    for eight, reached in ((1.0, True), (1.1, False)):
        taken = {("plain", 1): slices(4, 4), ("K=4", 1): slices(3, 3)}
        taken |= {("plain", 8): slices(2, 2), ("K=4", 8): slices(eight, eight)}
        row = jobs.row_of_rows("K=4", 8, 1, taken, dict.fromkeys(taken, done))
        assert row["times_1_row"]["median"] == pytest.approx(3 / eight)
        assert row["times_plain"]["median"] == pytest.approx(2 / eight)
        assert row["times_1_row_that_forwards_allow"]["median"] == 1 and row["tau"] == 2
        assert row["in_forwards"]["median"] == pytest.approx(0.5 / eight)
        assert row["reached"] == {"8 rows 3 times 1 row": reached}
    assert "reached" not in jobs.row_of_rows("plain", 8, 1, taken, dict.fromkeys(taken, done))
    taken = {("plain", n): slices(2, 2) for n in (1, 16)} | {("K adapts", n): slices(1.9, 1.9) for n in (1, 16)}
    row = jobs.row_of_rows("K adapts", 16, 1, taken, dict.fromkeys(taken, done))
    assert row["reached"] == {"16 rows 1.1 times plain": False}  # 1.05


def test_growth_is_by_quarters_and_a_line():
    samples = [{"resident": 100 + i, "tensors": 7} for i in range(8)]
    found = jobs.growth([10 * i for i in range(8)], samples)
    assert found["resident"] == {"first_quarter": 100.5, "last_quarter": 106.5, "slope": pytest.approx(0.1)}
    assert found["tensors"] == {"first_quarter": 7, "last_quarter": 7, "slope": 0}
    assert jobs.growth([1], samples[:1])["resident"]["slope"] == 0


def test_tensors_and_large_storages_are_seen():
    before = jobs.sample()
    large, small = torch.zeros(jobs.LARGE, dtype=torch.uint8), torch.zeros(8)
    after = jobs.sample()
    assert after["tensors"] >= before["tensors"] + 2 and after["resident"] > 1 << 20
    storages = jobs.large_storages()
    assert storages[large.data_ptr()] == jobs.LARGE and small.data_ptr() not in storages


def test_throughput_reports(tmp_path):
    done = run_main(jobs, "--quick", "--threads", "1", "--json", tmp_path / "out.json")
    assert done.exit_code == 0, done.output
    content = json.loads((tmp_path / "out.json").read_text())
    assert content["complete"] and content["quick"] and content["num_drafts"] == 4
    *rows, admission, memory = content["rows"]
    assert [(r["part"], r["temperature"], r["method"], r["rows"]) for r in rows] == [
        ("rows", 1.0, m, n) for m in ("plain", "K=4", "K adapts") for n in (1, 2)
    ]
    for row in rows:
        assert row["tokens_per_second"]["median"] > 0 and 0.5 <= row["busy"] <= 1
        assert (row["times_1_row"]["median"] == 1) == (row["rows"] == 1)
        assert (row["tau"] == 1) == (row["method"] == "plain") or row["method"] == "K adapts"
        assert row["step_costs"] is None or row["method"] == "K adapts"
        assert row["seconds"].keys() >= {"prefill", "draft_forwards", "target_forwards", "kernels", "loop"}
    assert admission["part"] == "admission" and admission["requests"] == 5
    assert admission["steps"] <= admission["steps_whole_batches"]
    assert admission["reached"]["rows 90% busy"] == (admission["busy"] >= 0.9)
    assert memory["part"] == "memory" and memory["tokens"] >= 12 and memory["samples"] >= 1
    assert memory["reached"]["no large storage moved"] and not memory["large_storages_moved"]


@pytest.mark.parametrize(
    "arguments, named", [(("--parts", "speed"), "parts"), (("--rows", "0"), "rows"), (("--device", "tpu"), "device")]
)
def test_a_bad_option_is_named(arguments, named):
    done = run_main(jobs, *arguments)
    assert done.exit_code == 2 and named in done.output
