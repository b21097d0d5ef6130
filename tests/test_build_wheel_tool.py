"""What tools/build_wheel.py finds in a wheel; that it builds one is not for every day."""

from __future__ import annotations

import importlib.util
import runpy
import zipfile
from pathlib import Path

import pytest
from support import ROOT

TOOL = runpy.run_path(str(ROOT / "tools" / "build_wheel.py"))
_, EXTENSION, OTHER = TOOL["EXTENSIONS"]
NAME = "specdec_kernels-0.1.0-cp311-abi3-manylinux_2_28_x86_64.whl"


def built(extension: str) -> bytes:
    found = importlib.util.find_spec(extension.removesuffix(".abi3.so").replace("/", "."))
    assert found is not None and found.origin is not None
    return Path(found.origin).read_bytes()


@pytest.fixture
def files() -> dict[str, bytes]:
    """What a wheel has; of all but the extensions only the names count."""
    names = TOOL["wanted"]()
    assert {
        "specdec/py.typed",
        "specdec/embedded/LICENSE",
        "specdec_kernels/testing/__init__.py",
        "specdec_layers/ops.py",
    } <= names
    return dict.fromkeys(names, b"") | {name: built(name) for name in TOOL["EXTENSIONS"]}


def faults(folder: Path, files: dict[str, bytes], name: str = NAME) -> list[str]:
    with zipfile.ZipFile(folder / name, "w") as wheel:
        for file, content in files.items():
            wheel.writestr(file, content)
    return TOOL["faults"](folder / name)


def test_a_whole_wheel_has_no_faults(files, tmp_path):
    assert faults(tmp_path, files) == []


def test_a_name_for_one_python(files, tmp_path):
    (fault,) = faults(tmp_path, files, "specdec_kernels-0.1.0-cp311-cp311-linux_x86_64.whl")
    assert "cp311-cp311" in fault


def test_files_that_are_missing_or_too_many(files, tmp_path):
    wrong = "specdec_kernels/_C.cpython-311-x86_64-linux-gnu.so"
    files[wrong] = files.pop(EXTENSION)
    del files["specdec/py.typed"]
    missing = ["specdec/py.typed: is missing", f"{EXTENSION}: is missing"]
    assert faults(tmp_path, files) == [*missing, f"{wrong}: should not be there"]


def test_libraries_that_not_every_system_has(files, tmp_path):
    for extension in (EXTENSION, OTHER):
        files[extension] = files[extension].replace(b"libc10.so\0", b"libX10.so\0")
    assert faults(tmp_path, files) == [f"{extension}: needs libX10.so" for extension in (EXTENSION, OTHER)]
