"""What the embedded target writes after the beginnings of 50 functions that it never saw; whether it repeats itself.

    python tools/embedded_texts.py                      # counts, and prints ten of the texts
    python tools/embedded_texts.py --target FOLDER --show 0

A text repeats itself if three lines of it, one after the other, or twelve tokens occur twice in what was written.
"""

from __future__ import annotations

import ast
import random
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer
from embedded_corpus import corpus
from specdec.models.load.loading import load_model, load_tokenizer
from train_embedded_target import PACKAGE
from transformers import PreTrainedModel, PreTrainedTokenizerBase

FUNCTIONS, NEW = 50, 96
GRAM, LINES = 12, 3  # tokens, and lines, that are a repetition if they occur twice


def beginnings(texts: Sequence[str], count: int) -> list[str]:
    """The first lines, up to the colon, of functions at the left margin: one of a file, in a fixed random order."""
    found = []
    for text in texts:
        try:
            functions = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef)]
        except SyntaxError:
            continue  # of an older Python, or what is left of a template
        if functions:
            first = functions[len(text) % len(functions)]
            lines = text.splitlines()[first.lineno - 1 : first.body[0].lineno - 1]
            head = "\n".join(lines[: next((i for i, line in enumerate(lines) if line.endswith(":")), 0) + 1])
            if head.endswith(":"):
                found.append(head)
    random.Random(0).shuffle(found)
    return found[:count]


def occurs_twice(items: Sequence[Hashable], length: int) -> bool:
    """Whether ``length`` items in a row occur at two places."""
    runs = [tuple(items[i : i + length]) for i in range(len(items) - length + 1)]
    return len({*runs}) < len(runs)


def repeats(tokens: Sequence[int], text: str) -> bool:
    lines = [line for line in text.splitlines() if line.strip()]
    return occurs_twice(tokens, GRAM) or occurs_twice(lines, LINES)


@torch.inference_mode()
def write(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    """The greedy continuation."""
    ids = tokenizer(prompt, return_tensors="pt")
    return model.generate(**ids, max_new_tokens=NEW, do_sample=False)[0, ids.input_ids.shape[1] :].tolist()


def main(
    target: Annotated[Path, typer.Option(help="folder of the model")] = PACKAGE / "target",
    show: Annotated[int, typer.Option(min=0, help="texts to print")] = 10,
) -> None:
    tokenizer = load_tokenizer("tokenizer", PACKAGE / "tokenizer")
    model = load_model(target, "float32", name="--target")
    repeated = 0
    for number, prompt in enumerate(beginnings(corpus()[1], FUNCTIONS)):
        tokens = write(model, tokenizer, prompt)
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        again = repeats(tokens, text)
        repeated += again
        if number < show:
            print(f"--- {number + 1}{', which repeats itself' if again else ''}\n{prompt}{text}\n")
    print(f"{FUNCTIONS - repeated} of {FUNCTIONS} texts do not repeat themselves")


if __name__ == "__main__":
    typer.run(main)
