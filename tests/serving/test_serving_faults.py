"""One request's fault is its own: it ends with a clear status, the others' tokens are those of a run without it, and no
row and no token of the cache is lost. Faults of drafters cost drafts, and no text."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from specdec import FinishReason, Request, SequenceState
from specdec.drafters import Drafter, Drafts, DraftSession
from support.allocations import masked, unrecorded
from support.crowds import FAULTY, Processor, Stop, all_greedy, check_empty, crowd, decoder, finish, scheduler, texts
from support.dropped import drops_drafter

from specdec_kernels import Status


@pytest.fixture(autouse=True)
def _unrecorded(monkeypatch):
    unrecorded(monkeypatch)


NAN, INF = float("nan"), float("inf")
# Much like others.
NIGHTLY = {
    *("one_nan", "processor_stops_iteration", "processor_of_nothing", "stop_raises_at_once", "stop_says_true"),
    *("stop_of_text", "prefill_raises_later", "huge_drafts", "negative_drafts", "draft_out_of_memory_once"),
    *("lists", "floats", "too_many_columns", "integer_logits", "statistics_without_logits", "forwards_of_nothing"),
}


def cases(faults) -> list:
    return [pytest.param(fault, marks=[pytest.mark.nightly] * (fault in NIGHTLY)) for fault in faults]


class Setup:
    """A run of the crowd before it begins: what a fault may change."""

    def __init__(self, greedy: bool = False, **settings):
        self.requests = [all_greedy(r) if greedy else r for r in crowd()]
        self.decoder, self.settings, self.happened = decoder(), settings, 0
        self.scheduler = None

    def run(self) -> dict[int, SequenceState]:
        self.scheduler = scheduler(self.decoder, **self.settings)
        for request in self.requests:
            self.scheduler.submit(request)
        return finish(self.scheduler)

    def row(self) -> int | None:
        """Of the faulty request while it decodes."""
        batch = self.scheduler.batch
        return next((row for row, s in batch.decoding.items() if s.number == FAULTY), None)

    def change(self, **fields) -> None:
        self.requests[FAULTY] = dataclasses.replace(self.requests[FAULTY], **fields)

    def prompt(self) -> list[int]:
        return list(self.requests[FAULTY].prompt)

    # ---- where faults come in ------------------------------------------------------------------------------

    def on_logits(self, model, fault: Callable[[torch.Tensor, torch.Tensor, int], None]) -> None:
        """``fault(logits [R, n, V], tokens [R, n], row)`` at each forward in which the faulty request decodes."""
        run = model.forwards.run

        def faulty(forward, tokens, *others, **named):
            out = run(forward, tokens, *others, **named)
            if forward is model.forwards.prompts and self.scheduler is not None and (row := self.row()) is not None:
                fault(out.logits, tokens, row)
            return out

        model.forwards.run = faulty

    def on_prefill(self, model, fault: Callable[[], None]) -> None:
        """Whenever a part of the faulty request's prompt is read."""
        run, prompt = model.forwards.run, self.prompt()

        def faulty(forward, tokens, *others, **named):
            part = tokens[0].tolist()
            if (
                forward is not model.forwards.prompts
                and len(part) > 1
                and any(prompt[i : i + len(part)] == part for i in range(len(prompt)))
            ):
                fault()
            return run(forward, tokens, *others, **named)

        model.forwards.run = faulty

    def on_forward(self, model, fault: Callable[[], None]) -> None:
        """At each forward of all rows."""
        run = model.forwards.run

        def faulty(forward, *arguments, **named):
            if forward is model.forwards.prompts and self.scheduler is not None:
                fault()
            return run(forward, *arguments, **named)

        model.forwards.run = faulty

    def once(self, error: BaseException, call: int = 1) -> Callable[[], None]:
        def fault():
            self.happened += 1
            if self.happened == call:
                raise error

        return fault

    def wrap_session(self, **methods) -> None:
        """The decoder's drafter with sessions of which ``methods`` replace some; each gets the session it wraps, and
        then its own arguments."""
        inner = self.decoder.drafter

        class Session(DraftSession):
            def __init__(self, session):
                self.session = session

            def begin(self, prompts):
                return methods.get("begin", type(self.session).begin)(self.session, prompts)

            def observe(self, texts, starts):
                self.session.observe(texts, starts)

            def propose(self, step):
                return methods.get("propose", type(self.session).propose)(self.session, step)

            def end(self, row, output):
                return methods.get("end", type(self.session).end)(self.session, row, output)

        class Wrapped(Drafter):
            def start(self, batch):
                if "start" in methods:
                    methods["start"](batch)
                return Session(inner.start(batch))

        self.decoder.drafter = Wrapped()


