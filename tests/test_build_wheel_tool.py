"""What tools/build_wheel.py finds in a wheel; that it builds one is not for every day."""

from __future__ import annotations

import importlib.util
import runpy
import zipfile
from pathlib import Path

import pytest
from support import ROOT

TOOL = runpy.run_path(str(ROOT / "tools" / "build_wheel.py"))
EXTENSION = TOOL["EXTENSION"]
NAME = "specdec_kernels-0.1.0-cp311-abi3-manylinux_2_28_x86_64.whl"


@pytest.fixture
def files() -> dict[str, bytes]:
    """What a wheel has; of all but the extension only the names count."""
    found = importlib.util.find_spec("specdec_kernels._C")
    assert found is not None and found.origin is not None
    names = TOOL["wanted"]()
    assert {"specdec/py.typed", "specdec/embedded/LICENSE", "specdec_kernels/testing/__init__.py"} <= names
    return dict.fromkeys(names, b"") | {EXTENSION: Path(found.origin).read_bytes()}


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
    other = "specdec_kernels/_C.cpython-311-x86_64-linux-gnu.so"
    files[other] = files.pop(EXTENSION)
    del files["specdec/py.typed"]
    missing = ["specdec/py.typed: is missing", f"{EXTENSION}: is missing"]
    assert faults(tmp_path, files) == [*missing, f"{other}: should not be there"]


def test_libraries_that_not_every_system_has(files, tmp_path):
    files[EXTENSION] = files[EXTENSION].replace(b"libc10.so\0", b"libX10.so\0")
    assert faults(tmp_path, files) == [f"{EXTENSION}: needs libX10.so"]
