"""Trains the small pair that ships in specdec/embedded on the source of the Python that runs this.

    python tools/train_embedded_pair.py              # trains; run it again to resume
    python tools/train_embedded_pair.py --evaluate   # measures the files that were saved

The target learns the standard library. The draft learns what the target thinks of each next token:
first on the corpus, from the logits that the target's own training step has computed anyway, then
on text that the target wrote, because that is where a draft has to agree with its target.

On Linux MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=17179869184 in the environment saves about a
tenth of the time on a CPU: memory for the logits is then kept, not returned and faulted in again.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from evaluate_embedded_pair import evaluate
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from safetensors import safe_open
from safetensors.torch import save_file
from standard_library import corpus
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoTokenizer,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

EOS, PAD, VOCABULARY = "<|endoftext|>", "<|pad|>", 4096
# A line break and the indentation after it are one piece: an identifier is the same token anywhere.
PIECES = Regex(r" ?[^\W\d]+| ?\d{1,3}| ?[^\s\w]+|\n+[ \t]*|\s+(?!\S)|\s+")
# Deep and narrow: on a CPU the forward of a small model costs time per layer, so five tokens cost
# little more than one, and two layers cost an eighth. One could not look up what followed a token.
TARGET_LAYERS, DRAFT_LAYERS = 16, 2
TARGET = dict(hidden_size=224, intermediate_size=576, num_attention_heads=4, num_key_value_heads=2)
DRAFT = dict(hidden_size=128, intermediate_size=384, num_attention_heads=2, num_key_value_heads=2)
PROMPT, NEW = 64, 192  # tokens, for the text that the target writes

console = Console()


# ---- data ----------------------------------------------------------------------------------------


def make_tokenizer(texts: list[str], folder: Path) -> PreTrainedTokenizerFast:
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
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=EOS,
        eos_token=EOS,
        pad_token=PAD,
        clean_up_tokenization_spaces=False,
    )
    fast.save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)


def encode(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> list[torch.Tensor]:
    """One tensor a file, which ends with the end-of-text token."""
    ids = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    return [torch.tensor([*file, tokenizer.eos_token_id]) for file in ids]


def batches(files: list[torch.Tensor], size: int, length: int, seed: int, first: int) -> Iterator[torch.Tensor]:
    """Packed batches without end, from number ``first`` on.

    Their order depends on the seed alone, so a resumed run sees what an uninterrupted one sees.
    """
    epoch = 0
    while True:
        shuffle = torch.Generator().manual_seed(seed * 1000 + epoch)
        text = torch.cat([files[i] for i in torch.randperm(len(files), generator=shuffle).tolist()])
        blocks = text[: len(text) // length * length].view(-1, length)
        blocks = blocks[torch.randperm(len(blocks), generator=shuffle)]
        whole = len(blocks) // size
        for i in range(first, whole):
            yield blocks[i * size : (i + 1) * size]
        first, epoch = max(0, first - whole), epoch + 1


# ---- models --------------------------------------------------------------------------------------


def make_model(layers: int, shape: dict[str, int]) -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        num_hidden_layers=layers,
        head_dim=64,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=1,
        **shape,
    )
    return LlamaForCausalLM(config)


def deepen(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """Twice the layers, the same function: each is followed by a copy that contributes zero.

    A shallow model sees more tokens in the same time, and the copies have features to start from.
    """
    grown = make_model(2 * model.config.num_hidden_layers, TARGET).to(model.device)
    grown.model.embed_tokens.load_state_dict(model.model.embed_tokens.state_dict())
    grown.model.norm.load_state_dict(model.model.norm.state_dict())
    for i, layer in enumerate(grown.model.layers):
        layer.load_state_dict(model.model.layers[i // 2].state_dict())
        if i % 2:
            torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
            torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    return grown


@torch.no_grad()
def write(
    model: LlamaForCausalLM, prompts: torch.Tensor, new: int, chance: torch.Generator | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Continues the prompts by ``new`` tokens: greedily, or the second half of them by sampling.

    Returns the whole texts, and the logits at every place but the last.
    """
    cache, text, logits = DynamicCache(), prompts, []
    half = len(prompts) // 2
    for _ in range(new):
        unread = text[:, -1:] if logits else text
        logits.append(model(input_ids=unread, past_key_values=cache).logits)
        step = logits[-1][:, -1]
        chosen = step.argmax(-1)
        if chance:
            sampled = torch.multinomial(step[half:].softmax(-1), 1, generator=chance)
            chosen[half:] = sampled[:, 0]
        text = torch.cat([text, chosen[:, None]], dim=1)
    return text, torch.cat(logits, dim=1)


