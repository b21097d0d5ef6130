"""``specdec doctor``: on a pipe, on a narrow terminal, and as JSON."""

from __future__ import annotations

import copy
import functools
import json
import re

import torch
import transformers
from specdec.cli import app
from specdec.models.exchanged.merged import with_merged
from specdec.models.native_report import native_report
from support.commands import invoke, refused, run, save
from support.models import tiny_model
from typer.testing import CliRunner

import specdec_kernels
from specdec_kernels.backends import native


def test_doctor(monkeypatch):
    monkeypatch.setattr("os.getloadavg", lambda: (9.5, 0.0, 0.0))
    monkeypatch.setattr("torch.get_num_threads", lambda: 2)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 5})
    shown = run("doctor").stdout
    for name, value in (
        ("torch", torch.__version__),
        ("transformers", transformers.__version__),
        ("cpu on cpu", "runs"),
    ):
        assert re.search(rf"^ +{name} +{re.escape(value)} *$", shown, re.MULTILINE)
    assert re.search(r"^ +for CPUs +yes: compiler .*; instruction set \w+", shown, re.MULTILINE)
    assert "hint: the machine is busy (load 9.5 on 2 CPUs)" in shown
    info = json.loads(run("doctor", "--json").stdout)
    assert info["torch"] == torch.__version__ and info["native"]["instruction_set"] in shown
    assert info["cpus"]["usable"] == info["threads"] == 2 and len(info["hints"]) == 1


def test_doctor_counts_a_models_native_parts(tmp_path):
    shown = run("doctor", save(tmp_path / "model", 0)).stdout
    assert "natively on a CPU" in shown and re.search(r"^ +attention +native *$", shown, re.MULTILINE)
    told = json.loads(run("doctor", tmp_path / "model", "--json").stdout)["native_parts"]
    told.pop("on an NVIDIA GPU", None)  # where its kernels are
    assert told == {
        "linear layers": "8 of float32", "layers computed together": "1 of 3 layers, 1 of 2 layers",
        "attention": "native",
        "attention on a GPU": "its own, of a model whose heads have 8 numbers, and the kernel at least 16",
        "norms": "3", "angles of positions": "1",
        "gated layers": "1", "decoder layers": "1 on a GPU, none on a CPU", "forwards": "replayed",
    }  # fmt: skip
    assert "Invalid value for MODEL: there is no folder" in refused("doctor", tmp_path / "nothing")
    assert "Invalid value for --device: got 'cpu', allowed: one with a model" in refused("doctor", "--device", "cpu")
    assert "natively on a CPU" in run("doctor", tmp_path / "model", "--device", "cpu").stdout


def test_doctor_says_what_is_one_product_on_a_gpu(monkeypatch):
    """Forced on a CPU."""
    merged = functools.partial(with_merged, device="cpu")
    monkeypatch.setattr("specdec.models.forward.forwards.with_merged", merged)
    monkeypatch.setattr("specdec.models.forward.forwards.with_native_linear", lambda model: model)
    assert (
        native_report(copy.deepcopy(tiny_model("llama")))["layers computed together"] == "2 of 3 layers, 2 of 2 layers"
    )
    monkeypatch.setenv("SPECDEC_NATIVE", "0")
    assert (
        native_report(copy.deepcopy(tiny_model("llama")))["layers computed together"] == "none, as SPECDEC_NATIVE is 0"
    )


def test_doctor_names_what_the_cpu_has(monkeypatch):
    for units, said in (
        (("AVX2", "AVX-512"), "units AVX2, AVX-512 bfloat16 a step's products take 2.5 times as long as in float32"),
        ((), "units unknown "),
    ):
        monkeypatch.setattr("specdec.models.exchanged.slow_dtype.slowdown", lambda dtype: 2.5)
        monkeypatch.setattr("specdec.evaluation.machine.cpu_units", lambda _, units=units: units)
        assert said in " ".join(run("doctor").stdout.split())
        assert json.loads(run("doctor", "--json").stdout)["units"] == [*units]
    assert json.loads(run("doctor", "--json").stdout)["bfloat16_slowdown"] == 2.5


def test_an_instruction_set_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setenv("SPECDEC_CPU_ISA", "sse9")
    monkeypatch.setattr("specdec_kernels.backends.native.missing", native.missing.__wrapped__)  # asked anew
    failed = invoke("doctor")
    assert failed.exit_code == 2 and "SPECDEC_CPU_ISA: got 'sse9', allowed on this machine: base" in failed.output


def test_doctor_wraps_at_words(monkeypatch):
    why = "the C++ extension is not built in /a-checkout/specdec_kernels, which hides the installed one"
    told = {**specdec_kernels.build_info(), "native": {"missing": why}}
    monkeypatch.setattr("specdec_kernels.build_info", lambda: told)
    environment = {"COLUMNS": "60", "TTY_COMPATIBLE": "1", "FORCE_COLOR": "1", "NO_COLOR": "1"}
    shown = CliRunner().invoke(app, ["doctor"], env=environment).stdout
    plain = re.sub(r"\x1b\[[0-9;]*m", "", shown)
    assert "\x1b" in shown and max(map(len, plain.splitlines())) == 60
    assert f"no: {why}" in " ".join(plain.split()) and {*why.split()} <= {*plain.split()}
