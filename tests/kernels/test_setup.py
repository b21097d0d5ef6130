"""Where setup.py keeps what it compiled: in one folder, and in another one for another torch or compiler."""

from __future__ import annotations

import runpy

import pytest
import setuptools
import torch
from support import ROOT

MOMENTARY = "/the/folder/of/an/editable/install"


@pytest.fixture
def objects(monkeypatch: pytest.MonkeyPatch):
    """Runs setup.py up to its call of ``setup``; returns what tells where objects would go."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("SPECDEC_CUDA", "0")

    def folder(asked: str | None = None) -> str:
        arguments: dict = {}
        monkeypatch.setattr(setuptools, "setup", arguments.update)
        runpy.run_path("setup.py")
        distribution = setuptools.Distribution(arguments)
        distribution.get_command_obj("build").build_temp = MOMENTARY
        command = distribution.get_command_obj("build_ext")
        command.build_temp = asked
        command.ensure_finalized()
        return command.build_temp

    return folder


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
