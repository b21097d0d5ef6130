"""Writes the figures of the README and of the docs: everything between two marks comes out of bench/results/.

    python bench/tables.py             # which pages do not say what the results say; exit code 1 if there are any
    python bench/tables.py --write     # mends them

A page has ``<!-- begin: NAME -->`` and ``<!-- end -->``, on lines of their own or within one; NAME is one of FIGURES.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated

import typer

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "bench" / "results" / "cpu"
PAGES = ("README.md", "bench/README.md")
BLOCK = re.compile(r"<!-- begin: (\S+) -->(\n?).*?(\n?)<!-- end -->", re.DOTALL)

Figure = Callable[[Mapping[str, dict]], str]  # from the results by name
