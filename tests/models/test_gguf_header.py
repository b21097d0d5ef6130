"""The header of a GGUF file: what gguf's own reader finds, and an error for each file that is not whole."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from specdec.models.load.gguf.file import read_gguf
from support.gguf_files import gguf, write_gguf

VALUES = {
    "general.name": "ä 漢", "general.tags": ["a", "", "ö"], "general.flag": True, "general.most": 2**32 - 1,
    "general.half": 0.5, "general.counts": [1, -2, 3], "general.weights": [0.5, -1.5], "general.bits": [True, False],
}  # fmt: skip


@pytest.mark.parametrize("stored", ["F32", "Q8_0", "BF16"])
def test_it_is_what_gguf_reads(stored, tmp_path):
    write_gguf(tmp_path / "model.gguf", metadata={**VALUES, "general.alignment": 4096}, stored=stored)
    file, theirs = read_gguf(tmp_path / "model.gguf"), gguf.GGUFReader(tmp_path / "model.gguf")
    assert file.metadata == {k: f.contents() for k, f in theirs.fields.items() if not k.startswith("GGUF.")}
    assert file.metadata.items() >= VALUES.items()
    assert [*file.tensors] == [tensor.name for tensor in theirs.tensors]
    for theirs_one, ours in zip(theirs.tensors, file.tensors.values(), strict=True):
        assert ours.type == theirs_one.tensor_type and list(ours.shape) == theirs_one.shape.tolist()[::-1]
        assert np.array_equal(ours.data.numpy().reshape(-1), theirs_one.data.view(np.uint8).reshape(-1))
    assert file.packed == ([] if stored == "F32" else [stored])


def test_a_file_that_was_cut_is_refused_wherever_it_ends(tmp_path):
    write_gguf(tmp_path / "model.gguf")
    whole = (tmp_path / "model.gguf").read_bytes()
    for kept in (0, 3, 20, 60, 2000, len(whole) // 2, len(whole) - 1):
        (tmp_path / "cut.gguf").write_bytes(whole[:kept])
        with pytest.raises(OSError, match=r"target: cannot read .*cut.gguf' as a GGUF file: its? "):
            read_gguf(tmp_path / "cut.gguf", "target")


@pytest.mark.parametrize(
    ("at", "put", "said"),
    [
        (0, b"GGML", "does not begin with GGUF"),
        (4, struct.pack("<I", 1), "of version 1"),
        (4, struct.pack(">I", 3), "of version 50331648"),  # of a machine of the other byte order
        (8, struct.pack("<Q", 2**60), "damaged"),
        (24, struct.pack("<Q", 2**63), "damaged"),
        (32, b"\xff", "damaged"),
    ],
)
def test_damage(at, put, said, tmp_path):
    write_gguf(tmp_path / "model.gguf")
    whole = bytearray((tmp_path / "model.gguf").read_bytes())
    whole[at : at + len(put)] = put
    (tmp_path / "model.gguf").write_bytes(whole)
    with pytest.raises(OSError, match=f"as a GGUF file: .*{said}"):
        read_gguf(tmp_path / "model.gguf")


@pytest.mark.parametrize("alignment", [1, 4])
def test_tensors_that_no_kernel_could_read_in_place(alignment, tmp_path):
    write_gguf(tmp_path / "model.gguf", metadata={"general.alignment": alignment})
    with pytest.raises(OSError, match=rf"multiples of 8 \(general.alignment is {alignment}\)"):
        read_gguf(tmp_path / "model.gguf")
    write_gguf(tmp_path / "model.gguf")
    whole = bytearray((tmp_path / "model.gguf").read_bytes())
    place = whole.index(b"output_norm.weight") + len(b"output_norm.weight") + 16  # after its shape and type
    whole[place : place + 8] = struct.pack("<Q", struct.unpack_from("<Q", whole, place)[0] + alignment)
    (tmp_path / "model.gguf").write_bytes(whole)
    with pytest.raises(OSError, match="multiples of 8"):
        read_gguf(tmp_path / "model.gguf")


def test_the_file_is_mapped_and_never_written(tmp_path):
    write_gguf(tmp_path / "model.gguf")
    before = (tmp_path / "model.gguf").read_bytes()
    for tensor in read_gguf(tmp_path / "model.gguf").tensors.values():
        tensor.data.zero_()
    assert (tmp_path / "model.gguf").read_bytes() == before
