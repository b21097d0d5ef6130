"""What docs/numbers.md says of the six results of ``headline.py``: of each the question, a table, and where its numbers
come from."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from report import ROOT
from specdec.evaluation.report import fastest_of_each, read_results
from specdec.evaluation.report.plot import decimals, number

HEADING = "## The six"  # of the page: what is below it, up to the next heading as large, is written here
Rows = list[list[str]]


@dataclass(frozen=True)
class Shown:
    """One table. ``about`` is its question; ``rows`` makes them from a result's file, below ``head``."""

    file: str
    title: str
    about: str
    head: tuple[str, ...]
    rows: Callable[[Mapping], Rows]


def median(of: Mapping | None, scale: float = 1.0) -> str:
    return "" if of is None else number(scale * of["median"])


def spread(of: Mapping | None) -> str:
    """The median, and the quartiles in brackets."""
    return "" if of is None else f"{median(of)} ({number(of['q1'])} to {number(of['q3'])})"


def faster(ratios: Mapping[str, Mapping], key: str) -> str:
    """Of a ratio of seconds, ours over theirs: how many times as fast ours is."""
    return number(1 / ratios[key]["median"]) if key in ratios else ""


def verification(content: Mapping) -> Rows:
    found = []
    for row in content["rows"]:
        if (row["K"], row["V"]) != (5, 128256) and not content.get("quick"):
            continue
        alpha = "all accepted" if row["drafts"] == "all_accepted" else f"alpha {row['cases']['step']['alpha']:.2f}"
        peers = [faster(row["ratios"], f"cpu/{peer}") for peer in ("transformers", "eager", "compile")]
        floor = median(row["ratios"]["cpu/floor_all_rows"])
        found.append([str(row["B"]), alpha, f"{median(row['seconds']['cpu'], 1e3)} ms", *peers, floor])
    return found


def methods(content: Mapping) -> Rows:
    found = []
    for setting, cells in read_results(content).by_setting().items():
        temperature = "greedy" if setting.temperature == 0 else f"temperature {setting.temperature:g}"
        for cell in fastest_of_each(cells):
            over = (cell.over_transformers, cell.over_plain)
            times = [number(None if each is None else each.median) for each in over]
            speed = number(cell.speed.median if cell.speed else None)
            found.append([temperature, cell.name, speed, *times, decimals(cell.tau)])
    return found


def rivals(content: Mapping) -> Rows:
    """Of each kind of weights: ours without drafts and with the best ones, and of every other program its best way."""
    found = []
    rows = [row for row in content["rows"] if "prompt" not in row and not row["busy"]]
    for kind in dict.fromkeys(row["weights"] for row in rows):
        of_kind = {row["method"]: row for row in rows if row["weights"] == kind}

        def best(program: str, of_kind: Mapping[str, Mapping] = of_kind, plain: bool = True) -> Mapping | None:
            ways = [row for name, row in of_kind.items() if name.split(",")[0] == program and (plain or "," in name)]
            return max(ways, key=lambda row: row["tokens_per_second"]["median"], default=None)

        drafted = best("specdec", plain=False)
        speeds = [of_kind["specdec"], drafted, *map(best, ("llama.cpp", "vllm", "openvino", "transformers"))]
        words = [median(row["tokens_per_second"]) if row else "" for row in speeds]
        found.append([kind, *words, *(median((row or {}).get("over_its_best")) for row in speeds[:2])])
    return found


def clients(content: Mapping) -> Rows:
    names = {"free": "no text has a form", "half": "half of them obey a JSON Schema", "grammars": "all of them do"}
    found = []
    for row in content["rows"]:
        valid = f"{row['valid']} of {row['obeying']}" if row["obeying"] else ""
        speeds = [spread(row.get(key)) for key in ("tokens_per_second", "times_alone", "of_free")]
        found.append([names.get(row["crowd"], row["crowd"]), *speeds, valid, str(row["lost"])])
    return found


def job(content: Mapping) -> Rows:
    columns = ("prompts_per_second", "tokens_per_second", "times_transformers")
    return [[row["method"], *(spread(row[key]) for key in columns)] for row in content["rows"]]


def decoding(content: Mapping) -> Rows:
    found = []
    for row in content["rows"]:
        of, best = {method["name"]: method for method in row["methods"]}, row["found"]
        speeds = [median(of[name]["tokens_per_second"]) for name in ("transformers", best["baseline"], best["fastest"])]
        times = [spread(best["times"][name]) for name in ("transformers", "baseline")]
        found.append([str(row["B"]), *speeds, *times, decimals(of[best["fastest"]]["tau"])])
    return found


def goals(content: Mapping) -> Rows:
    found = []
    for row in (row for row in content["rows"] if row["drafts"] == "typical"):
        of, ratios = row["seconds"], row["ratios"]
        times = [f"{median(of.get(f'{ours}+stats [cold]'), 1e6)} us" for ours in ("cuda", "triton")]
        others = [faster(ratios, f"cuda+stats [cold]/{peer} [cold]") for peer in ("flashinfer", "eager")]
        shape = f"B = {row['B']}, K = {row['K']}, V = {row['V']}"
        found.append([f"`{row['goal']}`", shape, *times, *others, faster(ratios, "cuda+stats/transformers")])
    return found


