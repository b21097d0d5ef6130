"""What a step of several tokens takes on a CPU, in units of a step of one: it says how many drafts are worth their
verification. Beside llama.cpp's batch of as many tokens, where it is installed (``pip install llama-cpp-python``).

    python bench/bench_widths.py real_models/SmolLM2-135M-Instruct.gguf

The weights of the file are written anew in each kind, which both read. All widths of a kind take turns. ``floor`` is
the time in which as many bytes as its weights have are summed.
"""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import report
import torch
import typer
from bench_cpu_step import STORED, step_of
from measure import all_timed, ratios, summary
from specdec.models.exchanged.huge_pages import move_to_huge_pages
from specdec.models.forward.cached_model import CachedModel
from specdec.models.load.loading import load_model
from torch import nn
from weights import KINDS, rewritten

LLAMA = "llama.cpp"
AFTER = "after the floor"  # a step that does not count: PyTorch's threads still spin, and keep a core from it


def llama_step(llama: Any, width: int) -> Callable[[int], object]:
    def step(_: int) -> None:
        llama.n_tokens = STORED  # ``eval`` removes the others from the cache
        llama.eval([7] * width)

    return step


def load_llama(file: Path, threads: int) -> Any:
    from llama_cpp import Llama

    settings: dict[str, Any] = {"n_ctx": 2 * STORED, "n_threads": threads, "n_threads_batch": threads}
    llama = Llama(str(file), logits_all=True, verbose=False, **settings)
    llama.eval([5] * STORED)
    return llama


def main(
    gguf: Annotated[Path, typer.Argument(help="of a model that llama.cpp knows, too")],
    kinds: Annotated[str, typer.Option(help="of the weights, separated by commas")] = ",".join(KINDS),
    tokens: Annotated[str, typer.Option(help="of a step")] = "1,2,3,4,5,7,9",
    seconds: Annotated[float, typer.Option(min=0, help="of each width")] = 5.0,
    threads: report.Threads = None,
    quick: report.Quick = False,
    json_path: report.JsonPath = None,
) -> None:
    device, widths = torch.device("cpu"), report.read_integers("tokens", tokens)
    seconds, widths = (0.05, [1, 3]) if quick else (seconds, sorted({1, *widths}))
    results = report.Report("widths", device, json_path, threads, quick=quick, target=gguf.name, stored=STORED)
    rows = list[dict[str, object]]()
    for kind in report.read_names("kinds", kinds, KINDS):
        with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
            file = rewritten(gguf, KINDS[kind], Path(folder))
            cached = CachedModel(load_model(file))
            layers = {id(m.weight): m.weight for m in cached.model.modules() if isinstance(m, nn.Linear)}
            size = sum(weight.nbytes for weight in layers.values())
            move_to_huge_pages([buffer := torch.rand(size // 4)])
            ways: dict[str, Callable[[int], object]] = {"floor": lambda _, buffer=buffer: buffer.sum()}
            ways[AFTER] = step_of(cached, 1)
            ways |= {f"{width}": step_of(cached, width) for width in widths}
            if importlib.util.find_spec("llama_cpp") is not None:
                llama = load_llama(file, torch.get_num_threads())
                ways |= {f"{LLAMA} {width}": llama_step(llama, width) for width in widths}
            _, samples = all_timed(ways, device, seconds * len(ways))
            for width in widths:
                mine = samples[f"{width}"]
                row: dict[str, object] = {"weights": kind, "tokens": width, "bytes": size, "step": summary(mine)}
                row |= {"of_one": ratios(mine, samples["1"]), "step/floor": ratios(mine, samples["floor"])}
                if (theirs := samples.get(f"{LLAMA} {width}")) is not None:
                    row |= {"llama.cpp": summary(theirs), "llama.cpp_of_one": ratios(theirs, samples[f"{LLAMA} 1"])}
                    row["step/llama.cpp"] = ratios(mine, theirs)
                rows.append(row)
                results.add(row)
    others = ("llama.cpp", "llama.cpp_of_one", "step/llama.cpp")
    results.show(gguf.name, rows, ("weights", "tokens", "step", "of_one", "step/floor", *others))
    results.finish()


if __name__ == "__main__":
    typer.run(main)
