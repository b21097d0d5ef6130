"""Trains a model by policy gradients twice, with rollouts that draft and with plain ones: it is the same training.

python examples/rollouts.py [EPOCHS] [MODEL]
"""

import copy
import sys
import time

import torch
from specdec import Rollout, RolloutBatch, load_embedded_pair, load_model
from transformers import AutoTokenizer, PreTrainedModel

PROMPTS = ["class Stack:\n", "class Reader:\n    def read(self", "class Point:\n    x = 0\n", "class Timer:\n    def "]
SAMPLES, NEW_TOKENS, RATE = 8, 32, 5e-4


def reward_of(text: str) -> float:
    """From 0 to 1: whether it has many lines, which are short then."""
    return min(text.count("\n"), 8) / 8


def learn(model: PreTrainedModel, optimizer: torch.optim.Optimizer, batch: RolloutBatch, rewards: torch.Tensor):
    """One step of GRPO (arXiv 2402.03300) with as many updates as rollouts, so that nothing has to be clipped: a text
    counts by its reward, less the mean of the other samples of its prompt. Returns the trainer's log-probabilities."""
    groups = rewards.view(-1, SAMPLES)
    advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).view(-1, 1)
    logits = model(batch.sequences, attention_mask=batch.attention_mask).logits
    log_probs = batch.log_probs_under(logits)
    optimizer.zero_grad()
    (-(advantages * log_probs).sum() / batch.mask.sum()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return log_probs.detach()


def speed_of_transformers(model: PreTrainedModel, prompts: list[list[int]], pad: int) -> float:
    """Tokens/s of ``generate`` for as many texts, all in one batch, padded on the left."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[pad] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    settings = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "pad_token_id": pad}
    model.eval()
    start = time.perf_counter()
    texts = model.generate(
        ids, attention_mask=mask, max_new_tokens=NEW_TOKENS, num_return_sequences=SAMPLES, **settings
    )
    seconds = time.perf_counter() - start
    model.train()
    new = texts[:, longest:]
    return float((new != pad).sum()) / seconds  # an end-of-sequence token that is the padding as well is not counted


def main(epochs: str = "5", folder: str | None = None) -> None:
    if folder is None:
        model, _, tokenizer = load_embedded_pair()
    else:
        model = load_model(folder, dtype="float32")
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    prompts = tokenizer(PROMPTS).input_ids
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    models = [model.train(), copy.deepcopy(model).train()]
    rollouts = [Rollout(models[0]), Rollout(models[1], num_drafts=0)]  # that drafts, and that does not
    optimizers = [torch.optim.Adam(each.parameters(), lr=RATE) for each in models]
    largest = 0.0
    print("epoch  reward  same without drafts  tau  tokens/s: drafts  plain  transformers  log-probabilities off by")
    for epoch in range(int(epochs)):
        found, speeds, batches = [], [], []
        for each, rollout, optimizer in zip(models, rollouts, optimizers, strict=True):
            start = time.perf_counter()
            batch = rollout(prompts, samples=SAMPLES, max_new_tokens=NEW_TOKENS, seed=epoch)
            speeds.append(batch.stats.emitted / (time.perf_counter() - start))
            texts = [tokenizer.decode(row[mask]) for row, mask in zip(batch.tokens, batch.mask, strict=True)]
            rewards = torch.tensor([reward_of(text) for text in texts])
            off = (learn(each, optimizer, batch, rewards) - batch.log_probs).abs().max()
            found.append(rewards)
            batches.append(batch)
            largest = max(largest, float(off))
        same = torch.equal(*found) and torch.equal(batches[0].tokens, batches[1].tokens)
        speeds.append(speed_of_transformers(model, prompts, pad))
        reward, tau, shown = found[0].mean(), batches[0].stats.tau, "  ".join(f"{speed:.0f}" for speed in speeds)
        print(f"{epoch}  {reward:.3f}  {same}  {tau:.2f}  {shown}  {largest:.1e}")
    weights = zip(*(each.parameters() for each in models), strict=True)
    print(f"the same weights after both trainings: {all(torch.equal(*pair) for pair in weights)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
