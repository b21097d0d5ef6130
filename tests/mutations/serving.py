"""Of the scheduler and the engine: what one sequence leaves to the next, what is counted, and who is told."""

from .mutation import Mutation, mutations

SCHEDULER = "tests/serving/test_scheduler.py"
FAULTS = "tests/serving/test_serving_faults.py"
ENDS = "tests/serving/test_serving_ends.py"
ENGINE = "tests/serving/test_engine.py"

MUTATIONS: list[Mutation] = [
    *mutations(
        "python/specdec/serving/scheduler.py",
        ENDS,
        {
            "scheduler-leaves-a-row-as-it-was": ("            cache.begin(row)\n", "            pass\n", FAULTS),
            "scheduler-keeps-the-tokens-of-the-cancelled": (
                "        self.ledger.release(task.number)\n",
                "        if task.entry.record.end != End.CANCELLED:\n            self.ledger.release(task.number)\n",
            ),
            "scheduler-lets-the-cancelled-decode": ("            self.batch.end(row)\n", ""),
            "scheduler-cuts-prompts-by-what-waits": (
                "min(done + self.prefill_chunk, len(text) - 1)",
                "min(done + max(self.prefill_chunk // len(self._filled), 1), len(text) - 1)",
                SCHEDULER,
            ),
            "scheduler-passes-by-who-needs-much": (
                "            task, row = self._waiting.popleft(), free.popleft()\n",
                "            task, row = self._waiting.popleft(), free.popleft()\n"
                "            self._waiting.rotate(-1)\n",
                SCHEDULER,
            ),
            "scheduler-loses-outcomes-with-its-reader": (
                "            while self._outcomes:\n                yield self._outcomes.popleft()\n",
                "            outcomes, self._outcomes = self._outcomes, deque()\n            yield from outcomes\n",
            ),
        },
    ),
    *mutations(
        "python/specdec/loop/batch.py",
        ENDS,
        {
            "batch-gives-late-reports-to-who-is-there": (
                "zip(step.records, reports, strict=True)",
                "zip(self.rows, reports, strict=True)",
            ),
        },
    ),
    *mutations(
        "python/specdec/drafters/model.py",
        FAULTS,
        {"drafter-leaves-a-row-as-it-was": ("                self.cache.begin(row)\n", "                pass\n")},
    ),
    *mutations(
        "python/specdec/drafters/guard.py",
        FAULTS,
        {
            "guard-blames-the-first-row": ("for row in [None, *(", "for row in [*("),
            "guard-trusts-any-shape-of-q": ("    check_drafts(tokens, *q,", "    False and check_drafts(tokens, *q,"),
        },
    ),
    *mutations(
        "python/specdec/loop/sequence.py",
        FAULTS,
        {"record-believes-any-stop": (" or not 1 <= kept <= new", "")},
    ),
    *mutations(
        "python/specdec/serving/engine.py",
        ENGINE,
        {
            "engine-goes-on-without-a-reader": ("            self._abandon(stream.task.number)\n", ""),
            "engine-counts-only-what-was-taken": ("check_queue(self._handed_over)", "check_queue()"),
            "engine-dies-in-silence": ("            self._die(error)\n", "            pass\n"),
        },
    ),
]
