"""How the command line is entered: by ``python -m specdec``, with its version and a shell's completion."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from specdec.cli import app
from typer.testing import CliRunner

import specdec_kernels


def test_version():
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0 and result.stdout == f"specdec {specdec_kernels.__version__}\n"


def test_python_m_specdec():
    process = subprocess.run([sys.executable, "-m", "specdec", "--help"], capture_output=True, text=True, check=True)
    assert process.stdout.startswith("Usage: specdec [OPTIONS] COMMAND [ARGS]...")
    for name in ("generate", "chat", "compare", "verify", "doctor", "--version", "--install-completion"):
        assert name in process.stdout


@pytest.mark.parametrize(
    "words, position, answer", [("specdec gen", 1, "generate"), ("specdec verify --che", 2, "--check")]
)
def test_completion(words, position, answer):
    asked = {"_SPECDEC_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(position)}
    command = [sys.executable, "-m", "specdec"]
    process = subprocess.run(command, env={**os.environ, **asked}, capture_output=True, text=True, check=True)
    assert process.stdout.split() == [answer]


def test_help_and_version_import_no_torch():
    call = "try: specdec.cli.app(sys.argv[1:])\nexcept SystemExit: assert 'torch' not in sys.modules"
    code = f"import sys, specdec.cli\n{call}"
    for option in ("--help", "--version"):
        subprocess.run([sys.executable, "-c", code, option], capture_output=True, check=True)
