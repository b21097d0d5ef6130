"""Trains small heads for the embedded target: Medusa, EAGLE-3 and DFlash.

    python tools/train_embedded_heads.py --out heads    # trains; run it again to resume
    specdec generate "def read(self):" --drafter heads/eagle3

All three learn from the same lessons: a text, the target's hidden states in it, and its distribution of every next
token. Half of the texts are from the corpus of train_embedded_pair.py, half are the target's own. The files have the
layouts in which such heads are published.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from pathlib import Path

import torch
from heads.dflash import Dflash
from heads.eagle3 import Eagle3
from heads.layers import Lesson
from heads.medusa import Medusa
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from train_embedded_pair import PROMPT, Bar, batches, console, corpus, encode, write
from transformers import AutoModelForCausalLM, AutoTokenizer

PACKAGE = Path(__file__).resolve().parents[1] / "python" / "specdec" / "embedded"
KINDS = {"medusa": Medusa, "eagle3": Eagle3, "dflash": Dflash}
KEPT = 2048  # tokens of EAGLE-3's vocabulary


class Trainer:
    """The heads, their optimisers, and how far they are: all that a checkpoint holds."""

    def __init__(self, args: argparse.Namespace, target: nn.Module, files: list[Tensor]) -> None:
        self.args, self.target, self.text = args, target, torch.cat(files)
        torch.manual_seed(args.seed)
        self.state = {"step": 0, "seconds": 0.0, "seed": args.seed}
        counts = torch.bincount(self.text, minlength=target.config.vocab_size)
        kept = counts.argsort(descending=True, stable=True)[:KEPT].sort().values
        self.embedding = target.get_input_embeddings().weight.detach()
        self.heads = nn.ModuleDict({kind: make(target.config, self.embedding, kept) for kind, make in KINDS.items()})
        self.optimiser = torch.optim.AdamW(self.heads.parameters(), betas=(0.9, 0.98), weight_decay=0.05, fused=True)
        if args.checkpoint.exists():
            self.load()

    def load(self) -> None:
        with safe_open(self.args.checkpoint, "pt") as saved:
            self.state = json.loads(saved.metadata()["state"])
            if self.state["seed"] != self.args.seed:
                raise SystemExit(f"{self.args.checkpoint} was begun with --seed {self.state['seed']}")
            parameters = dict(self.heads.named_parameters())
            with torch.no_grad():
                for key in saved.keys():
                    kind, name = key.split("/")
                    if kind == "weight":
                        parameters[name].copy_(saved.get_tensor(key))
                    else:
                        self.optimiser.state[parameters[name]][kind] = saved.get_tensor(key)
        console.print(f"resuming: {self.state}")

    def save(self) -> None:
        """One safetensors file, the state as JSON in its header: one rename replaces it all."""
        tensors = {}
        for name, parameter in self.heads.named_parameters():
            tensors[f"weight/{name}"] = parameter.data.contiguous()
            for kind, value in self.optimiser.state.get(parameter, {}).items():
                tensors[f"{kind}/{name}"] = value.contiguous()
        new = self.args.checkpoint.with_suffix(".new")
        save_file(tensors, new, {"state": json.dumps(self.state)})
        os.replace(new, self.args.checkpoint)

    @torch.no_grad()
    def lesson(self, tokens: Tensor) -> Lesson:
        told = self.target(input_ids=tokens, use_cache=False, output_hidden_states=True)
        return Lesson(tokens, told.hidden_states, told.logits, self.embedding)

    def own_text(self, chance: torch.Generator) -> Tensor:
        """Texts that the target writes, the first half of them greedily."""
        args = self.args
        at = torch.randint(len(self.text) - PROMPT, (args.own_batch,), generator=chance)
        prompts = torch.stack([self.text[i : i + PROMPT] for i in at.tolist()])
        return write(self.target, prompts, args.length - PROMPT, chance)[0]

    def learn(self, files: list[Tensor]) -> None:
        args, state = self.args, self.state
        step = state["step"]
        lessons = batches(files, args.batch, args.length, args.seed, step)
        own: list[Tensor] = []
        with Bar("heads", state) as bar:
            while state["step"] < args.steps:
                start, step = time.perf_counter(), state["step"]
                # Seeded by the step, so that a resumed run has the same lessons.
                chance = torch.Generator().manual_seed(args.seed * 1_000_000 + step)
                tokens = next(lessons)
                if step % 2:
                    if not own:
                        begun = step - step % args.own_every
                        texts = torch.Generator().manual_seed(args.seed * 1_000_000 + begun)
                        written = self.own_text(texts)
                        order = torch.randperm(len(written), generator=texts)
                        own = list(written[order].split(args.batch))[(step - begun) // 2 :]
                    tokens = own.pop(0)
                lesson = self.lesson(tokens)
                means = {}
                for kind, head in self.heads.items():
                    with torch.autocast("cpu", torch.bfloat16, enabled=args.bfloat16):
                        loss, hits = head.learn(lesson, chance)
                    loss.backward()
                    means |= {f"{kind} {i + 1}": torch.tensor(hit) for i, hit in enumerate(hits[:4])}
                warm, fall = min(1.0, (step + 1) / 50), 0.5 + 0.5 * math.cos(math.pi * step / args.steps)
                for group in self.optimiser.param_groups:
                    group["lr"] = args.rate * warm * max(fall, 0.02)
                for head in self.heads.values():
                    torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
                self.optimiser.step()
                self.optimiser.zero_grad()
                bar.step(time.perf_counter() - start, tokens.numel(), **means)
                if state["step"] % 50 == 0:
                    self.save()
        self.save()

    def ship(self, out: Path) -> None:
        for kind, head in self.heads.items():
            folder = out / kind
            folder.mkdir(parents=True, exist_ok=True)
            tensors = {name: t.to(torch.bfloat16) if t.is_floating_point() else t for name, t in head.tensors().items()}
            save_file({name: t.contiguous() for name, t in tensors.items()}, folder / head.file, {"format": "pt"})
            config = {name: value for name, value in head.config().items() if name != "_name_or_path"}  # a folder here
            (folder / "config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--embedded", type=Path, default=PACKAGE, help="folder of target and tokenizer")
    add("--out", type=Path, required=True, help="folder for the heads")
    add("--checkpoint", type=Path, default=Path("embedded_heads.safetensors"), help="resumed from")
    add("--steps", type=int, default=1200)
    add("--batch", type=int, default=4, help="texts in a step")
    add("--length", type=int, default=256, help="tokens in a text")
    add("--own-batch", type=int, default=64, help="texts that the target writes at once")
    add("--rate", type=float, default=1.5e-3, help="peak learning rate")
    add("--threads", type=int, default=os.cpu_count(), help="threads on the CPU")
    add("--bfloat16", action="store_true", help="matrices of the heads, where the CPU multiplies bfloat16 faster")
    add("--seed", type=int, default=0)
    args = parser.parse_args()
    args.own_every = 2 * (args.own_batch // args.batch)  # steps until the target's texts are read
    torch.set_num_threads(args.threads)
    target = AutoModelForCausalLM.from_pretrained(
        args.embedded / "target", dtype=torch.float32, use_safetensors=True, trust_remote_code=False
    ).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.embedded / "tokenizer", trust_remote_code=False)
    files = encode(tokenizer, corpus()[0])
    trainer = Trainer(args, target, files)
    trainer.learn(files)
    trainer.ship(args.out)


if __name__ == "__main__":
    main()
