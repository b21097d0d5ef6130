"""The stage `build` of bench/gpu.sh: compiles the extensions into specdec_kernels/. Standard library only.

Installs nothing, as PYTHONPATH names both packages. What was built from the same sources stays.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

from found import ROOT, cuda_tool, gpu_query, missing, output_of
from steps import Run, Step

NEEDED = ("torch", "setuptools")
LIMIT = 400.0  # seconds; nvcc takes about one minute an architecture
FOLDER = ROOT / "specdec_kernels"
MARK = ROOT / "build" / "gpu.json"  # what the extensions in FOLDER were built from

_LOADS = """
import sys
import torch
from specdec_kernels.backends import native
missing = native.missing() or (native.missing_cuda() if torch.cuda.is_available() else None)
print(missing or "")
"""


def extension_problem() -> str | None:
    """Why an extension that should load here does not: `_C`, and on a GPU `_C_cuda`."""
    done = subprocess.run([sys.executable, "-c", _LOADS], cwd=ROOT, capture_output=True, text=True)
    said = (done.stdout if done.returncode == 0 else done.stderr).strip()
    return said.splitlines()[-1] if said else None


def architecture_for(capability: str, supported: str) -> str | None:
    """Of setup.py's list the one whose code this GPU runs best; None: there is none of its generation."""
    major, minor = map(int, capability.split("."))
    able = []
    for name in supported.split(";"):
        of_name = re.fullmatch(r"(\d+)\.(\d+)(a?)(\+PTX)?", name)
        if of_name is None:
            continue
        if int(of_name[1]) == major and (int(of_name[2]) == minor if of_name[3] else int(of_name[2]) <= minor):
            able.append((int(of_name[2]), name.removesuffix("+PTX")))
    return max(able)[1] if able else None


def architectures() -> str | None:
    """TORCH_CUDA_ARCH_LIST: the caller's, or this GPU's alone; None: there is no GPU, or none of setup.py's list."""
    if asked := os.environ.get("TORCH_CUDA_ARCH_LIST"):
        return asked
    capability = gpu_query("compute_cap")
    supported = re.search(r'CUDA_ARCHITECTURES = "([^"]+)"', (ROOT / "setup.py").read_text())
    if capability is None or not re.fullmatch(r"\d+\.\d+", capability) or supported is None:
        return None
    return architecture_for(capability, supported[1])


def digest(environment: dict[str, str]) -> str:
    """Of everything that decides what is built: sources, torch, compilers, architectures."""
    hashed = hashlib.sha256()
    tools = {"torch": metadata.version("torch"), "nvcc": output_of(cuda_tool("nvcc") or "nvcc", "--version")}
    tools |= {"c++": output_of("c++", "--version"), "SPECDEC_CUDA": os.environ.get("SPECDEC_CUDA")}
    hashed.update(json.dumps([environment, tools], sort_keys=True).encode())
    for path in (ROOT / "setup.py", *sorted((ROOT / "csrc").rglob("*"))):
        if path.is_file():
            hashed.update(str(path.relative_to(ROOT)).encode() + b"\0" + path.read_bytes() + b"\0")
    return hashed.hexdigest()


def extensions() -> dict[str, str]:
    """{file: digest} of what lies in specdec_kernels/."""
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in sorted(FOLDER.glob("_C*.so"))}


def already_built(wanted: str) -> bool:
    try:
        mark = json.loads(MARK.read_text())
    except (OSError, ValueError):
        return False  # nothing was built by this script, or not to the end
    return mark == {"digest": wanted, "extensions": extensions()} and extension_problem() is None


def ptxas_report(log: str) -> list[dict[str, object]]:
    """Registers, stack, spills and shared memory (bytes) of every kernel, from what `ptxas -v` printed."""
    kernels: list[dict[str, object]] = []
    for line in log.splitlines():
        if entry := re.search(r"Compiling entry function '(\w+)' for '(\w+)'", line):
            kernels.append({"kernel": entry[1], "architecture": entry[2]})
        elif kernels and (memory := re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+)", line)):
            for name, value in zip(("stack", "spill_stores", "spill_loads"), memory.groups(), strict=True):
                kernels[-1].setdefault(name, int(value))  # later ones are of functions that it calls
        elif kernels and (used := re.search(r"Used (\d+) registers", line)):
            shared = re.search(r"(\d+) bytes smem", line)
            kernels[-1] |= {"registers": int(used[1]), "static_shared": int(shared[1]) if shared else 0}
    names = output_of("c++filt", *(str(k["kernel"]) for k in kernels)) if kernels else None
    for kernel, name in zip(kernels, names.splitlines() if names else (), strict=False):
        kernel["kernel"] = name.split("(")[0]
    return kernels


def build(run: Run) -> None:
    if absent := missing(NEEDED):
        return run.note("build", "skipped", reason=f"missing: {', '.join(absent)}")
    if not (shutil.which("c++") or shutil.which("g++")):
        return run.note("build", "skipped", reason="missing: a C++ compiler (c++ or g++)")
    environment = {"NVCC_APPEND_FLAGS": f"{os.environ.get('NVCC_APPEND_FLAGS', '')} -Xptxas=-v".strip()}
    if names := architectures():
        environment["TORCH_CUDA_ARCH_LIST"] = names
    wanted = digest(environment)
    if not run.dry and already_built(wanted):
        return run.note("build", "ok", reason="what was built from the same sources stays")
    if not compile_and_copy(run, "build", environment):
        # The rest can do without CUDA kernels; without any extension it can do little.
        if run.dry or not compile_and_copy(run, "build without cuda", {"SPECDEC_CUDA": "0"}):
            return None
    elif not run.dry:
        MARK.parent.mkdir(exist_ok=True)
        MARK.write_text(json.dumps({"digest": wanted, "extensions": extensions()}))
    if not run.dry and (problem := extension_problem()):
        run.note("build", "failed", reason=f"it was built, but does not load: {problem}")
    return None


def compile_and_copy(run: Run, name: str, environment: dict[str, str]) -> bool:
    """From a copy without pyproject.toml, which asks for a setuptools (77) and a torch that may not be there."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        if not run.dry:
            shutil.copy2(ROOT / "setup.py", copy)
            for source in ("csrc", "specdec_kernels"):
                shutil.copytree(ROOT / source, copy / source, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
        log = copy / "log.txt"
        command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace"]
        done = run.run(Step(name, command, LIMIT, copy, environment, log))
        if run.dry:
            return True
        if log.exists() and (kernels := ptxas_report(log.read_text(errors="replace"))):
            run.record["ptxas"] = kernels
            run.write()
        if not done:
            return False
        for built in (copy / "specdec_kernels").glob("_C*.so"):
            partial = FOLDER / f"{built.name}.partial"
            shutil.copy2(built, partial)
            partial.replace(FOLDER / built.name)  # never under a process that has it loaded
    return True
