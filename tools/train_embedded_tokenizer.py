"""Trains the tokenizer of the embedded pair on the standard library of the Python that runs this.

python tools/train_embedded_tokenizer.py FOLDER
"""

from __future__ import annotations

import hashlib
import sysconfig
from pathlib import Path

import typer
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from train_embedded_target import VOCABULARY
from transformers import PreTrainedTokenizerFast

EOS, PAD = "<|endoftext|>", "<|pad|>"
# A line break and the indentation after it are one piece: an identifier is the same token anywhere.
PIECES = Regex(r" ?[^\W\d]+| ?\d{1,3}| ?[^\s\w]+|\n+[ \t]*|\s+(?!\S)|\s+")
# Tests, and tables of generated data.
SKIP = {"site-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}


def standard_library() -> list[str]:
    """Its files, but for about 3 % by a hash of the path, which were held out when this was made."""
    root = Path(sysconfig.get_paths()["stdlib"])
    texts = []
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root)
        text = path.read_text(encoding="utf-8", errors="ignore")
        held = hashlib.sha256(name.as_posix().encode()).digest()[0] < 8
        if text.strip() and not held and not SKIP.intersection(name.parts):
            texts.append(text)
    return texts


def make_tokenizer(texts: list[str], folder: Path) -> None:
    """A byte-level BPE: every text can be encoded, and decodes to itself."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(PIECES, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),  # bytes that the corpus lacks, too
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    whole = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=EOS,
        eos_token=EOS,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
    )
    whole.save_pretrained(folder)


def main(folder: Path) -> None:
    make_tokenizer(standard_library(), folder)


if __name__ == "__main__":
    typer.run(main)
