"""Recorded forwards: the bits of forwards that run the modules, for every model type; and what is not recorded."""

from __future__ import annotations

import copy
import functools
import gc
import threading
import weakref

import pytest
import torch
from specdec.models.exchanged import huge_pages
from specdec.models.forward import forwards, programs, recorded
from specdec.models.forward.cached_model import CachedModel
from specdec.models.forward.calls import tensors
from specdec.models.forward.forwards import Forwards
from specdec.models.forward.programs import Memory
from specdec.models.forward.recorded import Recordings, is_recordable, record
from specdec.models.load.loading import load_model
from specdec_layers import Program
from support import recorded as recording
from support.feeding import feed
from support.gguf_files import write_gguf
from support.model_types import CASES, model_of
from support.models import prompts, tiny_model
from torch import nn


@pytest.fixture(autouse=True)
def _inference(monkeypatch):
    monkeypatch.setattr(forwards, "RARE_RUNS", 1)
    with torch.inference_mode():
        yield


class Owner:
    """A cache of these tensors."""

    def __init__(self, *own):
        self.own = [*own]

    def tensors(self):
        return self.own


def both(model):
    """The model, by recordings and without."""
    return CachedModel(model), CachedModel(model, forwards=Forwards)


def replays(cached: CachedModel) -> int:
    return cached.forwards.recordings.replays


@pytest.mark.parametrize("case", CASES)
def test_the_bits_are_those_of_the_modules(case):
    """Rows of other lengths, rejected drafts, and a row that is idle, over two caches: the second one's first steps
    replay what was recorded over the first."""
    replayed, called = both(model_of(case))
    for seed in range(2):
        before = replays(replayed)
        capacity = 60 if not replayed.attention.is_native or replayed.recurrent else 60 + seed
        caches = [cached.new_cache(2, capacity, window=4) for cached in (replayed, called)]
        known = prompts(2, 3, 9, seed=seed)
        for cached, cache in zip((replayed, called), caches, strict=True):
            cached.prefill(cache, known)
        lengths = torch.tensor([len(k) for k in known])
        for step, counts in enumerate(((3, 3), (3, 2), (3, 3), (3, 0), (3, 3), (1, 1), (1, 1), (1, 1))):
            new = [prompts(1, n, n, seed=10 * step + i)[0] if n else [] for i, n in enumerate(counts)]
            results = []
            for cached, cache in zip((replayed, called), caches, strict=True):
                cache.lengths = lengths.clone()
                results.append(feed(cached, cache, new))
            assert all(torch.equal(*rows) for rows in zip(*results, strict=True))
            lengths = lengths + torch.tensor([max(n - step % 2, 0) for n in counts])
        # Some keep a tensor that is neither a weight nor of a cache, and are recorded over each cache.
        assert replays(replayed) - before in ((4,), (6, 8))[seed], case


@pytest.mark.parametrize("case", ["llama", "gemma3_text", "gpt_neox", "mixtral", "phi3"])
def test_no_number_of_slots_is_recorded(case, monkeypatch):
    """Where forwards over caches of other capacities share a recording."""
    sources, numbers = [], []

    class Noted(programs.Programs):
        def __init__(self, *given):
            super().__init__(*given)
            sources.append([step.operation for step in self._steps])
            numbers.append(steps := [[]])
            for step in self._steps:
                steps[0] += [part for part in step.arguments.parts if not tensors(part)]

    monkeypatch.setattr(recorded, "Programs", Noted)
    for capacity in (40, 67):
        cached = CachedModel(model_of(case))
        cache = cached.new_cache(2, capacity)
        for _ in range(2):
            feed(cached, cache, [[3, 4], [5]])
    assert cached.attention.is_native and len(sources) == 2 and sources[0] == sources[1]
    assert numbers[0] == numbers[1] != []


@pytest.mark.parametrize(
    "forward",
    [
        lambda x: x * x.sum().item(),
        lambda x: x * float(x.sum()),
        lambda x: x + 1 if x.sum() > 0 else x - 1,
        lambda x: x + len([n for n in x.tolist() if n > 0]),
        lambda x: x + len([n for n in (2 * x).tolist() if n > 0]),
        lambda x: x + float((2 * x).numpy().sum()),
        lambda x: x[x > 0].sum(),
        lambda x: x.nonzero().sum(),
        lambda x: torch.tensor(x.unique().numel()) + x,
    ],
)
def test_what_depends_on_numbers_is_not_recorded(forward):
    x = torch.tensor([1.0, -2.0, 3.0])
    recordings, owner = Recordings([]), Owner()
    for given in (x, x, x, -x, -x):
        assert torch.equal(recordings.run("key", owner, forward, given), forward(given))
    assert recordings.replays == 0


