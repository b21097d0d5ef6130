"""Compares a head in the loop with one that is written plainly."""

from __future__ import annotations

import torch
from specdec import SpeculativeDecoder, load_head
from specdec.drafters import Drafter
from transformers import PreTrainedModel

from specdec_kernels import SamplingParams

from .models import VOCABULARY, prompts, tiny_model

LAYERS = 7


def compare(path, plain, new: int = 14, target: PreTrainedModel | None = None, **settings) -> None:
    """Compares q in each step of sampled texts with ``plain(states, text, drafts)``, [len(drafts) + 1, V].

    Args:
        target: None: a tiny Llama.
    """
    target = tiny_model("llama", layers=LAYERS) if target is None else target
    head = load_head(path, target, check=False)
    steps = []

    class Recording(Drafter):
        def start(self, batch):
            session = head.start(batch)
            propose = session.propose

            def noted(step):
                drafts = propose(step)
                steps.append(([list(text) for text in step.texts], step.allowed_on_device.tolist(), drafts))
                return drafts

            session.propose, session.needs_host = noted, True
            return session

    decoder = SpeculativeDecoder(target, Recording(), 3)
    settings |= {"params": SamplingParams(1.0), "seed": [1, 2, 3], "eos_token_id": []}
    decoder.generate(prompts(3, 2, 9), max_new_tokens=new, **settings)
    compared = 0
    for texts, allowed, drafts in steps:
        for row, text in enumerate(texts):
            count = min(allowed[row], drafts.tokens.shape[1])
            if count == 0:
                continue
            with torch.no_grad():
                states = target(torch.tensor([text]), output_hidden_states=True).hidden_states
            expected = plain([s[0] for s in states], text, drafts.tokens[row, : count - 1].tolist())
            if head.head.d2t is not None:
                assert (head.head.d2t.diff() > 0).all() and torch.equal(drafts.d2t, head.head.d2t)
                expected = expected[:, head.head.d2t] if expected.shape[1] == VOCABULARY else expected
            torch.testing.assert_close(drafts.logits[row, :count], expected.float(), rtol=1e-3, atol=1e-3)
            compared += count
    assert compared > 30
