"""What bench/gpu.sh runs: stages with time limits, each recorded in summary.json.

Standard library only: any other module may be missing, and then only what needs it is left out, by name.
"""

from __future__ import annotations

import argparse
import ast
import datetime
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

from steps import Run, Step

ROOT = Path(__file__).resolve().parent.parent
STAGES = ("build", "test", "bench")
IMPORT_ROOTS = (ROOT, ROOT / "python", ROOT / "bench")
NEEDED = {  # stage: modules without which it cannot run at all
    "build": ("torch", "setuptools"),
    "test": ("torch", "pytest"),
    "bench": ("torch", "transformers", "safetensors", "typer", "rich"),
}
PACKAGES = (
    *("torch", "triton", "transformers", "safetensors", "typer", "rich", "numpy", "flashinfer-python"),
    *("setuptools", "ninja", "pytest", "pytest-xdist", "hypothesis", "scipy", "specdec"),
)


def installed() -> dict[str, str | None]:
    found: dict[str, str | None] = {"python": sys.version.split()[0]}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def missing(modules: tuple[str, ...]) -> list[str]:
    return [m for m in modules if importlib.util.find_spec(m) is None]


def output_of(*command: str) -> str | None:
    """What a tool prints, or None where it is absent, fails, hangs or says nothing."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None


def last_line(text: str | None) -> str | None:
    return text.splitlines()[-1] if text else None


def gpu_problem(device: str) -> tuple[str | None, str]:
    """(why CUDA cannot be used or None, the GPU's name or "cpu")."""
    if device == "cpu":
        return None, "cpu"
    names = output_of("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    if names is None:
        return "nvidia-smi is absent or finds no NVIDIA GPU", "none"
    name = names.splitlines()[0]
    ask = "import torch; print(torch.cuda.is_available(), torch.version.cuda)"
    sees = output_of(sys.executable, "-c", ask)
    if sees is None:
        return "torch cannot be imported", name
    usable, cuda = sees.split()
    if usable != "True":
        return f"nvidia-smi finds {name}, but torch (built for CUDA {cuda}) cannot use it", name
    return None, name


def extension_loads() -> bool:
    check = "import sys; from specdec_kernels.backends import native; sys.exit(native.missing() is not None)"
    return subprocess.run([sys.executable, "-c", check], cwd=ROOT, capture_output=True).returncode == 0


def build(run: Run) -> None:
    """Compiles the extension into specdec_kernels/; installs nothing, as PYTHONPATH names both packages.

    From a copy without pyproject.toml, which asks for a setuptools (77) and a torch that may not be there.
    """
    if absent := missing(NEEDED["build"]):
        return run.note("build", "skipped", reason=f"missing: {', '.join(absent)}")
    if not (shutil.which("c++") or shutil.which("g++")):
        return run.note("build", "skipped", reason="missing: a C++ compiler (c++ or g++)")
    command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name)
        if not run.dry:
            shutil.copy2(ROOT / "setup.py", copy)
            for folder in ("csrc", "specdec_kernels"):
                ignored = shutil.ignore_patterns("*.so", "__pycache__")
                shutil.copytree(ROOT / folder, copy / folder, ignore=ignored)
        if not run.run(Step("build", command, 180, copy)) or run.dry:
            return None
        for built in (copy / "specdec_kernels").glob("_C*.so"):
            partial = ROOT / "specdec_kernels" / f"{built.name}.partial"
            shutil.copy2(built, partial)
            partial.replace(ROOT / "specdec_kernels" / built.name)  # never under a process that has it loaded
    if not extension_loads():
        run.note("build", "failed", reason="it was built, but does not load")
    return None


def third_party(path: Path, seen: set[Path]) -> set[str]:
    """Modules from elsewhere that a file imports at its top, itself or through files of this repository."""
    if path in seen:
        return set()
    seen.add(path)
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            names, folders = [alias.name for alias in node.names], (path.parent, *IMPORT_ROOTS)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names, folders = [node.module], (path.parent, *IMPORT_ROOTS)
        elif isinstance(node, ast.ImportFrom) and node.module:
            names, folders = [node.module], (path.parents[node.level - 1],)
        else:
            continue
        for name in names:
            stems = [folder / name.replace(".", "/") for folder in folders]
            files = [f for s in stems for f in (s.with_suffix(".py"), s / "__init__.py") if f.is_file()]
            found |= third_party(files[0], seen) if files else {name.split(".")[0]}
    return found


def test(run: Run, device: str, share: float) -> None:
    if absent := missing(NEEDED["test"]):
        return run.note("test", "skipped", reason=f"missing: {', '.join(absent)}")
    junit = run.folder / "junit.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={junit}"]
    left_out = {}
    for file in sorted((ROOT / "tests").glob("test_*.py")):
        if absent := missing(tuple(sorted(third_party(file, set())))):
            left_out[file.name] = absent
            command.append(f"--ignore=tests/{file.name}")
            print(f"{file.name} is left out: missing {', '.join(absent)}")
    run.record["tests_left_out"] = left_out
    if device == "cuda" and not missing(("xdist",)):
        command += ["-n", str(min(8, os.cpu_count() or 1))]
    if not run.dry:
        junit.unlink(missing_ok=True)  # of an earlier call
    run.run(Step("test", command, run.left * share, ROOT))
    if not run.dry and junit.exists():
        suite = re.search(r"<testsuite .*?>", junit.read_text())
        counts = re.findall(r'(errors|failures|skipped|tests|time)="([\d.]+)"', suite[0] if suite else "")
        run.record["tests"] = {name: float(value) for name, value in counts}
        run.write()
    return None


