"""Continues two prompts in one batch, and counts what produced the tokens.

python examples/generate.py
"""

from collections import Counter

import torch
from specdec import SpeculativeDecoder, load_embedded_pair

from specdec_kernels import SamplingParams

target, draft, tokenizer = load_embedded_pair()
decoder = SpeculativeDecoder(target, draft)

# A batch may mix lengths and settings: the first text is greedy, the second one is sampled.
prompts = ["def read(self, size=-1):", "class Stack:"]
params = SamplingParams(temperature=torch.tensor([0.0, 0.8]), top_p=0.95)
result = decoder.generate(tokenizer(prompts).input_ids, max_new_tokens=48, params=params, seed=[0, 1])

for i, prompt in enumerate(prompts):
    print(prompt + tokenizer.decode(result.tokens[i]))
    counts = Counter(str(producer) for producer in result.produced_by[i])
    stats = result.sequence_stats[i]
    print(f"--- {dict(counts)} in {stats.steps} steps: alpha {stats.alpha:.2f}, tau {stats.tau:.2f}")
