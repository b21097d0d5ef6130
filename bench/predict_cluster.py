"""What a cluster yields and costs, on paper: prompts a second and the price of a job on 1 to 1,000 GPUs, with and
without drafts. **A prediction**: nothing of it was measured on a GPU but the kernel that verifies.

    python bench/predict_cluster.py --json bench/results/cpu/cluster.json

The same arithmetic is checked here first: from the times of the steps of one process it predicts what a job takes on 1,
2 and 4 processes of one thread each, which are then measured. docs/cluster.md has both.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import report
import torch
import typer
from cluster_costs import Costs, Text, together
from cluster_gpus import Asked, OnGpu, pair_on, steps_measured, verification
from cluster_job import Case, costs_of, processes, save_tunable_pair, write_prompts
from measure import in_turns, ratios, summary
from results import FOLDER
from specdec import load_embedded_pair
from specdec.evaluation.gpus import GPUS
from specdec.evaluation.roofline import Pair
from specdec.jobs.shard import WHOLE, Shard

# ---- Checked here


def check(results: report.Report, case: Case, counts: Sequence[int], rounds: int, folder: Path) -> None:
    """In every round a sample of other prompts is run by one process, and by several side by side that have a core
    each. What their steps take predicts the job, which each number of processes runs in the same round."""
    tokenizer, cores = load_embedded_pair()[2], len(report.usable_cores())
    job, sample = folder / "job.jsonl", folder / "sample.jsonl"
    texts = write_prompts(job, tokenizer, 0, case.prompts)
    write_prompts(sample, tokenizer, case.prompts, max(case.prompts // 2, case.rows))
    beside = sorted({min(n, cores) for n in (1, *counts)})
    costs: dict[int, list[Costs]] = {n: [] for n in beside}
    measured: dict[int, list[float]] = {n: [] for n in counts}
    taus = []
    with processes(case, max(counts), sample) as started:
        for what, count in in_turns([*((sample, n) for n in beside), *((job, n) for n in counts)], rounds):
            if what == sample:
                costs[count].append(costs_of(started.run(sample, [WHOLE] * count)[1], case.rows))
            else:
                seconds, record = started.run(job, [Shard(i, count) for i in range(count)])
                measured[count].append(seconds)
                taus.append(costs_of(record, case.rows).tau)
    alone = costs[1]
    slower = {n: [c.of_job(texts) / alone[i].of_job(texts) for i, c in enumerate(costs[n])] for n in beside}
    about: dict[str, object] = {
        "case": case.name, "num_drafts": case.num_drafts, "rows": case.rows, "cores": cores, "prompts": case.prompts,
        "prompt_tokens": sum(text.prompt for text in texts), "new_tokens": sum(text.new for text in texts),
        "startup": summary(started.startup), "slowdown": {n: summary(of) for n, of in slower.items()},
        "tau_of_job": summary(taus), "step": summary([c.steps[-1] for c in alone]),
        **{name: summary([getattr(c, name) for c in alone]) for name in ("tau", "token", "prompt")},
    }  # fmt: skip
    for count in counts:
        shards = [texts[i::count] for i in range(count)]
        predicted = [
            together([c.of_job(shard) for shard in shards], cores, {n: slower[n][i] for n in beside})
            for i, c in enumerate(alone)
        ]
        results.add({
            "part": "check", **about, "processes": count, "predicted": summary(predicted),
            "measured": summary(measured[count]), "predicted/measured": ratios(predicted, measured[count]),
        })  # fmt: skip
    columns = ("processes", "predicted", "measured", "predicted/measured", "tau", "tau_of_job")
    results.show(f"{case.name}, K = {case.num_drafts}", results.rows[-len(counts) :], columns)


# ---- On GPUs


def cluster(pair: Pair, costs: Costs, k: int, asked: Asked, texts: Sequence[Text], gpus: int) -> dict[str, object]:
    """A job in shards, one a GPU, each of which is paid for from its start to its own end."""
    weights = pair.weights if k else pair.target.weights
    startup = asked.startup + weights / (asked.load * 1e9)
    works = [costs.of_job(texts[i::gpus]) for i in range(gpus)]
    steady = gpus * len(texts) / sum(map(costs.of_text, texts))
    paid = (sum(works) + startup * gpus) / 3600
    return {
        "gpu": pair.machine.name, "gpus": gpus, "rows": len(costs.steps), "num_drafts": k, "tau": costs.tau,
        "step": costs.steps[-1], "prompts_per_second": steady, "prompts_per_day": 86400 * steady, "startup": startup,
        "job_seconds": startup + max(works), "mean_work": statistics.fmean(works), "last_work": max(works),
        "gpu_hours": paid, "price_per_million": paid * asked.price * 1e6 / len(texts),
    }  # fmt: skip


def tables(
    asked: Asked, names: Sequence[str], counts: Sequence[int], rows: Sequence[int], folder: Path
) -> Iterator[dict[str, object]]:
    """Of each GPU, plain and with the K that is best: each number of GPUs with the first number of rows, and one GPU
    with the others that fit."""
    kernel, texts = verification(folder / "h200" / "goals.json"), asked.texts()
    for name in names:
        pair = pair_on(name, asked.alpha)
        measured, factors = steps_measured(name, asked, folder)
        gpu, fits = OnGpu(pair, asked, kernel, factors), pair.most_rows(asked.longest)
        about = {"fits": fits, "pays_up_to": gpu.pays_up_to(fits)}
        for n in (n for n in rows if n <= fits):
            for k in (0, gpu.best(n)):
                steps = measured if factors[gpu.kind(k)] else "by roofline"
                for gpus in counts if n == rows[0] else (1,):
                    yield {"steps": steps, **about, **cluster(pair, gpu.costs(n, k), k, asked, texts, gpus)}


def main(
    gpus: Annotated[str, typer.Option(help="numbers of GPUs separated by commas")] = "1,8,64,1000",
    kinds: Annotated[str, typer.Option(help="GPUs of specdec.evaluation.gpus")] = "H100 SXM,H200 SXM",
    rows: Annotated[str, typer.Option(help="of a GPU; with the first of them for each number of GPUs")] = "64,8,192",
    price: Annotated[float, typer.Option(min=0, help="assumed: of a GPU for an hour, in dollars")] = 3.0,
    alpha: Annotated[float, typer.Option(min=0, max=1, help="assumed: acceptance of a draft that is tested")] = 0.7,
    prompts: Annotated[int, typer.Option(min=1, help="of the job")] = 1_000_000,
    prompt_tokens: Annotated[int, typer.Option(min=2, help="assumed: of each prompt")] = 512,
    new_tokens: Annotated[int, typer.Option(min=1, help="assumed: of a text, on average")] = 256,
    startup: Annotated[float, typer.Option(min=0, help="assumed: seconds besides reading the weights")] = 60.0,
    load: Annotated[float, typer.Option(min=0.01, help="assumed: GB of weights that a GPU gets in a second")] = 1.0,
    count: Annotated[str, typer.Option("--processes", help="of the check here; 0: no check")] = "1,2,4",
    rounds: Annotated[int, typer.Option(min=1, help="of the check")] = 3,
    folder: Annotated[Path, typer.Option(help="of what was measured on GPUs")] = FOLDER.parent,
    quick: report.Quick = False,
    json_path: report.JsonPath = None,
) -> None:
    """Checks the arithmetic on processes here, and predicts clusters of GPUs."""
    names = report.read_names("kinds", kinds, [gpu.name for gpu in GPUS])
    sizes, numbers = report.read_integers("gpus", gpus), report.read_integers("rows", rows)
    counts = [] if count == "0" else report.read_integers("processes", count)
    asked = Asked(prompts, prompt_tokens, new_tokens, alpha, price, startup, load)
    if quick:
        asked, rounds = asked._replace(prompts=200), 1
    device = torch.device("cpu")
    results = report.Report("cluster", device, json_path, 1, quick=quick, assumed=asked._asdict())
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        cases = [Case("embedded pair", k, 8, 6 if quick else 96) for k in (0, 4)]
        if counts and not quick:
            save_tunable_pair("120m", asked.alpha, place)
            cases += [Case("120m", k, 4, 32, place) for k in (0, 2)]
        for case in cases if counts else ():
            check(results, case, counts, rounds, place)
    found = [{"part": "gpus", **row} for row in tables(asked, names, sizes, numbers, folder)]
    for row in found:
        results.add(row)
    columns = ("gpu", "gpus", "rows", "num_drafts", "steps", "prompts_per_second", "job_seconds", "price_per_million")
    results.show("PREDICTION, not measured", found, columns)
    results.finish()


if __name__ == "__main__":
    typer.run(main)
