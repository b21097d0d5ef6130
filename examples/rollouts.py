"""Trains a model by policy gradients twice, with rollouts that draft and with plain ones: it is the same training.

python examples/rollouts.py [EPOCHS] [MODEL] [TEMPERATURE] [ROWS]

ROWS are the texts that are decoded at a time. A model with a chat template is asked to edit code and to extract facts:
its answers have much in common from epoch to epoch.
"""

import copy
import sys
import time
from dataclasses import dataclass

import torch
from specdec import Rollout, RolloutBatch, load_embedded_pair, load_model
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from specdec_kernels import SamplingParams

PROMPTS = ["class Stack:\n", "class Reader:\n    def read(self", "class Point:\n    x = 0\n", "class Timer:\n    def "]
TASKS = [
    "Rename `res` to `total`, and print the function:\n\ndef add(items):\n    res = 0\n    for item in items:\n"
    "        if item.price > 0:\n            res = res + item.price * item.count\n    return res",
    "List every person with their town, one a line:\n\nHelena Brandt came from Oldham, and Luis Ferreira from Tarlow. "
    "Amina Diallo and her husband Jonas live in Kirkby. Walter Nowak is from Oldham, too.",
]


@dataclass(frozen=True)
class Plan:
    """What is sampled in each epoch, and how much is learned from it."""

    prompts: list[list[int]]
    samples: int
    new_tokens: int
    rate: float
    temperature: float
    rows: int

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, temperature: float, rows: int) -> "Plan":
        if not tokenizer.chat_template:
            return cls(tokenizer(PROMPTS).input_ids, 8, 32, 5e-4, temperature, rows)
        asked = [[{"role": "user", "content": task}] for task in TASKS]
        texts = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
        return cls(tokenizer(texts, add_special_tokens=False).input_ids, 4, 64, 1e-5, temperature, rows)


def reward_of(text: str) -> float:
    """From 0 to 1: whether it has many lines, which are short then."""
    return min(text.count("\n"), 8) / 8


def learn(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer, batch: RolloutBatch, rewards: torch.Tensor, plan: Plan
) -> torch.Tensor:
    """One step of GRPO (arXiv 2402.03300) with as many updates as rollouts, so that nothing has to be clipped: a text
    counts by its reward, less the mean of the other samples of its prompt. Returns the trainer's log-probabilities."""
    groups = rewards.view(-1, plan.samples)
    advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).view(-1, 1)
    logits = model(batch.sequences, attention_mask=batch.attention_mask).logits
    log_probs = batch.log_probs_under(logits, plan.temperature)
    optimizer.zero_grad()
    (-(advantages * log_probs).sum() / batch.mask.sum()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return log_probs.detach()


def speed_of_transformers(model: PreTrainedModel, plan: Plan, pad: int) -> float:
    """Tokens/s of ``generate`` for as many texts, in batches of as many rows, padded on the left."""
    texts, tokens = [prompt for prompt in plan.prompts for _ in range(plan.samples)], 0
    settings = {"do_sample": True, "temperature": plan.temperature, "top_k": 0, "top_p": 1.0, "pad_token_id": pad}
    model.eval()
    start = time.perf_counter()
    for batch in (texts[i : i + plan.rows] for i in range(0, len(texts), plan.rows)):
        longest = max(map(len, batch))
        ids = torch.tensor([[pad] * (longest - len(prompt)) + prompt for prompt in batch])
        mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in batch])
        found = model.generate(ids, attention_mask=mask, max_new_tokens=plan.new_tokens, **settings)
        tokens += int((found[:, longest:] != pad).sum())  # an end that is the padding as well is not counted
    seconds = time.perf_counter() - start
    model.train()
    return tokens / seconds


def main(epochs: str = "5", folder: str | None = None, temperature: str = "1.0", rows: str = "16") -> None:
    if folder is None:
        model, _, tokenizer = load_embedded_pair()
    else:
        model = load_model(folder, dtype="float32")
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    plan, params = Plan.of(tokenizer, float(temperature), int(rows)), SamplingParams(temperature=float(temperature))
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    models = [model.train(), copy.deepcopy(model).train()]
    rollouts = [Rollout(models[0], rows=plan.rows), Rollout(models[1], num_drafts=0, rows=plan.rows)]
    optimizers = [torch.optim.Adam(each.parameters(), lr=plan.rate) for each in models]
    largest = 0.0
    print("epoch  reward  same without drafts  tau  tokens/s: drafts  plain  transformers  log-probabilities off by")
    for epoch in range(int(epochs)):
        found, speeds, batches = [], [], []
        for each, rollout, optimizer in zip(models, rollouts, optimizers, strict=True):
            start = time.perf_counter()
            batch = rollout(
                plan.prompts, samples=plan.samples, max_new_tokens=plan.new_tokens, params=params, seed=epoch
            )
            speeds.append(batch.stats.emitted / (time.perf_counter() - start))
            texts = [tokenizer.decode(row[mask]) for row, mask in zip(batch.tokens, batch.mask, strict=True)]
            rewards = torch.tensor([reward_of(text) for text in texts])
            off = (learn(each, optimizer, batch, rewards, plan) - batch.log_probs).abs().max()
            found.append(rewards)
            batches.append(batch)
            largest = max(largest, float(off))
        same = torch.equal(*found) and torch.equal(batches[0].tokens, batches[1].tokens)
        speeds.append(speed_of_transformers(model, plan, pad))
        reward, tau, shown = found[0].mean(), batches[0].stats.tau, "  ".join(f"{speed:.0f}" for speed in speeds)
        print(f"{epoch}  {reward:.3f}  {same}  {tau:.2f}  {shown}  {largest:.1e}")
    weights = zip(*(each.parameters() for each in models), strict=True)
    print(f"the same weights after both trainings: {all(torch.equal(*pair) for pair in weights)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
