"""What rounding a model's weights costs: perplexity of held-out text by weights of float32 and in blocks of few bits,
and by llama.cpp with the same blocks, where it is installed (``pip install llama-cpp-python gguf``).

    python bench/perplexity.py real_models/SmolLM2-135M-Instruct --gguf real_models/SmolLM2-135M-Instruct.gguf

The text is the docstrings of Python's standard library, in windows of 512 tokens, of which all but the first are
predicted. For llama.cpp the GGUF file that the folder was made of is written anew in Q8_0.
"""

from __future__ import annotations

import ast
import math
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import report
import torch
import typer
from specdec.models.exchanged.linear import with_native_linear
from specdec.models.load.loading import load_tokenizer
from weights import KINDS, PACKED, rewritten, stored

WINDOW = 512
OWN = ("float32", "8 bits", "4 bits")
LLAMA = "llama.cpp, Q8_0"

Logits = Callable[[list[int]], torch.Tensor]  # of all tokens of a window, [n, V]


def docstrings() -> str:
    folder = Path(sysconfig.get_paths()["stdlib"])
    found = list[str]()
    for file in sorted(folder.glob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        documented = [node for node in ast.walk(tree) if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef)]
        found += [text for node in documented if (text := ast.get_docstring(node)) is not None and len(text) > 400]
    return "\n\n".join(found)


def own(folder: str, kind: str) -> Logits:
    fast = with_native_linear(stored(folder, kind))
    return lambda tokens: fast(torch.tensor([tokens]), use_cache=False).logits[0]


def llama_cpp(path: Path, threads: int) -> Logits:
    from llama_cpp import Llama

    llama = Llama(str(path), n_ctx=WINDOW, n_threads=threads, n_threads_batch=threads, logits_all=True, verbose=False)

    def logits(tokens: list[int]) -> torch.Tensor:
        llama.reset()
        llama.eval(tokens)
        return torch.from_numpy(llama.scores[: len(tokens)])

    return logits


@torch.inference_mode()
def perplexity(logits: Logits, tokens: list[int]) -> float:
    losses = list[torch.Tensor]()
    for first in range(0, len(tokens) - WINDOW + 1, WINDOW):
        window = tokens[first : first + WINDOW]
        losses.append(torch.nn.functional.cross_entropy(logits(window)[:-1].float(), torch.tensor(window[1:])))
    return math.exp(sum(loss.item() for loss in losses) / len(losses))


def main(
    folder: Annotated[str, typer.Argument(help="of the model, in transformers' format")],
    gguf: Annotated[Path | None, typer.Option(help="the file that the folder was made of, for llama.cpp")] = None,
    tokens: Annotated[int, typer.Option(min=WINDOW, help="of the text")] = 20_480,
    threads: report.Threads = None,
    quick: report.Quick = False,
    json_path: report.JsonPath = None,
) -> None:
    count = WINDOW if quick else tokens // WINDOW * WINDOW
    text = load_tokenizer("folder", folder)(docstrings()).input_ids[:count]
    results = report.Report(
        "perplexity", torch.device("cpu"), json_path, threads, quick=quick, target=Path(folder).name, tokens=len(text)
    )
    rows = list[dict[str, object]]()

    def add(name: str, logits: Logits) -> None:
        rows.append({"weights": name, "perplexity": perplexity(logits, text)})
        results.add(rows[-1])

    for kind in OWN:
        add(KINDS[kind] if kind in PACKED else kind, own(folder, kind))
    if gguf is not None:
        with tempfile.TemporaryDirectory() as made:
            add(LLAMA, llama_cpp(rewritten(gguf, "Q8_0", Path(made)), torch.get_num_threads()))
    results.show(Path(folder).name, rows, ("weights", "perplexity"))
    results.finish()


if __name__ == "__main__":
    typer.run(main)
