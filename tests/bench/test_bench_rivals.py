"""rivals.py and its files: what is compared has the same weights, and what is written says what was measured."""

from __future__ import annotations

import copy
import ctypes
import importlib.util
import json
import time
from pathlib import Path

import bench_widths
import numpy as np
import pytest
import rivals
import torch
import weights
from specdec import load_model
from specdec.models.exchanged.stored_weights import stores_bfloat16
from specdec.models.load.reduced_head import reduce_head
from support.benches import run_main
from support.commands import run
from support.gguf_files import TEMPLATE, tiny, write_gguf

IDS = torch.tensor([[7, 3, 200, 31, 5, 5, 90]])
ROOM = {"context_length": 4096, "tokenizer.chat_template": TEMPLATE}


def logits(model) -> torch.Tensor:
    with torch.inference_mode():
        return model(IDS).logits


@pytest.fixture
def source(tmp_path):
    """The file of a target, and the folder of it."""
    file, folder = tmp_path / "target.gguf", tmp_path / "target"
    write_gguf(file, "llama", ROOM)
    run("convert", file, folder)
    return file, folder


@pytest.fixture
def no_llama(monkeypatch):
    """llama.cpp takes no such vocabulary."""
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "llama_cpp" else found(name, *a))


@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_a_file_that_is_written_anew_has_the_same_weights(kind, tmp_path):
    model = write_gguf(tmp_path / "source.gguf", kind, stored="Q8_0")
    whole = load_model(weights.rewritten(tmp_path / "source.gguf", "F32", tmp_path))
    torch.testing.assert_close(logits(whole), logits(model), rtol=1e-4, atol=1e-4)
    half = load_model(weights.rewritten(tmp_path / "source.gguf", "BF16", tmp_path))
    difference = (logits(half) - logits(model)).abs().max()
    assert 0 < difference < 0.2 * logits(model).abs().max()


@pytest.mark.parametrize("reduced", [False, True])
def test_the_file_of_a_draft_is_the_draft(reduced, tmp_path):
    write_gguf(tmp_path / "target.gguf", "llama", {"block_count": 9})
    draft, kept = copy.deepcopy(tiny("llama")), torch.arange(0, 255, 3)
    if reduced:
        reduce_head(draft, kept)
    draft.save_pretrained(tmp_path / "draft")
    file = weights.of_draft(tmp_path / "draft", tmp_path / "target.gguf", "F32", tmp_path)
    found, expected = logits(load_model(file)), logits(draft)
    if reduced:
        left = torch.ones(found.shape[-1], dtype=torch.bool).index_fill(0, kept, False)
        assert not found[..., left].any()
        found = found[..., kept]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_a_draft_of_another_architecture_is_refused(tmp_path):
    write_gguf(tmp_path / "target.gguf")
    tiny("qwen3").save_pretrained(tmp_path / "draft")
    with pytest.raises(Exception, match=r"draft: got a model of type 'qwen3'"):
        weights.of_draft(tmp_path / "draft", tmp_path / "target.gguf", "F32", tmp_path)


def test_weights_are_stored_in_each_kind(tmp_path):
    tiny("llama, wide").save_pretrained(tmp_path)
    whole, half = (weights.stored(tmp_path, kind) for kind in ("float32", "bfloat16"))
    assert stores_bfloat16(half) and half.dtype == torch.float32
    rounded = weights.stored(tmp_path, "float32")
    for weight in rounded.parameters():
        weight.data = weight.data.bfloat16().float()
    torch.testing.assert_close(logits(half), logits(rounded), rtol=1e-4, atol=1e-4)
    errors = [(logits(weights.stored(tmp_path, k)) - logits(whole)).abs().mean() for k in ("8 bits", "4 bits")]
    assert 0 < errors[0] < errors[1]


class Llama:
    """As llama_cpp's: the next token after n is n + 1."""

    def __init__(self):
        self.n_tokens, self.input_ids, self.fed, self._ctx = 0, np.zeros(64, np.intc), [], self

    def eval(self, tokens):
        self.input_ids[self.n_tokens : self.n_tokens + len(tokens)] = tokens
        self.n_tokens += len(tokens)
        self.fed.append(list(tokens))

    def n_vocab(self) -> int:
        return 100

    def get_logits(self):
        values = [float(i == self.input_ids[self.n_tokens - 1] + 1) for i in range(100)]
        return ctypes.cast((ctypes.c_float * 100)(*values), ctypes.POINTER(ctypes.c_float))


def test_a_draft_of_llama_cpp_reads_only_what_is_new():
    llama = Llama()
    draft = rivals.LlamaDraft(llama)
    assert draft(np.array([5, 6, 10], np.intc)).tolist() == [11, 12, 13]
    assert llama.fed == [[5, 6, 10], [11], [12]]
    llama.fed.clear()
    assert draft(np.array([5, 6, 10, 11, 40], np.intc)).tolist() == [41, 42, 43]  # the second draft was rejected
    assert llama.fed == [[40], [41], [42]]
    llama.fed.clear()
    assert draft(np.array([5, 6, 10, 11, 40, 41, 42, 43, 44], np.intc)).tolist() == [45, 46, 47]  # all were accepted
    assert llama.fed[0] == [43, 44]
    llama.fed.clear()
    assert draft(np.array([5, 9], np.intc)).tolist() == [10, 11, 12] and llama.fed[0] == [9]


