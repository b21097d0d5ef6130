"""Speeds up transformers' own `generate`: the call stays as it was, with one argument more.

python examples/in_transformers.py
"""

import specdec

target, draft, tokenizer = specdec.load_embedded_pair()
prompts = ["def read(self):", "import os"]
inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")

plain = target.generate(**inputs, max_new_tokens=32, do_sample=False)
speculator = specdec.speculate(draft)
output = target.generate(**inputs, max_new_tokens=32, do_sample=False, custom_generate=speculator)

for text in tokenizer.batch_decode(output, skip_special_tokens=True):
    print(text)
    print("---")
stats = speculator.last_result.stats
print(f"the same text as without specdec: {plain.equal(output)}")
print(f"{stats.emitted} tokens in {stats.steps} steps, tau {stats.tau:.2f}")