# ---- training ------------------------------------------------------------------------------------


class Trainer:
    """Both models, their optimisers, and how far they are: all that a checkpoint holds."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        torch.manual_seed(args.seed)
        # born: the step at which the target's optimiser was new; its rate warms up from there.
        self.state = {"stage": "corpus", "step": 0, "seconds": 0.0, "born": 0, "seed": args.seed}
        self.state["layers"] = TARGET_LAYERS // 2
        saved = None
        if args.checkpoint.exists():
            saved = safe_open(args.checkpoint, "pt", device=args.device)
            self.state = json.loads(saved.metadata()["state"])
            if self.state["seed"] != args.seed:
                raise SystemExit(f"{args.checkpoint} was begun with --seed {self.state['seed']}")
            console.print(f"resuming: {self.state}")
        self.target = make_model(self.state["layers"], TARGET).to(args.device)
        self.draft = make_model(DRAFT_LAYERS, DRAFT).to(args.device)
        self.optimisers = {"target": self.adam(self.target), "draft": self.adam(self.draft)}
        if saved:
            with torch.no_grad():
                for key in saved.keys():
                    self.restore(key, saved.get_tensor(key))

    def adam(self, model: LlamaForCausalLM) -> torch.optim.AdamW:
        parameters = model.parameters()
        return torch.optim.AdamW(parameters, betas=(0.9, 0.98), weight_decay=0.1, fused=True)

    def restore(self, key: str, value: torch.Tensor) -> None:
        which, kind, name = key.split("/")
        parameter = dict(getattr(self, which).named_parameters())[name]
        if kind == "weight":
            parameter.copy_(value)
        else:
            self.optimisers[which].state[parameter][kind] = value

    def save(self) -> None:
        """One safetensors file, the state as JSON in its header: one rename replaces it all."""
        tensors = {}
        for which, optimiser in self.optimisers.items():
            for name, parameter in getattr(self, which).named_parameters():
                tensors[f"{which}/weight/{name}"] = parameter.data.contiguous()
                for kind, value in optimiser.state.get(parameter, {}).items():
                    tensors[f"{which}/{kind}/{name}"] = value.contiguous()
        new = self.args.checkpoint.with_suffix(".new")
        save_file(tensors, new, {"state": json.dumps(self.state)})
        os.replace(new, self.args.checkpoint)

    def update(self, which: str, loss: torch.Tensor, rate: float) -> None:
        optimiser = self.optimisers[which]
        for group in optimiser.param_groups:
            group["lr"] = rate
        loss.backward()
        torch.nn.utils.clip_grad_norm_(getattr(self, which).parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad()

    def done(self, minutes: float, steps: int | None) -> float:
        """How much of the stage is over, from 0 to 1."""
        if steps:
            return min(1.0, self.state["step"] / steps)
        return min(1.0, self.state["seconds"] / (60 * minutes))

    def imitate(self, tokens: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """The divergence of the draft from the target's logits ``wanted``, in nats per token."""
        ours = self.draft(input_ids=tokens, use_cache=False).logits.flatten(0, 1).log_softmax(-1)
        theirs = wanted.flatten(0, 1).log_softmax(-1)
        return F.kl_div(ours, theirs, reduction="batchmean", log_target=True)

    def learn_corpus(self, files: list[torch.Tensor]) -> None:
        args, state = self.args, self.state
        data = batches(files, args.batch, args.length, args.seed, state["step"])
        with Bar("corpus", state) as bar:
            while (done := self.done(args.minutes, args.steps)) < 1:
                start = time.perf_counter()
                if done >= args.grow_at and state["layers"] < TARGET_LAYERS:
                    self.target = deepen(self.target)
                    self.optimisers["target"] = self.adam(self.target)
                    state.update(layers=TARGET_LAYERS, born=state["step"])
                fall = 0.5 + 0.5 * math.cos(math.pi * done)
                warm = min(1.0, (state["step"] - state["born"] + 1) / 100)
                tokens = next(data).to(args.device)
                logits = self.target(input_ids=tokens, use_cache=False).logits
                loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
                self.update("target", loss, args.rate * max(fall, 0.02) * warm)
                distance = self.imitate(tokens, logits.detach())
                # The draft has a second stage: its rate falls to a third here, to zero there.
                warm = min(1.0, (state["step"] + 1) / 100)
                self.update("draft", distance, args.draft_rate * (1 + 2 * fall) / 3 * warm)
                bar.step(time.perf_counter() - start, tokens.numel(), target=loss, draft=distance)
                if state["step"] % 200 == 0:
                    self.save()
        # The draft's last lessons come from the target as it ships.
        self.target.to(torch.bfloat16).to(torch.float32)
        state.update(stage="own", step=0, seconds=0.0)
        self.save()

    def learn_own_text(self, files: list[torch.Tensor]) -> None:
        args, state = self.args, self.state
        text = torch.cat(files)
        with Bar("own text", state) as bar:
            while (done := self.done(args.own_minutes, args.own_steps)) < 1:
                start = time.perf_counter()
                # Seeded by the step, so that a resumed run writes the same texts.
                chance = torch.Generator(args.device)
                chance.manual_seed(args.seed * 1_000_000 + state["step"])
                at = torch.randint(len(text) - PROMPT, (args.own_batch,), generator=chance, device=args.device)
                prompts = torch.stack([text[i : i + PROMPT] for i in at.tolist()]).to(args.device)
                tokens, logits = write(self.target, prompts, NEW, chance)
                for _ in range(2):  # writing costs far more than learning: read everything twice
                    order = torch.randperm(len(tokens), generator=chance, device=args.device)
                    for part in order.split(8):
                        fall = max(0.02, 0.5 + 0.5 * math.cos(math.pi * done))
                        distance = self.imitate(tokens[part, :-1], logits[part])
                        self.update("draft", distance, args.draft_rate / 3 * fall)
                bar.step(time.perf_counter() - start, tokens.numel(), draft=distance)
                if state["step"] % 10 == 0:
                    self.save()
        state["stage"] = "done"
        self.save()

    def ship(self, out: Path) -> None:
        for which in ("target", "draft"):
            getattr(self, which).to(torch.bfloat16).save_pretrained(out / which)


