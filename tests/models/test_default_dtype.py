"""bfloat16 on a CPU without units for it: float32 instead, where it fits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from specdec import load_model, load_pair
from specdec.models.cpu_units import cpu_units
from specdec.models.default_dtype import float32_instead
from support.commands import PROMPT, run, save

X86 = "processor : 0\nflags\t\t: fpu avx2 f16c avx512f {}\nbugs : none\n"
ARM = "processor : 0\nFeatures\t: fp asimd {} i8mm\n"


@pytest.mark.parametrize(
    ("content", "units"),
    [
        (X86.format(""), ("AVX2", "AVX-512")),
        (X86.format("avx512_bf16 amx_bf16"), ("AVX2", "AVX-512", "AVX512-BF16", "AMX-BF16")),
        (ARM.format("bf16"), ("NEON", "Arm BF16")),
        (ARM.format(""), ("NEON",)),
        (None, ()),
    ],
)
def test_units_of_the_cpu(content, units, tmp_path):
    if content is not None:
        (tmp_path / "proc").mkdir()
        (tmp_path / "proc" / "cpuinfo").write_text(content)
    assert cpu_units(tmp_path) == units


@pytest.fixture
def cpu(monkeypatch):
    """Sets what the CPU has, and how many bytes are free."""

    def of(*units: str, free: int | None = 2**40) -> None:
        monkeypatch.setattr("specdec.models.default_dtype.cpu_units", lambda: units)
        monkeypatch.setattr("specdec.models.default_dtype.free_memory", lambda _: free)

    return of


@pytest.fixture
def folder(pair, tmp_path) -> Path:
    """A model that was saved in bfloat16."""
    folder = save(tmp_path / "model", 0, tokenizer=pair[2])
    load_model(folder, "bfloat16").save_pretrained(folder)
    return folder


def test_bfloat16_as_saved_only_where_the_cpu_has_units(cpu, folder):
    for units, dtype in (
        (("AVX2", "AVX-512"), torch.float32),
        ((), torch.float32),
        (("AVX2", "AVX-512", "AVX512-BF16"), torch.bfloat16),
        (("NEON", "Arm BF16"), torch.bfloat16),
    ):
        cpu(*units)
        assert load_model(folder).dtype == dtype
        assert {model.dtype for model in load_pair(folder, folder)[:2]} == {dtype}
    cpu("AVX2")
    assert load_model(folder, "bfloat16").dtype == torch.bfloat16
    load_model(folder, "float16").save_pretrained(folder)
    assert load_model(folder).dtype == torch.float16


def test_it_has_to_fit_the_memory(cpu, folder):
    size = 4 * load_model(folder).num_parameters()
    for free, dtype in ((size + size // 3, torch.float32), (size, torch.bfloat16), (None, torch.float32)):
        cpu("AVX2", free=free)
        assert load_model(folder).dtype == dtype


def test_elsewhere_than_on_a_cpu_it_stays(cpu, folder):
    cpu("AVX2")
    assert float32_instead(folder, "cuda") is None and float32_instead(folder, "cpu") is not None


def test_a_command_says_so(cpu, folder):
    asked = ("generate", PROMPT, "--target", folder, "--draft", folder, "--max-new-tokens", 2)
    cpu("AVX2")
    said = " ".join(run(*asked).stderr.split())
    assert "float32 instead of bfloat16, as it was saved: this CPU has no units for bfloat16" in said
    assert "--dtype bfloat16 keeps it" in said
    assert "bfloat16" not in run(*asked, "--dtype", "bfloat16").stderr
    cpu("AVX512-BF16")
    assert "bfloat16" not in run(*asked).stderr
