"""Speculative sampling in plain PyTorch over two models of transformers: the algorithm, to be read from top to bottom.

A small draft model proposes a few tokens, the large target model looks at all of them in one forward, and coins of the
right weight decide how many of them stay. Leviathan et al. (arXiv 2211.17192, algorithm 1) and Chen et al. (arXiv
2302.01318, algorithm 2) found it at the same time. The text has exactly the distribution of sampling from the target.

    python examples/from_scratch.py
"""

from __future__ import annotations

from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


@torch.inference_mode()
def probabilities(model: Any, text: list[int], last: int, temperature: float) -> torch.Tensor:
    """What the model gives to every token after each of the last positions of a text: [last, V]."""
    logits = model(torch.tensor([text])).logits[0, -last:]
    return torch.softmax(logits.double() / temperature, -1)


def draw(weights: torch.Tensor) -> int:
    return int(torch.multinomial(weights, 1))  # which divides them by their sum


def step(target: Any, draft: Any, text: list[int], k: int, temperature: float) -> tuple[list[int], int]:
    """The tokens that come after a text, 1 to k + 1 of them, and how many of these were drafted."""
    drafts: list[int] = []
    q = []  # what each draft was drawn from
    for _ in range(k):
        q.append(probabilities(draft, text + drafts, 1, temperature)[0])
        drafts.append(draw(q[-1]))

    # One forward of the target says what it would draw from at each of these places, and after the last.
    p = probabilities(target, text + drafts, k + 1, temperature)

    for i, x in enumerate(drafts):
        # Kept with probability min(1, p(x) / q(x)): where the draft proposes x too often, some are thrown away ...
        if torch.rand(()) * q[i][x] < p[i][x]:
            continue
        # ... and those are replaced by what it proposes too rarely. Together:
        #     q(x) min(1, p(x) / q(x)) + max(0, p(x) - q(x)) = min(p(x), q(x)) + max(0, p(x) - q(x)) = p(x)
        # since a draft is thrown away with probability 1 - sum of min(p, q), which is the sum of max(0, p - q).
        # What was drafted after it is of no use: it continues another text.
        return [*drafts[:i], draw((p[i] - q[i]).clamp(min=0))], i

    return [*drafts, draw(p[k])], k  # all stay, and the forward has paid for one more


def generate(target: Any, draft: Any, prompt: list[int], new_tokens: int, k: int, temperature: float) -> list[int]:
    text = list(prompt)
    while len(text) < len(prompt) + new_tokens:
        text += step(target, draft, text, k, temperature)[0]
    return text[len(prompt) : len(prompt) + new_tokens]


# ---- Everything above is the algorithm. What follows compares it with specdec, which does the same with static caches,
# ---- fused kernels and batches.


def compare(texts: int = 120, new_tokens: int = 2, k: int = 2, temperature: float = 0.7) -> None:
    from specdec import SpeculativeDecoder

    from specdec_kernels import SamplingParams

    spec = find_spec("specdec")
    pair = Path(str(spec and spec.origin)).parent / "embedded"  # two small models, trained for this
    target, draft = (
        AutoModelForCausalLM.from_pretrained(
            pair / name, dtype=torch.float32, trust_remote_code=False, use_safetensors=True
        ).eval()
        for name in ("target", "draft")
    )
    tokenizer = AutoTokenizer.from_pretrained(pair / "tokenizer", trust_remote_code=False)
    prompt = tokenizer("import os\nimport").input_ids

    torch.manual_seed(0)
    ours = Counter(tuple(generate(target, draft, prompt, new_tokens, k, temperature)) for _ in range(texts))
    decoder = SpeculativeDecoder(target, draft, num_drafts=k)
    params = SamplingParams(temperature=temperature)
    fast = decoder.generate(
        [prompt] * texts, max_new_tokens=new_tokens, params=params, seed=[*range(texts)], eos_token_id=[]
    )
    theirs = Counter(map(tuple, fast.tokens))

    first = probabilities(target, prompt, 1, temperature)[0]
    print("text                by the target  from scratch  specdec")
    for tokens, _ in (ours + theirs).most_common(8):
        exact = first[tokens[0]] * probabilities(target, [*prompt, tokens[0]], 1, temperature)[0][tokens[1]]
        shares = f"{float(exact):13.3f}{ours[tokens] / texts:14.3f}{theirs[tokens] / texts:9.3f}"
        print(f"{tokenizer.decode(tokens)!r:20}{shares}")


if __name__ == "__main__":
    compare()
