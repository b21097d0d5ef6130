"""Trains small heads for the embedded target: Medusa, EAGLE-3 and DFlash.

    python tools/train_embedded_heads.py --out heads    # trains; run it again to resume
    specdec generate "def read(self):" --drafter heads/eagle3

Half of the texts are from the corpus of standard_library.py, half are the target's own. It is what `specdec
train-heads` does, with the settings of the heads that come with the package.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
from pathlib import Path

import torch
from specdec.models.loading import load_embedded_pair
from specdec.training.distill import read_loss, read_text
from specdec.training.head_settings import HeadSettings
from specdec.training.model_card import Card
from specdec.training.settings import DistillSettings, TrainSettings
from specdec.training.texts import Corpus
from specdec.training.train_heads import train_head
from specdec.training.trainer import Watch
from standard_library import corpus
from train_embedded_pair import console

# What each kind has of its own.
KINDS = {"medusa": {"depth": 3}, "eagle3": {"depth": 4}, "dflash": {"depth": 7, "layers": 2}}
KEPT = 2048  # tokens of EAGLE-3's vocabulary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, required=True, help="folder for the heads")
    add("--kinds", nargs="+", choices=KINDS, default=[*KINDS])
    add("--steps", type=int, default=1200)
    add("--batch", type=int, default=4, help="texts in a step")
    add("--length", type=int, default=256, help="tokens in a text")
    add("--rate", type=float, default=1.5e-3, help="peak learning rate")
    add("--threads", type=int, default=os.cpu_count(), help="threads on the CPU")
    add("--bfloat16", action="store_true", help="matrices of the heads, where the CPU multiplies bfloat16 faster")
    add("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    target, _, tokenizer = load_embedded_pair()
    training, held_out = corpus()
    texts, card = Corpus(training, held_out, 0, 0), Card("specdec-embedded-target", data="CPython's standard library")
    precision = "bf16" if args.bfloat16 else "no"
    train = TrainSettings(read_loss("forward_kl"), args.steps, args.rate, 50, precision, every=100, seed=args.seed)
    run = DistillSettings(train, read_text("data,target"), args.batch, args.length, prompt=64)
    for kind in args.kinds:

        def told(done: int, total: int, what: str, kind: str = kind) -> None:
            if done % 10 == 0:
                console.print(f"{kind}: {done} of {total}, {what}")

        own = dataclasses.replace(run, vocabulary=KEPT if kind == "eagle3" else 0)
        settings = HeadSettings(kind, own, **KINDS[kind])
        head = train_head(target, tokenizer, texts, settings, args.out / kind, card, Watch(told))
        console.print(f"{kind}: {head}")


if __name__ == "__main__":
    main()
