"""Of the scheduler and the engine: what one sequence leaves to the next, what is counted, and who is told."""

from .mutation import Mutation, mutations

SCHEDULER = "tests/serving/test_scheduler.py"
FAULTS = "tests/serving/test_serving_faults.py"
ENDS = "tests/serving/test_serving_ends.py"
ENGINE = "tests/serving/test_engine.py"
DRAFTING = "tests/serving/test_draft_settings.py"

MUTATIONS: list[Mutation] = [
    *mutations(
        "python/specdec/serving/scheduler.py",
        ENDS,
        {
            "scheduler-reserves-the-prompt-alone": (
                "self.entry.record.prompt_length + self.request.max_new_tokens",
                "self.entry.record.prompt_length",
                "tests/serving/test_scheduler_memory.py::test_promises_come_back",
            ),
            "scheduler-reads-long-prompts-at-once": (
                "while self._filled and read < self.prefill_chunk:",
                "while self._filled:",
                f"{SCHEDULER}::test_nothing_is_promised_twice_or_lost",
            ),
            "scheduler-goes-on-reading-for-the-cancelled": ("        self._filled.pop(row, None)\n", ""),
            "scheduler-decodes-what-was-cancelled-in-the-queue": (
                "            self._waiting.remove(task)\n",
                "",
            ),
            "scheduler-cancels-in-the-middle-of-a-step": (
                "        if self._stepping:\n            self._to",
                "        if False:\n            self._to",
            ),
            "scheduler-queues-one-too-many": ("+ coming) >= self.max_waiting:", "+ coming) > self.max_waiting:"),
            "scheduler-takes-more-than-may-wait": (
                "while more and len(self._waiting) < ahead:",
                "while more:",
            ),
            "scheduler-waits-for-nobody": ("self.batch.waiting = self._rooms_of_waiting()", "pass", SCHEDULER),
            "scheduler-forgets-prompts-that-are-read": (
                "(*(self._in_rows[row] for row in self._filled), *self._waiting)",
                "self._waiting",
                SCHEDULER,
            ),
            "scheduler-counts-prompts-as-decoding": (
                "live=len(self._in_rows) - len(self._filled),",
                "live=len(self._in_rows),",
                f"{SCHEDULER}::test_nothing_is_promised_twice_or_lost",
            ),
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
        "python/specdec/loop/batch.py",
        DRAFTING,
        {
            "batch-forgets-caps": ("min(n := wanted.get(row, 0), caps.get(row, n))", "wanted.get(row, 0)"),
            "batch-caps-the-first-row-only": ("caps.get(row, n)) for row", "caps.get(0, n)) for row"),
        },
    ),
    *mutations(
        "python/specdec/loop/sequence.py",
        DRAFTING,
        {"emission-tells-drafts-to-all": ("drafts if self.drafting.reported else None", "drafts")},
    ),
    *mutations(
        "python/specdec/loop/step_report.py",
        DRAFTING,
        {
            "report-tells-drafts-that-did-not-count": (
                "num_accepted, status, of_row, drafts))",
                "num_accepted, status, of_row, numbers[num_drafts + 1 : 2 * num_drafts + 1]))",
            )
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
            "guard-trusts-any-shape-of-q": ("    check_drafts(rows, *q,", "    False and check_drafts(rows, *q,"),
        },
    ),
    *mutations(
        "python/specdec/loop/sequence.py",
        FAULTS,
        {"record-believes-any-stop": (" or not 1 <= kept <= new", "")},
    ),
    *mutations(
        "python/specdec/serving/requests.py",
        FAULTS,
        {
            "request-may-not-fill-its-row": (
                "+ request.max_new_tokens > limits.max_length:",
                "+ request.max_new_tokens >= limits.max_length:",
                "tests/serving/test_scheduler_memory.py::test_allocated_at_once_within_the_budget",
            ),
            "request-has-the-ends-of-the-model": (
                "read_eos(request.eos_token_id, target.model)",
                "read_eos(None, target.model)",
                "tests/serving/test_scheduler.py -k ends",
            ),
        },
    ),
    *mutations(
        "python/specdec/serving/threads.py",
        "tests/serving/test_threads.py::test_the_callers_count_is_the_threads tests/serving/test_engine.py::test_the_thread_sleeps_and_keeps_the_number_of_threads",
        {"thread-computes-on-all-processors": ("        torch.set_num_threads(count)\n", "")},
    ),
    *mutations(
        "python/specdec/serving/engine.py",
        ENGINE,
        {
            "engine-remembers-who-has-ended": (
                "stream = self._open.pop(number) if isinstance(update, Outcome) else self._open[number]",
                "stream = self._open[number]",
            ),
            "engine-leaves-those-who-cancel-waiting": (
                "                    self._answer(item, False)\n",
                "                    pass\n",
            ),
            "engine-decodes-for-a-loop-that-is-gone": (
                "                self._forget(loop)\n",
                "                pass\n",
            ),
            "engine-lets-two-read-a-stream": ("            del self._unread[number]\n        return", "        return"),
            "engine-goes-on-without-a-reader": ("            self._abandon(stream.task.number)\n", ""),
            "engine-counts-only-what-was-taken": ("check_queue(self._handed_over)", "check_queue()"),
            "engine-dies-in-silence": ("            self._die(error)\n", "            pass\n"),
        },
    ),
]