def bench(run: Run, device: str, problem: str | None) -> None:
    if absent := missing(NEEDED["bench"]):
        return run.note("bench", "skipped", reason=f"missing: {', '.join(absent)}")

    def time_one(stem: str, where: str, limit: float, *options: str) -> None:
        result = f"{run.folder}/{stem}.{where}.json"
        command = [sys.executable, f"bench/bench_{stem}.py", "--device", where, "--json", result, *options]
        run.run(Step(f"bench {stem}.{where}", command, limit, ROOT))

    for stem in ("speculative_step", "draft_step", "settings", "decoding"):
        time_one(stem, "cpu", 60, "--quick")
    if device != "cuda":
        return None
    if problem is not None:
        return run.note("bench cuda", "skipped", reason=problem)
    # A step that is cut short keeps its rows, so the longest comes last and gets what is left.
    time_one("draft_step", "cuda", min(90, run.left * 0.2), "--seconds", "0.3", "--compile-seconds", "20")
    time_one("settings", "cuda", min(60, run.left * 0.2), "--seconds", "10")
    few = ("--preset", "1b,8b", "-K", "4", "--new-tokens", "64", "--seconds", "5", "--rounds", "3")
    time_one("decoding", "cuda", run.left * 0.4, *few)
    compiling = str(int(max(run.left, 0) * 0.3))
    time_one("speculative_step", "cuda", run.left, "--seconds", "0.3", "--compile-seconds", compiling)
    return None


def main() -> int:
    parser = argparse.ArgumentParser(prog="gpu.sh", description=__doc__)
    parser.add_argument(
        "--stage", action="append", choices=STAGES, help="only this one; may be repeated (default: all)"
    )
    parser.add_argument("--minutes", type=float, default=9.5, help="for everything (default: %(default)s)")
    parser.add_argument("--dry-run", action="store_true", help="print the commands, run and write nothing")
    options = parser.parse_args()
    if not options.minutes > 0:
        parser.error(f"--minutes: got {options.minutes}, allowed: > 0")
    device = os.environ.get("SPECDEC_BENCH_DEVICE", "cuda")
    if device not in ("cuda", "cpu"):
        parser.error(f"SPECDEC_BENCH_DEVICE: got {device!r}, allowed: 'cuda', 'cpu'")
    stages = options.stage or list(STAGES)
    deadline = time.monotonic() + options.minutes * 60

    paths = (str(ROOT / "python"), str(ROOT), os.environ.get("PYTHONPATH"))
    os.environ["PYTHONPATH"] = os.pathsep.join(p for p in paths if p)
    os.environ["PYTHONUNBUFFERED"] = "1"
    problem, gpu = gpu_problem(device)
    date = datetime.datetime.now(datetime.UTC)
    slug = re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")
    folder = Path(os.environ.get("OUT") or ROOT / "bench" / "results") / f"{date:%Y-%m-%d}-{slug}"
    run = Run(folder, deadline, options.dry_run)
    earlier = {}  # the stages of the same day's earlier calls stay
    if (folder / "summary.json").exists():
        earlier = json.loads((folder / "summary.json").read_text()).get("stages", {})
    query = ("--query-gpu=name,driver_version,memory.total", "--format=csv,noheader")
    run.record = {
        "date": date.isoformat(timespec="seconds"),
        "command": shlex.join(["bench/gpu.sh", *sys.argv[1:]]),
        "device": device,
        "gpu": output_of("nvidia-smi", *query),
        "nvcc": last_line(output_of("nvcc", "--version")),
        "ncu": last_line(output_of("ncu", "--version")),
        "versions": installed(),
        "stages": {name: s for name, s in earlier.items() if name.split()[0] not in {"check", *stages}},
    }
    for key in ("gpu", "nvcc", "ncu"):
        print(f"{key}: {run.record[key] or 'none'}")
    run.note("check", "failed" if problem else "ok", reason=problem)
    if "build" not in stages and not extension_loads():
        stages = ["build", *stages]
    work = {
        "build": lambda: build(run),
        "test": lambda: test(run, device, share=0.45 if "bench" in stages else 0.95),
        "bench": lambda: bench(run, device, problem),
    }
    for stage in [s for s in STAGES if s in stages]:
        try:
            work[stage]()
        except Exception as error:  # reported, and the next stage runs
            run.note(stage, "failed", reason=f"{type(error).__name__}: {error}")
    if options.dry_run:
        print("dry run: nothing was run or written")
        return 0
    print(f"results: {folder}")
    if run.failed:
        print(f"not ok: {', '.join(run.failed)}")
    return int(bool(run.failed))


if __name__ == "__main__":
    sys.exit(main())
