"""A drafter that draws trees, and chains, from a table of logits, on the device alone."""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence

import torch
from specdec.drafters import BatchState, Drafter, Drafts, DraftSession, Step
from transformers import PreTrainedModel

from specdec_kernels import Rule, draft_children

from .models import tiny_model

BUSHY = (-1, -1, 0, 0, 1, 2, 2, 5)  # two children, of which one has two; siblings are no neighbours everywhere


class TableTrees(Drafter, DraftSession):
    """Draws all trees of one shape: with rules ``token`` and ``block`` without replacement, else the most likely.

    Args:
        table: [V, V'], the logits after each token.
        parents: of every tree, as in Drafts; a chain's are -1, 0, 1, ...
        barren: a token after which nothing is drawn; in a tree, which tokens were drawn may decide that alone.
        d2t: [V'], the target's ids of the table's columns.
    """

    trees = samples_trees = True
    needs_host = False

    def __init__(self, table: torch.Tensor, parents: Sequence[int], barren: int = -1, d2t: torch.Tensor | None = None):
        self.table, self.parents, self.barren, self.d2t = table, list(parents), barren, d2t
        self.compacted = 0

    def start(self, batch: BatchState) -> TableTrees:
        self.batch = batch
        return self

    def accepted(self, path: torch.Tensor) -> None:
        self.compacted += 1

    def propose(self, step: Step) -> Drafts:
        if self.batch.nodes:
            return self.tree(step, self.parents)
        drafts = self.tree(step, list(range(-1, step.num_drafts - 1)))
        logits = None if drafts.logits is None else drafts.logits[:, :-1]
        return drafts._replace(parents=None, logits=logits, status=drafts.status[:, :-1])

    def tree(self, step: Step, parents: list[int]) -> Drafts:
        size, sampled = len(step.position), self.batch.rule != Rule.COUPLED
        tokens = torch.full((size, len(parents)), -1, dtype=torch.int64, device=step.position.device)
        logits = self.table.new_zeros(size, len(parents) + 1, self.table.shape[1])
        status = torch.zeros(size, len(parents) + 1, dtype=torch.int32, device=step.position.device)
        paths = {-1: step.last_two[:, :0]}
        for node in (-1, *range(len(parents))):
            if node >= 0:
                paths[node] = torch.cat((paths[parents[node]], tokens[:, node : node + 1]), 1)
            children = [child for child, parent in enumerate(parents) if parent == node]
            if not children:
                continue
            token = step.last_two[:, 1] if node < 0 else tokens[:, node]
            row = logits[:, node + 1] = self.table[token.clamp(min=0)]
            drawn = draft_children(
                row,
                len(children),
                step.sampling,
                seed=step.seed,
                position=step.position,
                offset=node + 1,
                drafts=paths[node].clamp(min=0),
                d2t=self.d2t,
                sampled=sampled,
                backend=self.batch.backend,
            )
            none = (token == self.barren) | (token < 0)
            tokens[:, _on_device(tuple(children), tokens.device)] = drawn.tokens.masked_fill(none[:, None], -1)
            status[:, node + 1] = drawn.status
        shape = _on_device(tuple(parents), tokens.device)
        q = {"logits": logits, "d2t": self.d2t} if sampled else {}
        return Drafts(tokens, shape, **q, status=status)


@functools.cache
def _on_device(numbers: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """Copied once, in a step before the one that is captured: a capture cannot copy numbers of Python."""
    with torch.inference_mode(False):
        return torch.tensor(numbers, device=device)


@torch.no_grad()
def bigrams(model: PreTrainedModel) -> torch.Tensor:
    """[V, V], the model's logits after each token alone."""
    return model(torch.arange(model.config.vocab_size)[:, None]).logits[:, -1].clone()


@functools.cache
def forgetful() -> PreTrainedModel:
    """A tiny model that hears little of what was before the last token, so that a table drafts well for it."""
    model = copy.deepcopy(tiny_model())
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.2)
    return model