SIX = (
    Shown(
        "speculative_step", "1. Verifying drafts",
        "`speculative_step` on a CPU, K = 5, 128,256 logits in float32: how many times as fast as what people write "
        "today. The floor is reading all rows once.",
        ("B", "drafts", "time", "times transformers", "times eager PyTorch", "times `torch.compile`",
         "times the floor"), verification,
    ),
    Shown(
        "smollm2", "2. Beside transformers",
        "SmolLM2-135M-Instruct in float32 on a CPU, without a draft model, one text at a time: what the engine gains "
        "(plain decoding by specdec) and what drafts add to it.",
        ("", "method", "tokens/s", "times transformers", "times plain", "tau"), methods,
    ),
    Shown(
        "rivals", "3. Beside llama.cpp and others",
        "The same model on a CPU, greedy, one text at a time, every program with the same weights and prompts, in "
        "tokens/s. Of each other program the best way counts, with drafts or without; the last columns divide by "
        "llama.cpp's.",
        ("weights", "specdec plain", "specdec drafts", "llama.cpp", "vLLM", "OpenVINO", "transformers",
         "plain, times llama.cpp", "drafts, times llama.cpp"), rivals,
    ),
    Shown(
        "clients", "4. A server with 64 clients",
        "`specdec serve` on a CPU with the same model and 16 rows, beside one client at a time.",
        ("texts", "tokens/s", "times one at a time", "of those without a form", "valid", "lost"), clients,
    ),
    Shown(
        "job", "5. A job",
        "48 prompts, 8 texts at a time, beside transformers' `generate` on as many rows, which wait for the longest.",
        ("", "prompts/s", "tokens/s", "times transformers"), job,
    ),
    Shown(
        "decode", "6. On a GPU",
        "Decoding with random weights of the shapes of Llama-3.1-8B and Llama-3.2-1B, acceptance set to 0.8, bfloat16, "
        "temperature 1, K = 4, prompts of 512 tokens, in tokens/s.",
        ("texts at a time", "transformers", "plain", "with drafts", "times transformers", "times plain", "tau"),
        decoding,
    ),
    Shown(
        "goals", "",
        "Verification on a GPU, with the draft's statistics handed over: device time of a replayed graph whose inputs "
        "no cache holds, and times others' (transformers as a call from Python, and ours beside it).",
        ("case", "shape", "`cuda`", "`triton`", "times FlashInfer", "times eager PyTorch", "times transformers"), goals,
    ),
)  # fmt: skip


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Columns without any number are left out: those of programs that were not there."""
    rows = list(rows)
    kept = [i for i in range(len(head)) if i == 0 or any(row[i] not in ("", "–") for row in rows)]
    lines = [[head[i] for i in kept], ["---"] * len(kept), *([row[i] for i in kept] for row in rows)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def source(path: Path, content: Mapping) -> str:
    """Machine, commit, date, versions, command and file."""
    hardware, versions = content["hardware"], content["versions"]
    on = hardware.get("gpu") or f"{hardware['cpu']}, {content['threads']} threads ({content['instruction_set']})"
    command = re.sub(r" --output \S+| --json( (?!--)\S+)?", "", content["command"])
    commit = f"{(content['commit'] or 'unknown')[:10]}{' with changes' if content['dirty'] else ''}"
    peers = f"torch {versions['torch'].split('+')[0]}, transformers {versions['transformers']}"
    shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
    return f"{on}; commit {commit}, {content['date'][:10]}; {peers}. `{command}` made `{shown}`."


def section(shown: Shown, folder: Path) -> str:
    """The title, the question, and of every machine that has a result its table."""
    parts = [f"### {shown.title}"] if shown.title else []
    parts.append(textwrap.fill(shown.about, 120, break_long_words=False, break_on_hyphens=False))
    files = sorted(folder.glob(f"*/{shown.file}.json"))
    for path in files:
        content = json.loads(path.read_text(encoding="utf-8"))
        parts.append(table(shown.head, shown.rows(content)))
        parts.append(textwrap.fill(source(path, content), 120, break_long_words=False, break_on_hyphens=False))
    if not files:
        parts.append(f"Not measured yet: `python bench/headline.py {shown.file}`.")
    return "\n\n".join(parts)


def written(page: str, folder: Path) -> str:
    """The page with the sections of the results in ``folder``.

    Raises:
        ValueError: the page has no such heading.
    """
    before, found, rest = page.partition(f"{HEADING}\n")
    if not found:
        raise ValueError(f"the page has no heading {HEADING!r}")
    _, below, after = rest.partition("\n## ")
    return "\n\n".join([f"{before}{HEADING}", *(section(shown, folder) for shown in SIX), ""]) + below[1:] + after