def check_others(outcomes: dict[int, SequenceState], faultless: list[list[int]]) -> None:
    """But for the faulty one, all is as without the fault."""
    for number, tokens in enumerate(faultless):
        if number != FAULTY:
            assert (outcomes[number].tokens, outcomes[number].finish_reason) == (tokens, FinishReason.LENGTH), number
            assert (outcomes[number].error, outcomes[number].status) == (None, 0)
    text = outcomes[FAULTY].tokens
    assert text == faultless[FAULTY][: len(text)]


# ---- faults that end the request ----------------------------------------------------------------------------


def logits_are(value: float, call: int, columns=slice(None)):
    def inject(setup: Setup) -> None:
        def fault(logits, tokens, row):
            setup.happened += 1
            if setup.happened == call:
                logits[row][columns] = value

        setup.on_logits(setup.decoder.target, fault)

    return inject


def cache_is_poisoned(setup: Setup) -> None:
    """All of the row, also what no query sees."""

    def fault(logits, tokens, row):
        setup.happened += 1
        if setup.happened == 2:
            for layer in setup.scheduler.batch.state.target_cache.layers:
                layer.keys[row], layer.values[row] = NAN, NAN

    setup.on_logits(setup.decoder.target, fault)


def prompt_is_poisoned(setup: Setup) -> None:
    """Its last chunk is stored as NaN."""

    def begin(session, prompts):
        for row, prompt in prompts.items():
            if prompt == setup.prompt():
                setup.scheduler.batch.state.target_cache.layers[0].values[row, :, len(prompt) - 2] = NAN
        type(session).begin(session, prompts)

    setup.wrap_session(begin=begin)


def processor(answer, call: int = 1):
    return lambda setup: setup.change(logits_processor=[Processor(answer, call)])


def stop(answer, call: int = 2):
    return lambda setup: setup.change(stop=Stop(answer, call))


def prefill_raises(error: Exception, call: int):
    return lambda setup: setup.on_prefill(setup.decoder.target, setup.once(error, call))


STOP = r"ValueError: stop: got {} from first_end, allowed: None, or 1 to \d: how many of the new tokens are kept"
# name -> (injection, its error, or status)
ENDING = {
    "nan_in_the_first_row_after_the_prompt": (logits_are(NAN, 1), Status.TARGET_NAN),
    "nan_in_the_middle": (logits_are(NAN, 3), Status.TARGET_NAN),
    "one_nan": (logits_are(NAN, 2, (slice(None), 7)), Status.TARGET_NAN),
    "infinity": (logits_are(INF, 2, (slice(None), 7)), Status.TARGET_POSITIVE_INFINITY),
    "nothing_is_possible": (logits_are(-INF, 2), Status.TARGET_EMPTY),
    "everything_is_banned": (lambda setup: setup.change(banned_tokens=range(101)), Status.TARGET_EMPTY),
    "cache_is_poisoned": (cache_is_poisoned, Status.TARGET_NAN),
    "prompt_is_poisoned": (prompt_is_poisoned, Status.TARGET_NAN),
    "processor_raises": (processor(KeyError("mine")), "KeyError: 'mine'"),
    "processor_raises_later": (processor(RuntimeError("late"), 9), "RuntimeError: late"),
    "processor_stops_iteration": (processor(StopIteration(), 3), "StopIteration: "),
    "processor_of_a_wrong_shape": (
        processor(lambda scores: scores[:, 1:], 4),
        r"ValueError: logits_processor: got scores of shape \[1, 100\] back, allowed: shape \[1, 101\].*",
    ),
    "processor_of_nothing": (processor(lambda scores: None, 2), "ValueError: logits_processor: got None back.*"),
    "processor_of_nan": (processor(lambda scores: scores * NAN, 5), Status.TARGET_NAN),
    "stop_raises": (stop(OSError("gone")), "OSError: gone"),
    "stop_raises_at_once": (stop(OSError("gone"), 1), "OSError: gone"),
    "stop_of_0": (stop(0), STOP.format(0)),
    "stop_before_the_new_tokens": (stop(-2), STOP.format(-2)),
    "stop_after_the_new_tokens": (stop(lambda new: new + 1), STOP.format(r"\d")),
    "stop_says_true": (stop(True), STOP.format("True")),
    "stop_of_text": (stop("1"), STOP.format("'1'")),
    "prefill_raises": (prefill_raises(RuntimeError("bad prompt"), 1), "RuntimeError: bad prompt"),
    "prefill_raises_later": (prefill_raises(ConnectionError("no device"), 2), "ConnectionError: no device"),
}


