"""What is on this machine: tools, modules, a GPU. Standard library only, as any other module may be missing."""

from __future__ import annotations

import ast
import importlib.util
import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
IMPORT_ROOTS = (ROOT, ROOT / "python", ROOT / "bench")
PACKAGES = (
    *("torch", "triton", "transformers", "safetensors", "typer", "rich", "numpy", "flashinfer-python", "vllm"),
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


def cuda_tool(name: str) -> str | None:
    """The path of a tool of the CUDA toolkit, which may not be on the PATH; None: it is absent."""
    folder = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "bin"
    return shutil.which(name, path=os.pathsep.join((os.environ.get("PATH", ""), str(folder))))


def gpu_query(field: str) -> str | None:
    """What nvidia-smi says of the first GPU; None: it is absent or finds none."""
    lines = output_of("nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader")
    return lines.splitlines()[0].strip() if lines else None


def gpu_problem(device: str) -> tuple[str | None, str]:
    """(why CUDA cannot be used or None, the GPU's name or "cpu")."""
    if device == "cpu":
        return None, "cpu"
    name = gpu_query("name")
    if name is None:
        return "nvidia-smi is absent or finds no NVIDIA GPU", "none"
    ask = "import torch; print(torch.cuda.is_available(), torch.version.cuda)"
    sees = output_of(sys.executable, "-c", ask)
    if sees is None:
        return "torch cannot be imported", name
    usable, cuda = sees.split()
    if usable != "True":
        return f"nvidia-smi finds {name}, but torch (built for CUDA {cuda}) cannot use it", name
    return None, name


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
