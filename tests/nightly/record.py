"""What the last run of each part gave: results.json, one line a part."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from .parts import ROOT, Part

RESULTS = Path(__file__).with_name("results.json")
MISSING, FAILED, STALE, PASSED = "missing", "failed", "stale", "passed"


def read() -> dict[str, dict]:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else {}


def write(name: str, result: dict) -> None:
    """Replaces the line of one part."""
    lines = [f"{json.dumps(n)}: {json.dumps(r)}" for n, r in sorted({**read(), name: result}.items())]
    new = RESULTS.with_suffix(".new")
    new.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    new.replace(RESULTS)


def state(part: Part, result: dict | None) -> str:
    """STALE: it passed, but the part or what it depends on has changed since, or had changes that no commit has."""
    if result is None:
        return MISSING
    if result["outcome"] != "passed":
        return FAILED
    same = result["command"].endswith(" ".join(part.arguments)) and not result["dirty"]
    same = same and git("diff", "--quiet", result["commit"], "--", *part.paths).returncode == 0
    return PASSED if same else STALE


def commit() -> dict[str, object]:
    """The commit that is checked out, and whether anything but the results differs from it."""
    changes = git("status", "--porcelain", "--", ".", f":!{RESULTS.relative_to(ROOT)}").stdout
    return {"commit": git("rev-parse", "HEAD").stdout.strip(), "dirty": bool(changes)}


def git(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
