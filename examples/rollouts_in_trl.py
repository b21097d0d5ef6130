"""TRL's GRPOTrainer with rollouts by specdec, which draft from the epoch before.

pip install trl datasets
python examples/rollouts_in_trl.py
"""

import tempfile

from datasets import Dataset
from specdec import Rollout, load_embedded_pair
from trl import GRPOConfig, GRPOTrainer

from specdec_kernels import SamplingParams

model, _, tokenizer = load_embedded_pair()
rollout = Rollout(model)


def rollouts(prompts: list[str], trainer: GRPOTrainer) -> dict[str, list]:
    """What the trainer calls instead of ``generate``, with each prompt as often as it wants samples of it."""
    args = trainer.args
    batch = rollout(
        tokenizer(prompts).input_ids,
        max_new_tokens=args.max_completion_length,
        params=SamplingParams(temperature=args.temperature),
        seed=trainer.state.global_step,
    )
    print(f"step {trainer.state.global_step}: tau {batch.stats.tau:.2f}")
    ends = [*zip(batch.prompt_lengths.tolist(), batch.lengths.tolist(), strict=True)]
    return {
        "prompt_ids": [row[:start] for row, (start, _) in zip(batch.sequences.tolist(), ends, strict=True)],
        "completion_ids": [row[:n] for row, (_, n) in zip(batch.tokens.tolist(), ends, strict=True)],
        "logprobs": [row[:n] for row, (_, n) in zip(batch.log_probs.tolist(), ends, strict=True)],
    }


def reward(completions: list[str], **columns) -> list[float]:
    """From 0 to 1: whether a text has many lines, which are short then."""
    return [min(text.count("\n"), 8) / 8 for text in completions]


with tempfile.TemporaryDirectory() as folder:
    settings = GRPOConfig(
        output_dir=folder,
        num_generations=4,
        per_device_train_batch_size=8,
        max_completion_length=32,
        num_train_epochs=3,
        learning_rate=5e-4,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
    )
    prompts = [
        "class Stack:\n",
        "class Reader:\n    def read(self",
        "class Point:\n    x = 0\n",
        "class Timer:\n    def ",
    ]
    trainer = GRPOTrainer(
        model,
        reward_funcs=reward,
        args=settings,
        train_dataset=Dataset.from_dict({"prompt": prompts}),
        processing_class=tokenizer,
        rollout_func=rollouts,
    )
    trainer.train()
    for entry in trainer.state.log_history:
        if "reward" in entry:
            print(f"epoch {entry['epoch']:.1f}: reward {entry['reward']:.3f}")