@pytest.mark.parametrize(
    "async_scheduling", [False, pytest.param(True, marks=pytest.mark.nightly)], ids=["in_time", "async_scheduling"]
)
@pytest.mark.parametrize("fault", cases(ENDING))
def test_a_fault_ends_its_own_request(fault, async_scheduling):
    inject, why = ENDING[fault]
    setup = Setup(async_scheduling=async_scheduling)
    inject(setup)
    outcomes = setup.run()
    faulty, expected = outcomes[FAULTY], texts()
    assert faulty.finish_reason == FinishReason.FAILED and len(faulty.tokens) < len(expected[FAULTY])
    if isinstance(why, Status):
        assert int(faulty.status) & int(why) and faulty.error is None
    else:
        assert re.fullmatch(why, faulty.error) and faulty.status == 0
    check_others(outcomes, expected)
    check_empty(setup.scheduler)


# ---- faults that end nothing --------------------------------------------------------------------------------


def nan_after_the_rejected(setup: Setup) -> None:
    """Logits that no draw consults."""

    def fault(logits, tokens, row):
        argmax, drafts = logits[row].argmax(-1).tolist(), tokens[row, 1:].tolist()
        accepted = next((i for i, d in enumerate(drafts) if d != argmax[i]), len(drafts))
        if accepted < len(drafts):
            setup.happened += 1
            logits[row, accepted + 1 :] = NAN

    setup.on_logits(setup.decoder.target, fault)


def draft_logits_are(value: float):
    def inject(setup: Setup) -> None:
        def fault(logits, tokens, row):
            setup.happened += 1
            logits[row] = value

        setup.on_logits(setup.decoder.drafter.model, fault)

    return inject


def draft_cache_is_poisoned(setup: Setup) -> None:
    def propose(session, step):
        if setup.row() is not None:
            setup.happened += 1
            for layer in session.cache.layers:
                layer.keys[setup.row()], layer.values[setup.row()] = NAN, NAN
        return type(session).propose(session, step)

    setup.wrap_session(propose=propose)


def drafts_of_its_row(change: Callable[[Drafts, int], None]):
    def inject(setup: Setup) -> None:
        def propose(session, step):
            drafts = type(session).propose(session, step)
            if (row := setup.row()) is not None:
                setup.happened += 1
                change(drafts, row)
            return drafts

        setup.wrap_session(propose=propose)

    return inject


def prefill_out_of_memory_once(setup: Setup) -> None:
    setup.on_prefill(setup.decoder.target, setup.once(torch.OutOfMemoryError("once")))