class Bar(Progress):
    """A progress bar with losses and throughput; it counts the stage's steps and seconds, too."""

    def __init__(self, name: str, state: dict) -> None:
        text, note = TextColumn("{task.description}"), TextColumn("{task.fields[note]}")
        super().__init__(text, BarColumn(None), note, TimeElapsedColumn(), console=console)
        self.state, self.means = state, {}
        self.task = self.add_task(name, total=None, note="")

    def step(self, seconds: float, tokens: int, **losses: torch.Tensor) -> None:
        self.state["step"] += 1
        self.state["seconds"] += seconds
        values = {"tokens/s": tokens / seconds, **{name: x.item() for name, x in losses.items()}}
        for name, value in values.items():
            self.means[name] = 0.98 * self.means.get(name, value) + 0.02 * value
        means = " ".join(f"{name} {value:.4g}" for name, value in self.means.items())
        note = f"step {self.state['step']} {means}"
        self.update(self.task, note=note)
        if not console.is_terminal and self.state["step"] % 20 == 0:
            console.print(f"{self.state['seconds']:.0f} s, {note}")  # a log file shows no bar


def main() -> None:
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    package = Path(__file__).resolve().parents[1] / "python" / "specdec" / "embedded"
    add = parser.add_argument
    add("--out", type=Path, default=package, help="folder for target, draft and tokenizer")
    add("--checkpoint", type=Path, default=Path("embedded_pair.safetensors"), help="resumed from")
    add("--minutes", type=float, default=25, help="time for the corpus")
    add("--own-minutes", type=float, default=27, help="time for the target's own text")
    add("--steps", type=int, help="steps on the corpus, instead of --minutes")
    add("--own-steps", type=int, help="steps on the target's own text, instead of --own-minutes")
    add("--grow-at", type=float, default=0.55, help="part of the corpus stage before more layers")
    add("--batch", type=int, default=4, help="texts in a step on the corpus")
    add("--length", type=int, default=512, help="tokens in such a text")
    add("--own-batch", type=int, default=64, help="texts that the target writes in a step")
    add("--rate", type=float, default=2e-3, help="peak learning rate of the target")
    add("--draft-rate", type=float, default=3e-3, help="peak learning rate of the draft")
    add("--device", default="cpu")
    add("--threads", type=int, default=os.cpu_count(), help="threads on the CPU")
    add("--seed", type=int, default=0)
    add("--evaluate", action="store_true", help="measure what --out holds")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    training, held_out = corpus()
    if args.evaluate:
        return evaluate(args.out, held_out, args.device, args.seed)
    tokenizer = make_tokenizer(training, args.out / "tokenizer")
    files = encode(tokenizer, training)
    tokens = sum(map(len, files))
    console.print(f"{len(files)} files of {tokens} tokens; {len(held_out)} files held out")
    trainer = Trainer(args)
    if trainer.state["stage"] == "corpus":
        trainer.learn_corpus(files)
    if trainer.state["stage"] == "own":
        trainer.learn_own_text(files)
    trainer.ship(args.out)


if __name__ == "__main__":
    main()