def test_inputs_that_are_one_tensor_stay_two_inputs():
    x, y = torch.tensor([1.0, 2.0]), torch.tensor([5.0, 7.0])
    _, programs = record(lambda a, b: a - 2 * b, [], x, x)
    assert programs.bind(Memory(), [])(x, y).tolist() == [-9.0, -12.0]


@pytest.mark.parametrize("first", [lambda x: (x, x), lambda x: (x[:1], x[1:].expand(1, 2)), lambda x: (x[:1], x[1:])])
def test_inputs_of_a_program_that_share_memory_stay_two_inputs(first):
    recordings, owner = Recordings([]), Owner()
    x, y = first(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    for step in range(6):
        found = recordings.run("key", owner, lambda a, b: (a + a).t().t() + (b + b).reshape(b.shape) * 2, x, y)
        assert torch.equal(found, 2 * x + 4 * y)
        x, y = (z + step for z in (x, 3 * y)) if step > 1 else (x, y)
    assert recordings.replays == 4


def test_each_cache_has_its_own_tensors():
    weight, x = torch.tensor([2.0, 3.0, 5.0]), torch.ones(2)
    recordings, owners = Recordings([weight]), [Owner(torch.zeros(2, 3)) for _ in range(2)]

    def forward(own, x):
        own[:, 1].add_(x)
        return own.reshape(3, 2).sum(0) + own.t().reshape(-1)[:2] * weight[1:]  # the second reshape copies

    for owner in owners:
        expected = torch.zeros(2, 3)
        for step in range(5):
            found = recordings.run("key", owner, lambda x, own=owner.own[0]: forward(own, x), x * step)
            assert torch.equal(found, forward(expected, x * step)) and torch.equal(owner.own[0], expected)
    assert recordings.replays == 3 + 5


def test_what_is_nobodys_is_recorded_for_each_cache():
    """A tensor that may be the cache's, though it does not say so."""
    recordings, owners = Recordings([]), [Owner() for _ in range(2)]
    for owner in owners:
        kept = torch.zeros(2)
        for step in range(4):
            assert (
                recordings.run("key", owner, lambda x, kept=kept: kept.add_(x) * 1, torch.ones(2)).tolist()
                == [step + 1.0] * 2
            )
    assert recordings.replays == 2 + 3


def test_the_oldest_recordings_go():
    recordings, owner = Recordings([], most=2), Owner()
    for key in (1, 1, 2, 2, 3, 3):
        recordings.run(key, owner, lambda x: x + 1, torch.ones(key))
    assert [*recordings._known] == [*recordings._bound[owner]] == [2, 3]
    for _ in range(3):
        recordings.run(1, owner, lambda x: x + 1, torch.ones(1))
    assert [*recordings._known] == [*recordings._bound[owner]] == [3, 1] and recordings.replays == 1


def test_what_comes_seldom_is_not_recorded(monkeypatch):
    """As a short text has few steps of some widths; and first runs are told from later ones."""
    monkeypatch.setattr(forwards, "RARE_RUNS", 3)
    for tokens, runs in ((1, 1), (2, 3)):
        cached, found = CachedModel(tiny_model()), []
        caches = [cached.new_cache(1, 60), cached.new_cache(1, 60)]
        for i in range(runs + 4):
            cache = caches[i // (runs + 2)]
            cache.lengths = torch.tensor([3])
            feed(cached, cache, [[5] * tokens])
            found.append((cached.first_runs, replays(cached)))
        # A run over the second cache makes a program anew.
        assert found == [*((n, 0) for n in range(1, runs + 2)), (runs + 1, 1), (runs + 2, 2), (runs + 2, 3)]


def test_what_can_be_bound_to_no_cache_runs_each_time(monkeypatch):
    def refuse(*_):
        raise NotImplementedError("a view depends on the cache")

    monkeypatch.setattr(programs.Programs, "bind", refuse)
    replayed, called = both(tiny_model())
    found = [steps(cached, cached.new_cache(1, 20), 5) for cached in (replayed, called)]
    assert all(map(torch.equal, *found)) and replays(replayed) == 0


@pytest.mark.skipif(not huge_pages.has_huge_pages(), reason="the system has no huge pages")
def test_packed_weights_that_were_made_in_inference_mode(tmp_path, monkeypatch):
    """No view can be made outside of such as were moved, of which an embedding takes one that is the head, too."""
    monkeypatch.setattr(huge_pages, "LEAST", 1)
    write_gguf(tmp_path / "model.gguf", "gemma3_text", stored="Q8_0")
    with torch.inference_mode():
        replayed, called = both(load_model(tmp_path / "model.gguf"))
    for mode in (torch.inference_mode, torch.no_grad):
        with mode():
            found = [steps(cached, cached.new_cache(1, 20), 5) for cached in (replayed, called)]
            assert all(map(torch.equal, *found))
    assert replays(replayed) > 0


def test_a_model_that_was_asked_for_hidden_states_is_recorded():
    model = copy.deepcopy(tiny_model())
    model(torch.tensor([[3, 4]]), output_hidden_states=True, output_attentions=True)
    cached = CachedModel(model)
    cache = cached.new_cache(1, 20)
    for _ in range(3):
        feed(cached, cache, [[3]])
    assert replays(cached) > 0


def test_hooks_and_adapters_are_run():
    model, calls = copy.deepcopy(tiny_model()), []
    assert is_recordable(model)
    handle = model.model.layers[0].register_forward_hook(lambda *_: calls.append(1))
    cached = CachedModel(model)
    cache = cached.new_cache(1, 20)
    calls.clear()
    for _ in range(4):
        feed(cached, cache, [[3]])
    assert len(calls) == 4 and not is_recordable(model)
    handle.remove()
    cached.new_cache(1, 20)
    assert cached.forwards.is_recorded
    model.model.layers[0].register_module("lora", type("LoraLayer", (nn.Module,), {"__module__": "peft.tuners"})())
    assert not is_recordable(model)


def test_new_weights_are_used_and_a_cache_takes_its_recordings_with_it():
    model = copy.deepcopy(tiny_model())
    replayed, called = both(model)
    caches = [cached.new_cache(1, 20) for cached in (replayed, called)]
    for step in range(5):
        if step == 4:
            model.lm_head.weight.mul_(2)
        assert torch.equal(
            *(feed(cached, cache, [[3]]) for cached, cache in zip((replayed, called), caches, strict=True))
        )
    assert replays(replayed) == 3
    stored = weakref.ref(caches[0].layers[0].keys)
    del caches
    gc.collect()
    assert stored() is None and not replayed.forwards.recordings._bound and not replayed.forwards.recordings._memory


def steps(cached, cache, count, seed=0):
    """The logits of some steps of one token."""
    return [feed(cached, cache, [prompts(1, 1, 1, seed=seed + i)[0]]) for i in range(count)]


def test_programs_of_two_caches_do_not_disturb_each_other():
    """Also on two threads, and with capacities that differ."""
    replayed, called = both(tiny_model())
    expected = [steps(called, called.new_cache(1, 30), 12, seed) for seed in (0, 50)]
    caches, found = [replayed.new_cache(1, capacity) for capacity in (30, 41)], [[], []]
    for i in range(12):
        for own, cache, seed in zip(found, caches, (0, 50), strict=True):
            own += steps(replayed, cache, 1, seed + i)
    assert all(torch.equal(*pair) for pairs in map(zip, found, expected) for pair in pairs)
    assert replays(replayed) == 10 + 12

    def work(i):
        with torch.inference_mode():
            found[i] = steps(replayed, replayed.new_cache(1, 30), 12, (0, 50)[i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(*pair) for pairs in map(zip, found, expected) for pair in pairs)


def test_a_program_leaves_results_and_inputs_to_their_owners():
    """A result is not overwritten by the next step, and programs made in inference mode run outside of it."""
    model = copy.deepcopy(tiny_model())
    replayed, called = both(model)
    caches = [cached.new_cache(1, 20) for cached in (replayed, called)]
    with torch.inference_mode(False), torch.no_grad():
        caches += [cached.new_cache(1, 20) for cached in (replayed, called)]
    for i in range(2):
        first = [steps(*each, 6) for each in zip((replayed, called), caches[2 * i :], strict=False)]
        with torch.inference_mode(i == 0), torch.no_grad():
            weight = model.model.layers[0].mlp.up_proj.weight
            weight.data = weight.data * 1.5  # other memory
            later = [
                steps(cached, cache, 3) for cached, cache in zip((replayed, called), caches[2 * i :], strict=False)
            ]
        assert all(map(torch.equal, *first)) and all(map(torch.equal, *later))
    assert replays(replayed) == 7 + 9


def test_a_program_fails_as_its_operations():
    replayed = CachedModel(tiny_model())
    cache = replayed.new_cache(1, 20)
    steps(replayed, cache, 5)
    token, position, before = torch.tensor([[3]]), torch.tensor([[6]]), replays(replayed)
    with pytest.raises(RuntimeError, match="rows has a number that is no row of target"):
        replayed(token, cache, replayed.layout(position, position + 10**6, 20))
    fails, runs = (replayed.layout(position, position + n, 20) for n in (10**6, 0))
    assert before == 3 and torch.isfinite(replayed(token, cache, runs)).all()
    with pytest.raises(RuntimeError, match="rows has a number that is no row of target"):
        replayed(token, cache, fails)


def test_a_profiler_sees_every_operation():
    replayed = CachedModel(tiny_model())
    cache = replayed.new_cache(1, 20)
    steps(replayed, cache, 5)
    before = replays(replayed)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        steps(replayed, cache, 1)
    assert "specdec_layers::linear" in {event.key for event in profiler.key_averages()}
    assert before == replays(replayed) == 3


def test_programs_are_not_made_or_freed_in_what_others_record(monkeypatch):
    """A recording of a step, such as stands for a CUDA graph, calls again what it saw."""
    monkeypatch.setattr(recording, "SYNCHRONISING", set())  # this one is made around the layout as well
    replayed, called = both(tiny_model())
    cache, gone = replayed.new_cache(1, 30), replayed.new_cache(1, 30)
    steps(replayed, gone, 5)
    steps(replayed, cache, 2)
    before = replays(replayed)
    with recording.Recording() as watch:
        found = steps(replayed, cache, 4, seed=2)
        del gone
        gc.collect()
    assert not any("keep_results" in str(function) for function, *_ in watch.calls)
    expected = steps(called, called.new_cache(1, 30), 12)
    found += steps(replayed, cache, 3, seed=6)
    lengths = cache.lengths.clone()
    watch.replay()
    cache.lengths.copy_(lengths)
    found += steps(replayed, cache, 3, seed=9)
    assert all(map(torch.equal, found, expected[2:])) and replays(replayed) == before + 6


def test_programs_of_a_cache_share_their_memory():
    replayed = CachedModel(tiny_model())
    cache = replayed.new_cache(1, 60)
    memory, used = replayed.forwards.recordings._memory, []
    for tokens in (8, *range(1, 9)):
        for _ in range(5):
            cache.lengths = torch.tensor([3])
            feed(replayed, cache, [[5] * tokens])
        blocks = [x for made in memory[cache]._blocks.values() for x in made]
        used.append(sum(x.nbytes for x in blocks))
    assert replays(replayed) == 8 * 3 + 5 and used[-1] <= 2 * used[0] < 100_000


@pytest.mark.parametrize("tokens", [1, 2, 5])
def test_layers_are_one_program(tokens, monkeypatch):
    """Every further one costs a call from Python, and that of PyTorch's operation before it."""
    made = []
    monkeypatch.setattr(
        programs, "Program", type("Counted", (Program,), {"__init__": lambda self: _counted(self, made)})
    )
    replayed = CachedModel(tiny_model())
    cache = replayed.new_cache(1, 60)
    for _ in range(5):
        cache.lengths = torch.tensor([3])
        feed(replayed, cache, [[5] * tokens])
    assert replays(replayed) == 3 and 0 < len(made) <= 2


def _counted(program: Program, made: list[Program]) -> None:
    Program.__init__(program)
    made.append(program)


LARGE = torch.ones(600, 600)


def double(x, own):
    return x + x


@pytest.mark.parametrize(
    ("calls", "replays"),
    [
        ([double, double, double], 4),
        ([double, double, lambda x, own: x * 3, double, double], 4),  # two programs, and PyTorch's between
        ([double, double, lambda x, own: x.mul_(3), double, double], 4),  # which changes what a program made
        ([double, lambda x, own: x.t(), lambda x, own: x.t(), double, double], 4),
        ([double, double, double, lambda x, own: x.view(2, 1)[1:]], 4),  # a part of what the last call makes
        ([double, lambda x, own: own.index_copy_(0, torch.tensor([2]), x)[1:3], double, double], 4),
        ([double, double, lambda x, own: x.mul_(2)], 0),  # the last call makes nothing
        ([lambda x, own: x.mul_(2), double, double, double], 0),  # changes an input
        ([double, *[lambda x, own: x * 2] * 3], 4),  # most are PyTorch's
        ([lambda x, own: x * 2] * 3, 4),  # all are
        ([lambda x, own: x.as_strided((1, 2), (2, 1), 0), double, double, double], 0),  # of an input
        ([double, double, lambda x, own: x + LARGE.view(-1)[:2], double, double], 4),  # which is only looked at
    ],
)
def test_what_is_replayed(calls, replays):
    """Of a forward that also writes to its cache."""
    recordings, owner, expected = Recordings([]), Owner(torch.zeros(4, 2)), torch.zeros(4, 2)

    def forward(own, x):
        return functools.reduce(lambda y, call: call(y, own), calls, x)

    for step in range(6):
        x = torch.tensor([[1.0, 2.0]]) * step
        found = recordings.run("key", owner, functools.partial(forward, owner.own[0]), x.clone())
        assert torch.equal(found, forward(expected, x)) and torch.equal(owner.own[0], expected)
    assert recordings.replays == replays
