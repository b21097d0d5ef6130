"""Trains the target that ships in specdec/embedded on the corpus of embedded_corpus.py.

    python tools/train_embedded_target.py --minutes 90     # trains; run it again to resume
    python tools/train_embedded_target.py --anneal 20      # lets the rate fall to zero, and writes the model

The rate is constant until ``--anneal``, so a run can be prolonged by more ``--minutes`` at any time; annealing starts
from the checkpoint and leaves it as it is. The hidden matrices are trained by Muon (Jordan et al. 2024), embedding and
norms by AdamW. Half of the layers come after a part of the time: a shallow model sees more tokens in the same minutes.

On Linux MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=17179869184 in the environment saves about a tenth of the time on a
CPU: memory for the logits is then kept, not returned and faulted in again.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

import numpy as np
import torch
from embedded_corpus import FOLDER, corpus
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

PACKAGE = Path(__file__).resolve().parents[1] / "python" / "specdec" / "embedded"
VOCABULARY = 4096
# Deep and narrow: on a CPU the forward of a small model costs time per layer, so five tokens cost little more than one.
LAYERS = 16
SHAPE = dict(hidden_size=224, intermediate_size=576, num_attention_heads=4, num_key_value_heads=2)


def encoded(name: str) -> torch.Tensor:
    """All training or held-out files as one row of tokens, in a fixed random order, each with its end.

    A file keeps it.
    """
    file = FOLDER / f"{name}.npy"
    if not file.exists():
        tokenizer = AutoTokenizer.from_pretrained(PACKAGE / "tokenizer", trust_remote_code=False)
        texts = corpus()[0 if name == "training" else 1]
        order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(0)).tolist()
        ids = tokenizer([texts[i] for i in order], add_special_tokens=False, verbose=False).input_ids
        np.save(file, np.concatenate([np.array([*row, tokenizer.eos_token_id], np.uint16) for row in ids]))
        print(f"{len(texts)} {name} files, {sum(len(t.encode()) for t in texts)} bytes", flush=True)
    return torch.from_numpy(np.load(file).astype(np.int64))


def make_model(layers: int) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        num_hidden_layers=layers,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=1,
        **SHAPE,
    )
    return LlamaForCausalLM(config)


def deepen(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """Twice the layers, the same function: each is followed by a copy that contributes zero.

    A shallow model sees more tokens in the same time, and the copies have features to start from.
    """
    grown = make_model(2 * model.config.num_hidden_layers)
    grown.model.embed_tokens.load_state_dict(model.model.embed_tokens.state_dict())
    grown.model.norm.load_state_dict(model.model.norm.state_dict())
    for i, layer in enumerate(grown.model.layers):
        layer.load_state_dict(model.model.layers[i // 2].state_dict())
        if i % 2:
            torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
            torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    return grown


class Trainer:
    """The model, its optimisers, and how far they are: all that a checkpoint holds."""

    def __init__(self, args: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.args = args
        # born: the step at which the optimisers were new; the rate warms up from there.
        self.state = {"step": 0, "seconds": 0.0, "born": 0, "layers": LAYERS // 2, "tokens": 0}
        if not args.checkpoint.exists():
            return self.start(make_model(self.state["layers"]))
        with safe_open(args.checkpoint, "pt") as saved:
            self.state = json.loads(saved.metadata()["state"])
            print(f"resuming: {self.state}", flush=True)
            self.start(make_model(self.state["layers"]))
            parameters = dict(self.model.named_parameters())
            with torch.no_grad():
                for key in saved.keys():
                    kind, name = key.split("/")
                    if kind == "weight":
                        parameters[name].copy_(saved.get_tensor(key))
                    else:
                        self.optimiser_of(parameters[name]).state[parameters[name]][kind] = saved.get_tensor(key)

    def start(self, model: LlamaForCausalLM) -> None:
        self.model = model.train()
        hidden = [p for p in model.model.layers.parameters() if p.ndim == 2]
        others = [p for p in model.parameters() if all(p is not h for h in hidden)]
        self.muon = torch.optim.Muon(hidden, weight_decay=0.05, adjust_lr_fn="match_rms_adamw")
        self.adam = torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.05, fused=True)
        self.forward = torch.compile(model) if self.args.compile else model

    def optimiser_of(self, parameter: torch.Tensor) -> torch.optim.Optimizer:
        return self.muon if any(parameter is p for p in self.muon.param_groups[0]["params"]) else self.adam

    def save(self) -> None:
        """One safetensors file, the state as JSON in its header: one rename replaces it all."""
        tensors = {}
        for name, parameter in self.model.named_parameters():
            tensors[f"weight/{name}"] = parameter.data.contiguous()
            for kind, value in self.optimiser_of(parameter).state.get(parameter, {}).items():
                tensors[f"{kind}/{name}"] = value.contiguous()
        new = self.args.checkpoint.with_suffix(".new")
        save_file(tensors, new, {"state": json.dumps(self.state)})
        os.replace(new, self.args.checkpoint)

    def batch(self, text: torch.Tensor) -> torch.Tensor:
        """The windows of this step: in order through a permutation of the text's windows, one for each epoch."""
        args, windows = self.args, len(text) // self.args.length
        first = self.state["step"] * args.batch
        shuffle = torch.Generator().manual_seed(first // windows)
        chosen = torch.randperm(windows, generator=shuffle)[torch.arange(first, first + args.batch) % windows]
        return torch.stack([text[i * args.length : (i + 1) * args.length] for i in chosen.tolist()])

    def step(self, text: torch.Tensor, scale: float) -> float:
        args, state, begun = self.args, self.state, time.perf_counter()
        warm = min(1.0, (state["step"] - state["born"] + 1) / 100)
        for optimiser, rate in ((self.muon, args.rate), (self.adam, args.embedding_rate)):
            for group in optimiser.param_groups:
                group["lr"] = rate * warm * scale
        tokens = self.batch(text)
        with torch.autocast("cpu", torch.bfloat16):
            loss = self.forward(input_ids=tokens, labels=tokens, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimiser in (self.muon, self.adam):
            optimiser.step()
            optimiser.zero_grad()
        state["step"] += 1
        state["tokens"] += tokens.numel()
        state["seconds"] += time.perf_counter() - begun
        return loss.item()

    def train(self, text: torch.Tensor) -> None:
        """At a constant rate, until ``--minutes`` are over; the layers double at ``--grow-at`` minutes."""
        args, state, mean = self.args, self.state, None
        while state["seconds"] < 60 * args.minutes:
            if state["layers"] < LAYERS and state["seconds"] >= 60 * args.grow_at:
                self.start(deepen(self.model))
                state.update(layers=LAYERS, born=state["step"])
            before = state["seconds"]
            loss = self.step(text, 1.0)
            mean = loss if mean is None else 0.98 * mean + 0.02 * loss
            if state["step"] % 20 == 0:
                speed = args.batch * args.length / (state["seconds"] - before)
                print(f"{state['seconds']:.0f} s, step {state['step']}: {mean:.3f}, {speed:.0f} tokens/s", flush=True)
            if state["step"] % 100 == 0:
                self.save()
        self.save()

    def anneal(self, text: torch.Tensor) -> None:
        end = self.state["seconds"] + 60 * self.args.anneal
        while (left := (end - self.state["seconds"]) / (60 * self.args.anneal)) > 0:
            loss = self.step(text, left)
            if self.state["step"] % 20 == 0:
                print(f"{left:.2f} of the rate, loss {loss:.3f}", flush=True)
        self.model.to(torch.bfloat16).save_pretrained(self.args.out)


@torch.inference_mode()
def bits_per_byte(model: LlamaForCausalLM, windows: int | None = None) -> tuple[float, float]:
    """Of held-out files, in windows of 512 tokens that do not overlap: nats per token, and bits per byte."""
    text = encoded("held_out")
    tokenizer = AutoTokenizer.from_pretrained(PACKAGE / "tokenizer", trust_remote_code=False)
    parts = text.split(512)[:windows]
    size = len("".join(tokenizer.batch_decode(parts, skip_special_tokens=True)).encode())
    total = count = 0.0
    for part in parts:
        logits = model(input_ids=part[None], use_cache=False).logits[0, :-1].float()
        total += torch.nn.functional.cross_entropy(logits, part[1:], reduction="sum").item()
        count += len(part) - 1
    nats = total / count
    return nats, nats * sum(map(len, parts)) / size / 0.693147


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--out", type=Path, default=PACKAGE / "target", help="folder for the model")
    add("--checkpoint", type=Path, default=FOLDER / "target.safetensors", help="resumed from")
    add("--minutes", type=float, default=0, help="of training in all, by the time of its steps")
    add("--anneal", type=float, default=0, help="minutes in which the rate falls to zero, after those of training")
    add("--grow-at", type=float, default=40, help="minutes after which the layers double")
    add("--batch", type=int, default=16, help="windows in a step")
    add("--length", type=int, default=512, help="tokens in a window")
    add("--rate", type=float, default=4e-3, help="learning rate of the hidden matrices")
    add("--embedding-rate", type=float, default=4e-3, help="learning rate of the embedding and the norms")
    add("--threads", type=int, default=os.cpu_count())
    add("--compile", action="store_true", help="with torch.compile: a sixth faster here")
    add("--evaluate", action="store_true", help="measure what --out holds")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.minutes or args.anneal:
        text = encoded("training")
        trainer = Trainer(args)
        trainer.train(text)
        if args.anneal:
            trainer.anneal(text)
    if args.evaluate:
        model = AutoModelForCausalLM.from_pretrained(
            args.out, dtype=torch.float32, use_safetensors=True, trust_remote_code=False
        )
        print("held out: {:.3f} nats per token, {:.3f} bits per byte".format(*bits_per_byte(model)))


if __name__ == "__main__":
    main()
