"""Measures the memory that loading a model takes, and decoding with it: whether there is one copy of the weights.

    python bench/bench_loading.py real_models/SmolLM2-135M-Instruct --gguf real_models/SmolLM2-135M-Instruct.gguf

Each program has a process of its own. Counted are resident bytes beyond those of its imports, mapped files among them.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import report
import torch
import typer
from specdec import SpeculativeDecoder, load_embedded_pair, load_model
from transformers import AutoModelForCausalLM
from weights import KINDS, PACKED, rewritten

NEW = 16  # tokens, which read all weights
PROMPT = [*range(5, 37)]

Program = Callable[[str], Callable[[], object]]  # loads, and returns what decodes


def decoding(model: Any) -> Callable[[], object]:
    return lambda: SpeculativeDecoder(model, None, 0).generate([PROMPT], max_new_tokens=NEW, eos_token_id=[])


def specdec(path: str) -> Callable[[], object]:
    return decoding(load_model(path))


def specdec_rounds(path: str) -> Callable[[], object]:
    return decoding(load_model(path, bits=8))


def transformers(path: str) -> Callable[[], object]:
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype="auto", use_safetensors=True, trust_remote_code=False)
    return lambda: model.generate(torch.tensor([PROMPT]), max_new_tokens=NEW, do_sample=False, pad_token_id=0)


def llama_cpp(path: str) -> Callable[[], object]:
    from llama_cpp import Llama

    llama = Llama(path, n_ctx=256, verbose=False)
    return lambda: [token for token, _ in zip(llama.generate(PROMPT, temp=0.0), range(NEW), strict=False)]


PROGRAMS = {"specdec": specdec, "specdec, bits=8": specdec_rounds, "transformers": transformers, "llama.cpp": llama_cpp}


def resident(name: str) -> int:
    """Bytes, of this process: VmRSS, those of now; VmHWM, the most since the peak was reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def measured(program: str, path: str, threads: int) -> dict[str, int]:
    torch.set_num_threads(threads)
    decoding(load_embedded_pair()[0])()  # what is imported late, and buffers of threads
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = resident("VmRSS")
    decode = PROGRAMS[program](path)
    found = {"loaded": resident("VmRSS") - before, "peak_while_loading": resident("VmHWM") - before}
    decode()
    return found | {"decoded": resident("VmRSS") - before, "peak": resident("VmHWM") - before}


def main(
    folder: Annotated[Path, typer.Argument(help="of the model, in transformers' format and float32")],
    gguf: Annotated[Path, typer.Option(help="the file that the folder was made of")],
    threads: report.Threads = None,
    quick: report.Quick = False,
    json_path: report.JsonPath = None,
) -> None:
    results = report.Report("loading", torch.device("cpu"), json_path, threads, quick=quick, target=folder.name)
    rows = list[dict[str, object]]()
    with tempfile.TemporaryDirectory() as made:
        half = Path(made, "bfloat16")
        AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.bfloat16, use_safetensors=True, trust_remote_code=False
        ).save_pretrained(half)
        whole = ("specdec", "transformers")
        cases = [("float32", folder, (*whole, "specdec, bits=8")), ("bfloat16", half, whole)]
        if importlib.util.find_spec("llama_cpp") is not None:
            packed = ("specdec", "llama.cpp")
        else:
            packed = ("specdec",)
        cases += [(f"GGUF, {kind}", rewritten(gguf, KINDS[kind], Path(made)), packed) for kind in PACKED]
        if quick:
            cases = [(kind, path, programs[:1]) for kind, path, programs in (cases[0], cases[-1])]
        for kind, path, programs in cases:
            size = sum(file.stat().st_size for file in (path.glob("*.safetensors") if path.is_dir() else [path]))
            for program in programs:
                with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
                    found = process.submit(measured, program, str(path), torch.get_num_threads()).result()
                rows.append({"weights": kind, "program": program, "bytes": size, **found})
                results.add(rows[-1])
    results.show(folder.name, rows, ("weights", "program", "bytes", "loaded", "peak_while_loading", "decoded", "peak"))
    results.finish()


if __name__ == "__main__":
    typer.run(main)