OUT_OF_RANGE = {"match": None, "status": Status.DRAFT_OUT_OF_RANGE}
NO_NUMBERS = {"match": "its draft logits are NaN or infinite"}
# name -> (injection, what is said of it)
PASSING = {
    "nan_after_the_rejected": (nan_after_the_rejected, {"match": None}),
    "draft_nan": (draft_logits_are(NAN), {**NO_NUMBERS, "status": Status.DRAFT_NAN}),
    "draft_infinity": (draft_logits_are(INF), {**NO_NUMBERS, "status": Status.DRAFT_POSITIVE_INFINITY}),
    "draft_of_nothing": (draft_logits_are(-INF), {"match": None, "status": Status.DRAFT_EMPTY}),
    "draft_cache_is_poisoned": (draft_cache_is_poisoned, {**NO_NUMBERS, "status": Status.DRAFT_NAN}),
    "drafts_beyond_the_vocabulary": (drafts_of_its_row(lambda d, row: d.tokens[row].fill_(101)), OUT_OF_RANGE),
    "huge_drafts": (drafts_of_its_row(lambda d, row: d.tokens[row].fill_(2**62)), OUT_OF_RANGE),
    "negative_drafts": (drafts_of_its_row(lambda d, row: d.tokens[row].fill_(-7)), OUT_OF_RANGE),
    "prefill_out_of_memory_once": (prefill_out_of_memory_once, {"match": "out of memory in prefill: 2 tokens"}),
}


@pytest.mark.parametrize("fault", cases(PASSING))
def test_a_fault_costs_no_text(fault, monkeypatch):
    inject, said = PASSING[fault]
    if inject is draft_cache_is_poisoned:
        masked(monkeypatch)  # native attention never reads what is left in a row
    setup = Setup()
    inject(setup)
    with pytest.warns(RuntimeWarning, match=said["match"]) if said["match"] else nullcontext():
        outcomes = setup.run()
    assert setup.happened
    faulty = outcomes[FAULTY]
    assert (faulty.tokens, faulty.finish_reason, faulty.error) == (texts()[FAULTY], FinishReason.LENGTH, None)
    assert int(faulty.status) == int(said.get("status", 0)) or int(faulty.status) & int(said.get("status", 0))
    assert setup.scheduler.drafter_error is None
    check_others(outcomes, texts())
    check_empty(setup.scheduler)


# ---- faults that end all drafting ---------------------------------------------------------------------------


def always(error: Exception):
    def raises(*_):
        raise error

    return raises


def all_drafts(change: Callable[[Drafts], object]):
    return {"propose": lambda session, step: change(type(session).propose(session, step))}


DROPPING = {
    "start_raises": {"start": always(MemoryError("no room"))},
    "begin_raises": {"begin": always(ValueError("this text"))},
    "propose_raises": {"propose": always(RuntimeError("no luck"))},
    "nothing": all_drafts(lambda d: None),
    "lists": all_drafts(lambda d: d._replace(tokens=d.tokens.tolist())),
    "floats": all_drafts(lambda d: d._replace(tokens=d.tokens.float())),
    "too_few_rows": all_drafts(lambda d: d._replace(tokens=d.tokens[1:])),
    "too_many_columns": all_drafts(lambda d: d._replace(tokens=d.tokens.repeat(1, 4))),
    "logits_of_another_vocabulary": all_drafts(lambda d: d._replace(logits=torch.zeros(*d.tokens.shape, 99))),
    "integer_logits": all_drafts(lambda d: d._replace(logits=torch.zeros(*d.tokens.shape, 101, dtype=torch.int64))),
    "statistics_without_logits": all_drafts(lambda d: d._replace(stats=(d.tokens.float(), d.tokens.float()))),
    "status_of_floats": all_drafts(lambda d: d._replace(status=d.status.float())),
    "forwards_of_nothing": all_drafts(lambda d: d._replace(forwards=None)),
}


@pytest.mark.parametrize("fault", cases(DROPPING))
def test_a_drafter_that_fails_is_dropped_and_texts_stay(fault):
    """Greedy ones; the distribution of the others does, too."""
    setup = Setup(greedy=True)
    setup.wrap_session(**DROPPING[fault])
    with drops_drafter():
        outcomes = setup.run()
    assert setup.scheduler.drafter_error
    check_others(outcomes, texts(greedy=True))
    assert all(outcome.stats.drafted == 0 for outcome in outcomes.values())
    check_empty(setup.scheduler)


