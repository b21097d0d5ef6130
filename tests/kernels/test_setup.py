"""Where setup.py keeps what it compiled: in one folder, and in another one for another torch or compiler. What it names
for the source distribution: all of csrc/. What it refuses."""

from __future__ import annotations

import re
import runpy
import tomllib
from collections.abc import Callable

import pytest
import setuptools
import torch
from support import ROOT

MOMENTARY = "/the/folder/of/an/editable/install"


@pytest.fixture
def build_ext(monkeypatch: pytest.MonkeyPatch) -> Callable[..., setuptools.Command]:
    """Runs setup.py up to its call of ``setup``; returns what makes the command that would build the extensions."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("SPECDEC_CUDA", "0")

    def made(asked: str | None = None) -> setuptools.Command:
        arguments: dict = {}
        monkeypatch.setattr(setuptools, "setup", arguments.update)
        runpy.run_path("setup.py")
        distribution = setuptools.Distribution(arguments)
        distribution.get_command_obj("build").build_temp = MOMENTARY
        command = distribution.get_command_obj("build_ext")
        command.build_temp = asked
        command.ensure_finalized()
        return command

    return made


@pytest.fixture
def objects(build_ext) -> Callable[..., str]:
    """Tells where objects would go."""
    return lambda asked=None: build_ext(asked).build_temp


def test_the_source_distribution_has_every_source_and_header_also_where_cuda_is_left_out(build_ext):
    sources = {str(file.relative_to(ROOT)) for file in (ROOT / "csrc").rglob("*.*")}
    assert {"csrc/layers/program.h", "csrc/core/hd.h", "csrc/cuda/stages.h", "csrc/cuda/draft_step.cu"} <= sources
    assert {*build_ext().get_source_files()} == sources


def test_objects_stay_until_torch_or_the_compiler_is_another(objects, monkeypatch, tmp_path):
    usual = objects()
    assert usual.startswith("build/") and objects() == usual
    assert objects(asked="elsewhere") == "elsewhere"
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "2.99.0")
        other_torch = objects()
    compiler = tmp_path / "c++"
    compiler.write_text("#!/bin/sh\necho another c++ 99\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    assert len({usual, other_torch, objects()}) == 3


def test_a_setuptools_that_cannot_read_the_projects_file_is_refused_in_a_line(monkeypatch):
    (oldest,) = (
        found[1]
        for requirement in tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
        if (found := re.fullmatch(r"setuptools>=(\d+)", requirement))
    )
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(setuptools, "__version__", "65.5.0")  # what a new environment of Python 3.11 has
    monkeypatch.setattr(setuptools, "setup", lambda **given: pytest.fail("setup was called"))
    with pytest.raises(SystemExit) as refused:
        runpy.run_path("setup.py")
    message = f"specdec needs setuptools >= {oldest} to build: got 65.5.0; pip install -U 'setuptools>={oldest}'"
    assert str(refused.value) == message
