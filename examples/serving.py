"""Decodes more requests than there are rows: a request that ends leaves its row to the next one.

python examples/serving.py
"""

from specdec import Request, Scheduler, SpeculativeDecoder, load_embedded_pair

from specdec_kernels import SamplingParams

target, draft, tokenizer = load_embedded_pair()
scheduler = Scheduler(SpeculativeDecoder(target, draft), rows=2, max_length=128)

prompts = ["import os", "def add(a, b):", "class Stack:", "for line in file:", "try:"]
requests = (
    Request(
        tokenizer(prompt).input_ids,
        max_new_tokens=8 * (1 + i),
        params=SamplingParams(temperature=0.8),
        seed=i,  # with its seed a text is the same, whoever else is being served
        id=prompt,
    )
    for i, prompt in enumerate(prompts)
)
for sequence in scheduler.run(requests):  # in the order in which they end
    print(f"--- request {sequence.number}: {len(sequence.tokens)} new tokens, finish reason: {sequence.finish_reason}")
    print(sequence.request.id + tokenizer.decode(sequence.tokens))
