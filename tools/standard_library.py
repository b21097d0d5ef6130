"""The texts from which the embedded pair learns: the standard library of the Python that runs this.

    python tools/standard_library.py prompts.jsonl held_out.txt --prompts 9000

The first file has beginnings for the target to continue (specdec generate --batch-file), two in three greedily. None
has a prompt of the documents or of specdec compare in it, but for those of one word. The second file is for --held-out.
"""

from __future__ import annotations

import hashlib
import json
import sysconfig
from pathlib import Path
from typing import Annotated

import torch
import typer
from specdec import load_embedded_pair
from specdec.jobs.prompt_sets import prompt_set

# Tests, and tables of generated data.
SKIP = {"site-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
TOKENS = 64  # of a prompt
IN_DOCUMENTS = ("def fibonacci(n):", "def read(self", "class Stack:", "def add(a, b):", "for line in file:")


def corpus() -> tuple[list[str], list[str]]:
    """Training and held-out files, split by a hash of the path: the same for everyone, always."""
    root = Path(sysconfig.get_paths()["stdlib"])
    training, held_out = [], []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        if SKIP.intersection(name.parts):
            continue
        text = path.read_text(encoding="utf-8", errors="ignore")
        if text.strip():
            held = hashlib.sha256(name.as_posix().encode()).digest()[0] < 8  # 8 of 256: about 3 %
            (held_out if held else training).append(text)
    return training, held_out


def write_prompts(file: Path, texts: list[str], count: int, seed: int = 123) -> None:
    """Beginnings from anywhere in the texts, for a job of ``specdec generate``."""
    tokenizer = load_embedded_pair()[2]
    encoded = tokenizer(texts, add_special_tokens=False, verbose=False).input_ids
    text = torch.cat([torch.tensor(ids) for ids in encoded])
    chance = torch.Generator().manual_seed(seed)
    shown = (*IN_DOCUMENTS, *(each.prompt.strip() for each in prompt_set("code")))
    with file.open("w") as lines:
        for number in range(count):
            known = True
            while known:
                at = int(torch.randint(len(text) - TOKENS, (1,), generator=chance))
                prompt = tokenizer.decode(text[at : at + TOKENS].tolist())
                known = any(p in prompt for p in shown)
            line = {"prompt": prompt, "seed": number, "temperature": 1.0 if number % 3 == 2 else 0.0}
            lines.write(json.dumps(line) + "\n")


def main(
    prompts_file: Path,
    held_out_file: Path,
    prompts: Annotated[int, typer.Option(min=1)] = 9000,
    seed: int = 123,
) -> None:
    training, held_out = corpus()
    write_prompts(prompts_file, training, prompts, seed)
    held_out_file.write_text("".join(held_out))


if __name__ == "__main__":
    typer.run(main)
