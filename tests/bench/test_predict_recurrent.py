"""The predicted times of recurrent layers: bytes and warps counted by hand, and the table of docs/cuda.md."""

from __future__ import annotations

import dataclasses
import runpy
import sys

import predict_recurrent
import pytest
from predict_recurrent import QWEN_27B, DeltaLayer
from specdec.evaluation.gpus import GPUS
from support import ROOT

LAYER = DeltaLayer(heads=2, key_heads=1, dk=4, dv=12, taps=3)


def test_bytes_by_hand():
    token = 2 * (4 + 24 + 2) + 4 * 2  # k, v and beta, and g
    assert LAYER.state == 4 * 2 * 4 * 12 and LAYER.inputs == token
    read = 3 * 2 * LAYER.state + 3 * (5 + 2) * token + 3 * 2 * 2 * 4
    assert LAYER.scan_bytes(3, lacking=5, fed=2) == read + 3 * 2 * (2 * token + 4 * 24)
    assert LAYER.conv_bytes(3, fed=2) == 3 * 2 * (2 * 4 + 24) * (2 + 2 + 2 + 2)
    assert LAYER.warps(3) == 3 * 2 * 2  # of 8 columns, and of 4
    assert QWEN_27B.state == 3 << 20


def test_what_limits_a_layer():
    (h100,) = (gpu for gpu in GPUS if gpu.name == "H100 SXM")
    slow = dataclasses.replace(h100, gigahertz=h100.gigahertz / 2)
    by_bytes, by_instructions = QWEN_27B.scan_seconds(h100, 64, 2, 4)
    assert QWEN_27B.scan_seconds(slow, 64, 2, 4) == (by_bytes, pytest.approx(2 * by_instructions))
    assert QWEN_27B.scan_seconds(h100, 64, 4, 8)[1] == pytest.approx(2 * by_instructions)
    few, one = (QWEN_27B.scan_seconds(h100, rows, 2, 4)[1] for rows in (2, 1))
    assert few < 2 * one  # at one row a warp waits


def test_the_page_has_what_the_command_prints(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [predict_recurrent.__file__])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(predict_recurrent.__file__, run_name="__main__")
    assert not ended.value.code
    head, *table = capsys.readouterr().out.splitlines()
    assert head.startswith("PREDICTION, not measured: H100 SXM")
    assert len(table) == 8 and "\n".join(table) in (ROOT / "docs/cuda.md").read_text("utf-8")