def test_neighbours_run_only_while_they_are_asked_for():
    neighbours = rivals.Neighbours(2)

    def become(stopped: list[bool]) -> bool:
        for _ in range(600):  # a signal takes its time
            found = [Path(f"/proc/{p.pid}/stat").read_text().rsplit(")")[1].split()[0] for p in neighbours._processes]
            if [state == "T" for state in found] == stopped:
                return True
            time.sleep(0.1)
        return False

    try:
        assert become([True, True])
        with neighbours.busy(1):
            assert become([False, True])
        assert become([True, True])
    finally:
        neighbours.close()
    assert all(process.returncode is not None for process in neighbours._processes)


def test_rows_compare_with_the_same_number_of_neighbours():
    speeds = {
        ("specdec", 0): [40.0], ("specdec", 2): [20.0], ("llama.cpp", 0): [20.0], ("llama.cpp", 2): [5.0],
        ("llama.cpp, draft model", 0): [80.0], ("llama.cpp, draft model", 2): [4.0],
    }  # fmt: skip
    rows = {(row["method"], row["busy"]): row for row in rivals.rows_of("float32", speeds)}
    alone, beside = rows["specdec", 0], rows["specdec", 2]
    assert (alone["over_llama_cpp"]["median"], alone["over_its_best"]["median"]) == (2.0, 0.5)
    assert (beside["over_llama_cpp"]["median"], beside["over_its_best"]["median"]) == (4.0, 4.0)
    assert beside["of_alone"]["median"] == 0.5 and "of_alone" not in alone


def test_texts_of_a_kind_are_one_job_in_each_round():
    speeds = {("specdec", 0): [1.0, 2.0, 9.0, 4.0, 4.0, 9.0], ("specdec, suffix", 0): [2.0, 2.0, 9.0, 2.0, 8.0, 9.0]}
    rows = {
        (row["prompt"], row["method"]): row for row in rivals.by_prompt("float32", ("chat", "chat", "essay"), speeds)
    }
    assert list(rows) == [(kind, way) for kind in ("chat", "essay") for way in ("specdec", "specdec, suffix")]
    chat = rows["chat", "specdec, suffix"]
    # Two texts of n tokens take n + n / 2 seconds and n in the first round, n / 2 and n (1 / 2 + 1 / 8) in the second.
    assert chat["of_plain"]["rounds"] == 2
    assert chat["of_plain"]["median"] == pytest.approx((1.5 / 1 + 0.5 / 0.625) / 2)
    assert rows["chat", "specdec"]["tokens_per_second"]["median"] == pytest.approx((2 / 1.5 + 4) / 2)
    assert rows["essay", "specdec, suffix"]["of_plain"]["median"] == 1


@pytest.mark.parametrize("template", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_rivals_report(source, template, tmp_path, no_llama):
    file, folder = source
    if not template:
        (folder / "chat_template.jinja").unlink()
    given = (folder, "--gguf", file, "--draft", folder, "--kinds", "bfloat16", "--busy", "1", "--quick", "--each", 2)
    done = run_main(rivals, *given, "--threads", 1, "--json", tmp_path / "out.json")
    assert done.exit_code == 0, done.output
    content = json.loads((tmp_path / "out.json").read_text())
    ways = ("", ", suffix", ", prompt lookup", ", draft model", ", its server's loop")
    names = [*(f"specdec{way}" for way in ways), "transformers", "transformers, prompt lookup"]
    rows = [(row["method"], row["busy"]) for row in content["rows"] if "busy" in row]
    assert rows == [(name, busy) for name in names for busy in (0, 1)]
    by_prompt = [(row["prompt"], row["method"]) for row in content["rows"] if "prompt" in row]
    assert by_prompt == [(prompt, name) for prompt in content["prompts"] for name in names[:5]]
    assert content["complete"] and [len(lengths) for lengths in content["prompts"].values()] == [2, 2]


def test_widths_report(tmp_path, no_llama):
    write_gguf(file := tmp_path / "target.gguf", "llama", ROOM | {"block_count": 2})
    done = run_main(
        bench_widths, file, "--kinds", "float32,8 bits", "--quick", "--threads", 1, "--json", tmp_path / "out.json"
    )
    assert done.exit_code == 0, done.output
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]
    assert [(row["weights"], row["tokens"]) for row in rows] == [
        ("float32", 1), ("float32", 3), ("8 bits", 1), ("8 bits", 3),
    ]  # fmt: skip
    assert all(row["step"]["median"] > 0 and (row["tokens"] > 1 or row["of_one"]["median"] == 1) for row in rows)
    assert rows[2]["bytes"] < 0.3 * rows[0]["bytes"]