def once(error: Exception, call: int, name: str):
    """Wraps the session's method ``name`` such that it raises when it is called for the ``call``-th time."""

    def inject(setup: Setup) -> None:
        fault = setup.once(error, call)

        def method(session, *arguments):
            fault()
            return getattr(type(session), name)(session, *arguments)

        setup.wrap_session(**{name: method})

    return inject


def in_a_forward(error: Exception, call: int):
    return lambda setup: setup.on_forward(setup.decoder.drafter.model, setup.once(error, call))


def in_its_prompt(setup: Setup) -> None:
    setup.on_prefill(setup.decoder.drafter.model, setup.once(RuntimeError("no luck")))


LATER = {
    "propose": once(RuntimeError("no luck"), 4, "propose"),
    "begin": once(ValueError("no luck"), 3, "begin"),
    "end": once(ValueError("no luck"), 1, "end"),
    "a_forward": in_a_forward(torch.OutOfMemoryError("no luck"), 5),
    "reading_a_prompt": in_its_prompt,
}


@pytest.mark.parametrize("fault", LATER)
def test_sampled_texts_do_not_depend_on_a_drafter_that_fails_in_the_middle(fault):
    """With rule coupled, where they depend on the target alone. It is not asked again."""
    setup = Setup(rule="coupled")
    LATER[fault](setup)
    with drops_drafter("no luck"):
        outcomes = setup.run()
    check_others(outcomes, texts("coupled"))
    assert outcomes[FAULTY].tokens == texts("coupled")[FAULTY] and setup.scheduler.drafter_error.endswith("no luck")
    happened = setup.happened
    check_empty(setup.scheduler)
    assert setup.happened == happened and sum(outcome.stats.drafted for outcome in outcomes.values()) < 40


def test_a_field_that_is_wrong_is_named_and_nothing_is_taken():
    s = scheduler()
    for fields, name in BAD_FIELDS:
        with pytest.raises(ValueError, match=rf"^{name}: got .*, allowed: "):
            s.submit(Request(**{"prompt": [1, 2], "max_new_tokens": 3, **fields}))
    with pytest.raises(ValueError, match="^request: got dict"):
        s.submit({"prompt": [1]})
    assert s.idle and s.submit(Request([1], 1)) == 0
    assert finish(s)[0].finish_reason == FinishReason.LENGTH


BAD_FIELDS = [
    ({"prompt": []}, "prompt"),
    ({"prompt": 5}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": "text"}, "prompt"),
    ({"prompt": [1, 101]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [2**70]}, "prompt"),
    ({"prompt": [1.5]}, "prompt"),
    ({"prompt": torch.tensor([[1, 2]])}, "prompt"),
    ({"prompt": [1] * 30}, "prompt"),  # with 3 new ones they do not fit
    ({"max_new_tokens": 31}, "prompt"),
    ({"max_new_tokens": -1}, "max_new_tokens"),
    ({"max_new_tokens": 2.0}, "max_new_tokens"),
    ({"params": 0.5}, "params"),
    ({"seed": "7"}, "seed"),
    ({"seed": 2**64}, "seed"),
    ({"seed": None}, "seed"),
    ({"eos_token_id": 1.5}, "eos_token_id"),
    ({"eos_token_id": "x"}, "eos_token_id"),
    ({"eos_token_id": list(range(9))}, "eos_token_id"),
    ({"stop": 5}, "stop"),
    ({"logit_bias": {101: 1.0}}, "logit_bias"),
    ({"logit_bias": {1: NAN}}, "logit_bias"),
    ({"logit_bias": 5}, "logit_bias"),
    ({"banned_tokens": 5}, "banned_tokens"),
    ({"banned_tokens": [101]}, "banned_tokens"),
    ({"min_new_tokens": 4}, "min_new_tokens"),
    ({"logits_processor": 5}, "logits_processor"),
    ({"logits_processor": [5]}, "logits_processor"),
]


def test_ends_that_are_no_tokens_end_nothing():
    """Also those that no tensor of integers holds."""
    s = scheduler()
    s.submit(Request([1, 2], 5, eos_token_id=[2**70, -1, 101]))
    assert finish(s)[0].finish_reason == FinishReason.LENGTH
