"""One step of speculative decoding on random logits, without any model: what an inference engine would call.

python examples/kernels_alone.py
"""

import torch

from specdec_kernels import SamplingParams, draft_step, speculative_step

B, K, V = 3, 4, 32000  # sequences, drafted tokens, vocabulary
torch.manual_seed(0)
target_logits = 2 * torch.randn(B, K + 1, V)
draft_logits = target_logits[:, :K] + 0.7 * torch.randn(B, K, V)  # a draft that resembles its target
params = SamplingParams(temperature=torch.tensor([0.0, 0.8, 1.0]), top_k=50)  # a number, or one for each sequence
seed = torch.tensor([11, 12, 13])  # what each sequence draws depends on its own seed and position only
position = torch.tensor([100, 7, 31])  # of the first token that this step decides

# A draft model would see the token that was just drawn before it computes the next row of logits.
drafts = [draft_step(draft_logits[:, i], params, seed=seed, position=position, offset=i) for i in range(K)]
out = speculative_step(
    target_logits,
    torch.stack([d.tokens for d in drafts], dim=1),
    draft_logits,
    params=params,
    seed=seed,
    position=position,
    draft_stats=(torch.stack([d.cutoff for d in drafts], dim=1), torch.stack([d.lse for d in drafts], dim=1)),
)
for b in range(B):
    print(f"sequence {b}: {out.num_accepted[b]} of {K} drafts accepted, tokens {out.tokens[b].tolist()}")
