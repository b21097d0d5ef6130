"""Typical acceptance, which is lossy: against plain loops in float64, in the loop, and where it is refused."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from specdec import PromptLookupDrafter, Request, Scheduler, SpeculativeDecoder, speculate
from specdec.drafters import Drafts
from specdec.evaluation.contenders import CompareSettings
from specdec.evaluation.verify.verify_settings import VerifySettings
from specdec.loop.typical import Typical
from specdec.models.cache.tree import Tree
from support.models import generate, prompts
from support.table_trees import BUSHY, TableTrees, bigrams, forgetful

from specdec_kernels import SamplingParams, SamplingTensors, Status, speculative_step

BATCH, NODES, VOCABULARY = 60, 9, 7


def p_of(logits: torch.Tensor, temperature: float, top_k: int) -> list[float]:
    """By hand: the most likely token at temperature 0; of equal logits all are kept by top-k."""
    if temperature == 0:
        return [float(i == int(logits.argmax())) for i in range(VOCABULARY)]
    least = logits.sort(descending=True).values[top_k - 1] if top_k else -math.inf
    return logits.double().div(temperature).masked_fill(logits < least, -math.inf).softmax(-1).tolist()


def longest(typical, ps, tokens, parents, counts) -> list[int]:
    """The path, of several equally long ones the most likely, of equal ones the first."""
    best, paths = (0, 0.0, []), {-1: (1.0, [])}
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if not counts[node] or parent not in paths:
            continue
        p, (before, path) = ps[parent + 1], paths[parent]
        entropy = -sum(x * math.log(x) for x in p if x > 0)
        if p[token] > min(typical.epsilon, typical.delta * math.exp(-entropy)):
            paths[node] = before * p[token], [*path, node]
            found = (len(path) + 1, *paths[node])
            best = found if found[:2] > best[:2] else best
    return best[2]


@pytest.mark.parametrize("typical", [Typical(), Typical(0.3, 0.6), Typical(0.0)], ids=str)
def test_the_longest_path_of_likely_nodes(typical):
    draw = torch.Generator().manual_seed(3)
    logits = 2 * torch.randn(BATCH, NODES + 1, VOCABULARY, generator=draw)
    parents = (torch.rand(BATCH, NODES, generator=draw) * torch.arange(1, NODES + 1)).long() - 1
    likely = logits.topk(3).indices  # so that paths are long
    tokens = torch.stack([likely[torch.arange(BATCH), parents[:, i] + 1, i % 3] for i in range(NODES)], 1)
    tree, depth = Tree.of(parents), 4
    there = torch.rand(BATCH, NODES, generator=draw) < 0.9
    counts = ~(tree.ancestors[:, 1:, 1:] & ~there[:, None]).any(-1) & (tree.depths[:, 1:] <= depth)
    temperature = torch.tensor([0.7, 0.0, 1.3]).repeat(BATCH // 3)
    top_k = torch.where(torch.arange(BATCH) % 4 == 0, 3, 0)
    filters = torch.stack((top_k.float(), torch.ones(BATCH), torch.zeros(BATCH)), 1)
    seed, sampling = torch.arange(BATCH), SamplingTensors(temperature, filters, None)
    step = SimpleNamespace(sampling=sampling, seed=seed, position=torch.full_like(seed, 9), num_drafts=depth)
    out = typical.verify(step, logits, Drafts(tokens, parents), tree, counts, "auto")
    lengths = set()
    for b in range(BATCH):
        ps = [p_of(row, float(temperature[b]), int(top_k[b])) for row in logits[b]]
        path = longest(typical, ps, tokens[b].tolist(), parents[b].tolist(), counts[b].tolist())
        assert out.path[b].tolist() == path + [-1] * (depth + 1 - len(path)), b
        lengths.add((len(path), bool(temperature[b])))
        assert out.num_accepted[b] == len(path) and out.num_emitted[b] == len(path) + 1 and out.status[b] == 0
        assert out.tokens[b].tolist()[: len(path)] == tokens[b, path].tolist()
    last = (out.path[:, :-1].amax(1) + 1)[:, None, None].expand(-1, 1, VOCABULARY)  # nodes come after their parents
    ends = speculative_step(
        logits.gather(1, last),
        tokens[:, :0],
        None,
        params=sampling,
        seed=seed,
        position=9 + out.num_accepted,
        rule="coupled",
    )
    assert torch.equal(out.tokens.gather(1, out.num_accepted[:, None].long()), ends.tokens)
    assert len(lengths) > 5, lengths


def test_a_row_without_a_distribution_ends_the_path():
    """The second node of a chain of three; its own row decides nothing, and what is below it cannot be reached."""
    logits = torch.zeros(2, 4, VOCABULARY)
    logits[0, 2, 3] = torch.nan
    tokens, parents = torch.zeros(2, 3, dtype=torch.int64), torch.tensor([[-1, 0, 1]] * 2)
    step = SimpleNamespace(
        sampling=SamplingTensors(torch.ones(2), None, None),
        seed=torch.zeros(2, dtype=torch.int64),
        position=torch.ones(2, dtype=torch.int64),
        num_drafts=3,
    )
    counts = torch.ones(2, 3, dtype=torch.bool)
    out = Typical(0.0).verify(step, logits, Drafts(tokens, parents), Tree.of(parents), counts, "auto")
    assert out.path.tolist() == [[0, 1, -1, -1], [0, 1, 2, -1]] and out.status.tolist() == [Status.TARGET_NAN, 0]
    assert out.tokens[0].tolist() == [0, 0, -1, -1] and out.num_emitted.tolist() == [2, 4]


def test_texts():
    """Greedy rows keep their texts; with a threshold of 0 every path is accepted."""
    ids, params = prompts(3, 2, 9), SamplingParams(torch.tensor([0.9, 0.0, 1.2]))
    settings = {"max_new_tokens": 21, "params": params, "seed": [1, 2, 3], "eos_token_id": []}
    decoder = SpeculativeDecoder(forgetful(), TableTrees(bigrams(forgetful()), BUSHY), 2, tree=len(BUSHY))
    exact, few, most = (
        decoder.generate(ids, rule=rule, log_probs=True, **settings) for rule in ("coupled", Typical(), Typical(0.0))
    )
    assert few.drafter_error is None and few.tokens[1] == exact.tokens[1] == most.tokens[1]
    greedy = generate(forgetful(), None, ids[1:2], 0, max_new_tokens=21)
    assert few.tokens[1] == greedy.tokens[0]
    taus = [[s.tau for s in result.sequence_stats] for result in (exact, few, most)]
    assert all(taus[0][row] < taus[1][row] < taus[2][row] == 3.0 for row in (0, 2)), taus
    scheduler = Scheduler(decoder, rows=2, max_length=40, rule=Typical())
    requests = [
        Request(p, 21, SamplingParams(float(params.temperature[i])), seed=i + 1, eos_token_id=[])
        for i, p in enumerate(ids)
    ]
    assert [o.tokens for o in sorted(scheduler.run(requests), key=lambda o: o.number)] == few.tokens


def test_where_it_is_refused():
    drafter = PromptLookupDrafter()
    with pytest.raises(ValueError, match=r"rule: got Typical\(.* without a tree, allowed: 'token', 'block' or"):
        SpeculativeDecoder(forgetful(), drafter, 2).generate([[1]], max_new_tokens=2, rule=Typical())
    decoder = SpeculativeDecoder(forgetful(), drafter, 2, tree=4)
    for more in (
        {"params": SamplingParams(frequency_penalty=0.5)},
        {"logit_bias": {3: 1.0}},
        {"banned_tokens": [3]},
        {"min_new_tokens": 1},
    ):
        with pytest.raises(ValueError, match="rule: got Typical with penalties, bias, bans or min_new_tokens"):
            decoder.generate([[1]], max_new_tokens=2, rule=Typical(), **more)
    with pytest.raises(ValueError, match="rule: got Typical with penalties"):
        scheduler = Scheduler(decoder, rows=1, max_length=9, rule=Typical())
        scheduler.submit(Request([1], 2, SamplingParams(presence_penalty=0.5)))
    for exact in (
        lambda: decoder.generate([[1]], max_new_tokens=2, rule="typical"),
        lambda: VerifySettings(rules=("typical",)),
        lambda: CompareSettings(rule="typical"),
        lambda: speculate(rule="typical"),
    ):
        with pytest.raises(ValueError, match="rule: got 'typical', allowed: 'token', 'block', 'coupled'"):
            exact()
    for wrong in ({"epsilon": 1.0}, {"epsilon": -0.1}, {"delta": 0.0}, {"delta": math.inf}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Typical(**wrong)
