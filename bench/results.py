"""The results that pages cite: how each is made, what it measures, and whether that has changed since.

A result remembers the contents of the files that it measured (``sources``: a digest by path), so that whether it is
stale follows from the files alone: a working tree and a clean clone of the same commit agree, with any history or none.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from report import ROOT

FOLDER = ROOT / "bench" / "results" / "cpu"  # those of GPUs have folders beside it
FRESH = "fresh"
PROSE_AND_BUILT = (".md", ".so", ".pyc")  # what no digest looks at

KERNELS = ("setup.py", "csrc/*.*", "csrc/core", "csrc/cpu", "specdec_kernels/*.py", "specdec_kernels/backends/*.py")
OF_KERNELS = (*KERNELS, "bench/measure.py", "bench/bench_kernels.py", "bench/cases.py", "bench/peers.py")
ON_A_GPU = ("csrc/*.*", "csrc/core", "csrc/cuda", "specdec_kernels/*.py", "specdec_kernels/backends")
OF_CUDA = (*ON_A_GPU, "bench/measure.py", "bench/bench_kernels.py", "bench/cases.py", "bench/peers.py")
LOOP_ON_A_GPU = (
    *ON_A_GPU,
    *(f"python/specdec/{name}" for name in ("decoder.py", "models", "drafters", "loop", "serving/scheduler.py")),
    *(f"bench/{name}.py" for name in ("bench_loop", "measure", "tunable_pair")),
)
RECURRENT = (*KERNELS, "bench/measure.py", "bench/bench_recurrent.py")
SAMPLING = tuple(f"sampling/{name}.py" for name in ("params", "processors", "token_table", "grammar_masks"))
ROOMS = ("decoder.py", "prompts.py", *SAMPLING, "models", "drafters", "loop")
ANY_MODEL = (*KERNELS, *(f"python/specdec/{room}" for room in ROOMS))
DECODER = (*ANY_MODEL, "python/specdec/embedded")
RACE = (*DECODER, "python/specdec/serving/scheduler.py", "bench/race.py")
# Without what draws and words what was measured.
EVALUATION = ("compare.py", "contenders.py", "near_ties.py", "rounds.py")
COMPARING = tuple(f"python/specdec/evaluation/{name}" for name in EVALUATION)
PROMPTS = "python/specdec/jobs/prompt_sets"
COMPARE = (*DECODER, *COMPARING)
SESSION = (
    *(f"python/specdec/evaluation/bench/{name}" for name in ("session.py", "measure.py")),
    PROMPTS,
)
BENCH = (*COMPARE, *SESSION)
VERIFY = (*COMPARE, "python/specdec/evaluation/verify")
REAL_BENCH = (*ANY_MODEL, *COMPARING, *SESSION)
REAL_VERIFY = (*ANY_MODEL, *COMPARING, "python/specdec/evaluation/verify")
GREEDY_TEXTS = (*ANY_MODEL, *COMPARING, PROMPTS, "bench/bench_greedy_texts.py", "bench/weights.py")
RIVALS = (*ANY_MODEL, PROMPTS, "bench/rivals.py", "bench/rival_worker.py", "bench/weights.py")
SERVED = tuple(f"python/specdec/serving/{name}.py" for name in ("engine", "scheduler"))
PREFIXES = (*ANY_MODEL, "python/specdec/serving/scheduler.py", PROMPTS, "bench/bench_prefixes.py")
GRAMMAR = (*ANY_MODEL, "python/specdec/sampling", "bench/bench_grammar.py", "bench/json_schemas.py", "bench/weights.py")
CLIENTS = (
    *ANY_MODEL,
    "python/specdec/sampling",
    "python/specdec/serving",
    "bench/bench_clients.py",
    "bench/json_schemas.py",
)
CLUSTER = (
    *RACE,
    *(f"python/specdec/jobs/{name}.py" for name in ("input", "lines", "output", "result_line", "run", "shard")),
    *(f"python/specdec/evaluation/{name}.py" for name in ("gpus", "model_shapes", "roofline", "theory")),
    *("bench/cluster_*.py", "bench/predict_cluster.py", "bench/tunable_pair.py"),
    "bench/results/h200",
)
LOADING = ("python/specdec/models", "specdec_kernels/*.py", "bench/bench_loading.py", "bench/weights.py")
PERPLEXITY = (
    *(f"python/specdec/models/{name}" for name in ("linear.py", "packed_weights.py", "stored_weights.py")),
    *(f"csrc/cpu/{name}" for name in ("linear.cpp", "packed_linear.cpp", "packed.h")),
    *("specdec_kernels/packing.py", "bench/perplexity.py", "bench/weights.py"),
)
# Parts of a printed JSON that no page cites and that would make the file large, by their path through objects.
SAMPLES = ("samples", "cells.rounds.inter_token")
BY_PROMPT = ("cells.rounds.by_prompt",)  # needed for figures by kind of prompt
# The folders of real models, which are not in the repository, and what makes each.
SMOLLM2, GEMMA3 = "real_models/SmolLM2-135M-Instruct", "real_models/gemma-3-270m"
PACKED, GEMMA3_PACKED = f"{SMOLLM2}.gguf", f"{GEMMA3}.gguf"
LLAMA_AVX2 = "build/llama.avx2"  # llama.cpp as it is where there is no AVX-512
DRAFT, EAGLE3 = f"{SMOLLM2}-draft", f"{SMOLLM2}-eagle3"
THEIR_OWN = "--vllm build/vllm/bin/python --openvino build/openvino/bin/python"  # environments of rivals
MADE_BY = {
    SMOLLM2: "python tools/real_models.py SmolLM2-135M-Instruct",
    GEMMA3: "python tools/real_models.py gemma-3-270m",
    PACKED: "python tools/real_models.py SmolLM2-135M-Instruct --packed",
    GEMMA3_PACKED: "python tools/real_models.py gemma-3-270m --packed",
    DRAFT: f"specdec distill {SMOLLM2} --output {DRAFT}",
    LLAMA_AVX2: 'CMAKE_ARGS="-DGGML_NATIVE=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON" '
    f"pip install --no-deps --no-binary llama-cpp-python --target {LLAMA_AVX2} llama-cpp-python",
    EAGLE3: f"specdec train-heads {SMOLLM2} --output {EAGLE3}",
}
# What holds PyTorch and its libraries to an instruction set.
OF_PEERS = {"avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}}


@dataclass(frozen=True)
class Result:
    """A file of results.

    Attributes:
        command: what makes it, after ``python``; ``{json}`` is the file's path. Without that, its output is the JSON.
            ``{folder}`` is a place for what it writes besides, which is empty before and gone afterwards.
        sources: the files, folders and patterns of files that it measures, and that measure.
        minutes: what it takes on two idle cores, about.
        instruction_set: of the C++ kernels, and of PyTorch's; None: the best that the machine has.
        without: parts of a printed JSON that are left out; lists on the way are gone through.
        models: the folders and files of MADE_BY that it needs.
        packages: one more of them, whose packages come before those of the environment.
        gpu: the one that it is made on, and the name of its folder.
    """

    name: str
    command: str
    sources: tuple[str, ...]
    minutes: float
    instruction_set: str | None = None
    without: tuple[str, ...] = ()
    models: tuple[str, ...] = ()
    packages: str | None = None
    gpu: str | None = None

    def path(self, folder: Path = FOLDER) -> Path:
        """``folder``: of the results of CPUs."""
        return (folder if self.gpu is None else folder.parent / self.gpu) / f"{self.name}.json"

    def lacks(self) -> str | None:
        """What it needs and is not there, and for models what makes them; None: all is there."""
        if self.gpu is not None and not torch.cuda.is_available():
            return f"no {self.gpu.upper()}"
        needed = (*self.models, *(() if self.packages is None else (self.packages,)))
        missing = [model for model in needed if not (ROOT / model).exists()]
        return f"no {', '.join(missing)}: {' && '.join(MADE_BY[model] for model in missing)}" if missing else None

    @property
    def printed(self) -> bool:
        return "{json}" not in self.command

    @property
    def folder(self) -> Path:
        return ROOT / "build" / "regenerate" / self.name

    def arguments(self, path: Path) -> list[str]:
        """The command, in the repository's folder: no result has the name of a machine's folders in it."""
        shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
        return shlex.split(self.command.format(json=shlex.quote(str(shown)), folder=self.folder.relative_to(ROOT)))

    def environment(self) -> dict[str, str]:
        """What its command needs in the environment, besides what finds this package."""
        found = {} if self.packages is None else {"PYTHONPATH": self.packages}
        if self.instruction_set is None:
            return found
        return {**found, "SPECDEC_CPU_ISA": self.instruction_set, **OF_PEERS.get(self.instruction_set, {})}

    def line(self, path: Path) -> str:
        """The command, as a user would type it."""
        variables = "".join(f"{name}={value} " for name, value in self.environment().items())
        return f"{variables}python {shlex.join(self.arguments(path))}"


def of_bench(name: str, minutes: float, *options: str) -> Result:
    command = " ".join(("-m specdec bench", *options, "--no-report --json --output {folder}"))
    return Result(name, command, BENCH, minutes, without=(*SAMPLES, *BY_PROMPT))


def of_real(name: str, minutes: float, *options: str, models: tuple[str, ...] = (SMOLLM2,)) -> Result:
    """``specdec bench`` of a real model, the first of ``models``, with the times of each prompt."""
    command = " ".join(("-m specdec bench --target", models[0], *options, "--no-report --json --output {folder}"))
    return Result(name, command, REAL_BENCH, minutes, without=SAMPLES, models=models)


# Of a target alone: transformers' prompt lookup, and what drafts out of the text; each chooses its own K.
NO_DRAFT = "--method assisted --method lookup --method suffix -k auto"
DRAFTS = f"--draft {DRAFT} --method assisted --method model --method {EAGLE3} --method suffix -k auto"
NEED_NO_DRAFT = "--drafter lookup --drafter suffix --drafter early-exit -k 4"
STEP = "bench/bench_kernels.py step -B 1,8 --dtypes float32 -V 32000,128256"
DRAFT_STEP = "bench/bench_kernels.py draft -B 1,8 --dtypes float32 -V 32000,128256"
GPU_LOOP = "bench/bench_loop.py --device cuda --pair 8b+1b"
RECURRENT_STEP = "bench/bench_recurrent.py --threads"
RIVAL = "bench/rivals.py"
HEADS = ("--method model", "--method medusa", "--method eagle3", "--method dflash", "--tree 16")
RULES = ("--method model", "--temperature 1", "-k 2 -k 4 -k 6", "--rule token --rule block --rule coupled")
RESULTS = (
    of_bench("bench", 6),
    of_bench("bench.heads", 8, *HEADS),
    of_bench("bench.rules", 3, *RULES),
    Result("compare", "-m specdec compare --max-new-tokens 96 --json", COMPARE, 2),
    Result("lengths", "bench/bench_lengths.py --rows 1,4,16 --json {json}", (*RACE, "bench/bench_lengths.py"), 12),
    Result("load_aware", "bench/bench_load_aware.py --json {json}", (*RACE, "bench/bench_load_aware.py"), 6),
    Result("speculative_step", f"{STEP} --seconds 1.5 --compile-seconds 120 --json {{json}}", OF_KERNELS, 4),
    Result("speculative_step.avx2", f"{STEP} --seconds 1 --compile-seconds 0 --json {{json}}", OF_KERNELS, 2, "avx2"),
    Result("settings", "bench/bench_kernels.py settings --seconds 40 --json {json}", OF_KERNELS, 4),
    Result("draft_step", f"{DRAFT_STEP} --compile-seconds 60 --json {{json}}", OF_KERNELS, 2),
    Result("recurrent", f"{RECURRENT_STEP} 1 --json {{json}}", RECURRENT, 2),
    Result("recurrent.avx2", f"{RECURRENT_STEP} 1 --json {{json}}", RECURRENT, 2, "avx2"),
    Result("recurrent.two_threads", f"{RECURRENT_STEP} 2 --json {{json}}", RECURRENT, 2),
    Result(
        "goals", "bench/bench_kernels.py goals --device cuda --seconds 0.4 --compile-seconds 0 --json {json}", OF_CUDA,
        2, gpu="h200",
    ),
    Result(
        "decode", f"{GPU_LOOP} -B 1,8,32 --contexts 512 --new-tokens 64 --rounds 3 --modes graphs+deferred "
        "--no-assisted --limit 125 --json {json}", LOOP_ON_A_GPU, 3, gpu="h100",
    ),
    Result("verify", "-m specdec verify --samples 512 --json", VERIFY, 1),
    Result("verify.bfloat16", "-m specdec verify --dtype bfloat16 --check greedy --check coupled --json", VERIFY, 1),
    of_real("smollm2", 14, NO_DRAFT, "--dtype float32 --max-new-tokens 128 --repeats 2"),
    of_real("smollm2.bfloat16", 4, NO_DRAFT, "--dtype bfloat16 --temperature 0 --max-new-tokens 128 --repeats 1"),
    of_real("gemma3", 3, NO_DRAFT, "--dtype float32 --temperature 0 --max-new-tokens 32 --repeats 1", models=(GEMMA3,)),
    of_real(
        "real_drafts", 5, DRAFTS, "--dtype float32 --temperature 0 --max-new-tokens 64 --repeats 2",
        models=(SMOLLM2, DRAFT, EAGLE3),
    ),
    Result(
        "greedy_texts", f"bench/bench_greedy_texts.py {SMOLLM2} --json {{json}}", GREEDY_TEXTS, 18, models=(SMOLLM2,),
    ),
    Result(
        "rivals", f"{RIVAL} {SMOLLM2} --gguf {PACKED} --draft {DRAFT} {THEIR_OWN} --new-tokens 128 --rounds 1 "
        "--json {json}", RIVALS, 36, models=(SMOLLM2, PACKED, DRAFT),
    ),
    Result(
        "rivals.avx2", f"{RIVAL} {SMOLLM2} --gguf {PACKED} --new-tokens 128 --rounds 1 --json {{json}}", RIVALS, 20,
        "avx2", models=(SMOLLM2, PACKED), packages=LLAMA_AVX2,
    ),
    Result(
        "rivals.gemma3", f"{RIVAL} {GEMMA3} --gguf {GEMMA3_PACKED} --kinds bfloat16 {THEIR_OWN} "
        "--new-tokens 64 --rounds 1 --json {json}", RIVALS, 12, models=(GEMMA3, GEMMA3_PACKED),
    ),
    Result(
        "contention", f"{RIVAL} {SMOLLM2} --gguf {PACKED} --kinds bfloat16 --busy 1,2 --prompts 4 --new-tokens 32 "
        "--rounds 2 --json {json}", (*RIVALS, *SERVED), 10, models=(SMOLLM2, PACKED),
    ),
    Result(
        "loading", f"bench/bench_loading.py {SMOLLM2} --gguf {PACKED} --json {{json}}", LOADING, 2,
        models=(SMOLLM2, PACKED),
    ),
    Result(
        "prefixes", f"bench/bench_prefixes.py {SMOLLM2} --json {{json}}", PREFIXES, 15, models=(SMOLLM2,),
    ),
    Result(
        "grammar", f"bench/bench_grammar.py {SMOLLM2} --weights bfloat16 --json {{json}}", GRAMMAR, 40,
        models=(SMOLLM2,),
    ),
    Result(
        "clients", f"bench/bench_clients.py {SMOLLM2} --json {{json}}", CLIENTS, 6, models=(SMOLLM2,),
    ),
    Result(
        "cpu_step", "bench/bench_cpu_step.py --json {json}", (*ANY_MODEL, "bench/bench_cpu_step.py"), 4,
    ),
    Result("cluster", "bench/predict_cluster.py --json {json}", CLUSTER, 11),
    Result(
        "perplexity", f"bench/perplexity.py {SMOLLM2} --gguf {PACKED} --threads 1 --json {{json}}", PERPLEXITY, 6,
        models=(SMOLLM2, PACKED),
    ),
    Result(
        "verify.smollm2", f"-m specdec verify --target {SMOLLM2} --dtype float32 {NEED_NO_DRAFT} --batch-size 8 "
        "--max-new-tokens 16 --samples 512 --json", REAL_VERIFY, 5, models=(SMOLLM2,),
    ),
)  # fmt: skip
BY_NAME = {result.name: result for result in RESULTS}


# ---- What a result measured


def files_of(path: str, root: Path) -> list[Path]:
    """The files of a path: a file, a folder with all below it, or a pattern."""
    found: Iterable[Path] = (root / path).rglob("*") if (root / path).is_dir() else root.glob(path)
    return sorted(
        file
        for file in found
        if file.is_file()
        and file.suffix not in PROSE_AND_BUILT
        and not any(part.startswith((".", "__pycache__")) for part in file.relative_to(root).parts)
    )


def digests(paths: Sequence[str], root: Path = ROOT) -> dict[str, str]:
    """For each path a digest of the names and contents of its files."""
    found = {}
    for path in paths:
        whole = hashlib.sha256()
        for file in files_of(path, root):
            whole.update(f"{file.relative_to(root).as_posix()} ".encode() + hashlib.sha256(file.read_bytes()).digest())
        found[path] = whole.hexdigest()[:16]
    return found


def is_whole(result: Result, content: Mapping) -> bool:
    """A GPU is lent for minutes, so of its results every row counts. Figures say which are not there."""
    return bool(content.get("complete") or (result.gpu is not None and content.get("rows")))


def state(result: Result, path: Path, root: Path = ROOT) -> str:
    """Returns FRESH, or why the file has to be made (again)."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return "missing"
    except json.JSONDecodeError:
        return "no JSON"
    if content.get("quick") or not is_whole(result, content):
        return "incomplete"
    if result.instruction_set not in (None, content.get("instruction_set")):
        return f"made with {content.get('instruction_set')}"
    measured = content.get("sources", {})
    changed = [source for source, now in digests(result.sources, root).items() if measured.get(source) != now]
    return f"older than {', '.join(changed)}" if changed else FRESH


class Missing(Exception):
    """A result that does not exist, or is not whole; its name is the argument."""


class Results:
    """The results of a folder, by name."""

    def __init__(self, folder: Path = FOLDER, root: Path = ROOT):
        self.folder, self.root = folder, root
        self._read: dict[str, dict] = {}
        self._stale: dict[str, bool] = {}

    def __getitem__(self, name: str) -> dict:
        """
        Raises:
            Missing: there is no such file, it is not whole, or it comes from a smoke run.
        """
        if name not in self._read:
            path = BY_NAME[name].path(self.folder)
            content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
            if not is_whole(BY_NAME[name], content) or content.get("quick"):
                raise Missing(name)
            self._read[name] = content
        return self._read[name]

    def is_stale(self, name: str) -> bool:
        """Whether what the result measured has changed since."""
        if name not in self._stale:
            self._stale[name] = state(BY_NAME[name], BY_NAME[name].path(self.folder), self.root) != FRESH
        return self._stale[name]
