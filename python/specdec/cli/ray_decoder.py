"""Decoders on the nodes of a Ray cluster: what an actor of Ray Data holds. ``specdec.ray`` is its other name.

Importing this needs no Ray; Ray Data makes objects of these classes."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ..jobs.lines import KEYS, STANDARD_INPUT, JobLine, LineReader, LineSettings
from ..jobs.output import COUNTS, COUNTS_BY_POSITION
from ..jobs.result_line import ERROR, LOG_PROB_KEYS
from ..jobs.run import RequestMaker, result_of
from ..loop.sequence import SequenceState
from ..serving.engine import Engine, EngineStopped
from ..serving.scheduler import QueueFull, Scheduler
from .drafting import GenerateDrafts, read_num_drafts
from .job_decoders import scheduler_of
from .models import ModelOptions, Models
from .options import MachineOptions, SchedulingOptions
from .user_errors import as_arguments

if TYPE_CHECKING:
    import pyarrow

AS_JSON = ("top_log_probs", "prompt_log_probs")  # lists of pairs of different types, which Arrow has not
WAIT_SECONDS = 0.05  # before a prompt that found no place asks again


class LineDecoder:
    """Decodes the lines of jobs on one device, those of several batches side by side.

    Args:
        make: makes the scheduler, and what makes requests of lines, in the process that decodes.
    """

    def __init__(self, make: Callable[[], tuple[Scheduler, Models]]):
        scheduler, loaded = make()
        self.tokenizer = loaded.tokenizer
        self._make = RequestMaker(loaded.tokenizer, loaded.tail, scheduler.decoder.grammar_compiler)
        self._engine = Engine(scheduler)

    async def __call__(self, batch: dict[str, Any]) -> dict[str, list[str]]:
        """
        Args:
            batch: ``line``: objects that are a ``JobLine`` each.

        Returns:
            ``result``: the lines of an output file, as JSON, in the same order. ``drafter_error``: why the drafter was
            dropped, in each; "": it was not.
        """
        results = await asyncio.gather(*(self.result(line) for line in batch["line"]))
        drafter_error = [self._engine.drafter_error or ""] * len(results)
        return {"result": [json.dumps(result) for result in results], "drafter_error": drafter_error}

    async def result(self, line: JobLine) -> dict[str, Any]:
        """Raises EngineStopped, which is no text's fault: then there is no result."""
        request = self._make(line)
        while True:
            try:
                number = await self._engine.submit(request)
                break
            except QueueFull:
                await asyncio.sleep(WAIT_SECONDS)
            except ValueError as error:
                return result_of(SequenceState.refused(request, error), self.tokenizer)
        decoded = await self._engine.result(number)
        if self._engine.stopped is not None:
            raise EngineStopped(self._engine.stopped)
        return result_of(decoded, self.tokenizer)


class Decoder:
    """A class for ``map_batches`` of Ray Data: each of its actors holds one decoder, whose rows stay busy over the ends
    of batches.

    A row of the dataset is what a line of a job is: a ``prompt`` or ``messages``, an ``id``, and settings of its own by
    the names of lines, such as ``max_new_tokens`` or ``temperature``; a setting that is missing or None is that of
    ``defaults``. ``json_schema`` and ``logit_bias`` are JSON texts or objects. Further columns stay as they are. The
    row gets ``text``, ``token_ids``, ``produced_by``, ``finish_reason``, ``status`` and ``stats`` as lines of an
    output have them, log-probabilities where they were asked for (``top_log_probs`` and ``prompt_log_probs`` as JSON),
    and ``error`` where it failed, as a row does that is not right: the others go on.

    Texts depend on their row alone where the rule is "coupled" or the temperature 0. Rows without ``seed`` have that
    of ``defaults``, so equal prompts have equal texts.

    Args:
        target: folder or hub name, as every node sees it, or GGUF file. None: the embedded pair.
        draft: the same of a draft model.
        drafter: who proposes tokens, by the names of ``specdec generate --drafter``. None: the draft, or the text.
        num_drafts: K >= 0, or "auto". None: as ``specdec generate --output``.
        tree: N >= 1, the nodes of a tree of drafts.
        rule: "token", "block" or "coupled". None: as ``specdec generate``.
        defaults: settings of rows, by name.
        device: of torch. None: a GPU if the actor has one.
        dtype: of the weights, by name.
        adapter: folder of a peft adapter of the target.
        draft_bits: 8: the draft's weights are rounded to so many bits.
        scheduling: ``rows``, ``max_length``, ``cache_tokens``, ``cache_bytes`` and ``prefill_chunk`` of a
            ``Scheduler``.

    Raises:
        ValueError: names the argument, what was given and what is allowed.

    Example:
        >>> import asyncio
        >>> from specdec.ray import Decoder
        >>> decode = Decoder(rows=2, defaults={"max_new_tokens": 4})  # what ray_dataset.map_batches(Decoder, ...) does
        >>> table = asyncio.run(decode({"id": ["a", "b"], "prompt": ["import os", ""]}))
        >>> [len(tokens) for tokens in table["token_ids"]], table["finish_reason"].to_pylist()
        ([4, 0], ['length', 'failed'])
    """

    def __init__(
        self,
        target: str | None = None,
        draft: str | None = None,
        *,
        drafter: str | None = None,
        num_drafts: int | str | None = None,
        tree: int | None = None,
        rule: str | None = None,
        defaults: Mapping[str, Any] | None = None,
        device: str | None = None,
        dtype: str | None = None,
        adapter: str | None = None,
        draft_bits: int | None = None,
        **scheduling: Any,
    ):
        with as_arguments():
            machine = MachineOptions(device=device, dtype=dtype)
            at = ModelOptions(target=target, draft=draft, adapter=adapter, draft_bits=draft_bits, machine=machine)
            k = None if num_drafts is None else str(num_drafts)
            given = GenerateDrafts(drafter=drafter or "", num_drafts=k, tree=tree, rule=rule)
            drafts = given.for_a_job(at)
            drafts.check(at)
            read_num_drafts(drafts.num_drafts, nodes=drafts.nodes)
            options = SchedulingOptions(**scheduling)
            options.scheduling()
        size = at.vocab_size
        own = LineReader(STANDARD_INPUT, LineSettings(), size).read_given({"prompt": "", **(defaults or {})}, 0)
        self._lines = LineDecoder(lambda: scheduler_of(at, drafts, options))
        self._reader = LineReader(STANDARD_INPUT, own.settings, size, tokenizer=lambda: self._lines.tokenizer)

    async def __call__(self, batch: Any) -> pyarrow.Table:
        """
        Args:
            batch: columns by name, each with a value a row, or a table of Arrow.

        Returns:
            The same with the columns of the results.
        """
        import pyarrow

        is_table = isinstance(batch, pyarrow.Table)
        columns = batch.to_pydict() if is_table else {name: list(map(_plain, batch[name])) for name in batch}
        rows = [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
        results = await asyncio.gather(*(self._result(row) for row in rows))
        table = batch if is_table else pyarrow.table(columns)
        for name, kind in _column_types().items():
            values = [result.get(name) for result in results]
            if name in LOG_PROB_KEYS and values.count(None) == len(values):
                continue
            table = table.append_column(name, pyarrow.array(values, kind))
        return table

    async def _result(self, row: dict[str, Any]) -> dict[str, Any]:
        given = {name: row[name] for name in KEYS if row.get(name) is not None}
        try:
            if isinstance(given.get("logit_bias"), str):
                given["logit_bias"] = json.loads(given["logit_bias"])
            line = self._reader.read_given(given, 0)
        except ValueError as error:
            failed = {"finish_reason": "failed", "status": ERROR, "error": str(error)}
            return {"text": "", "token_ids": [], "produced_by": [], **failed}
        result = await self._lines.result(line)
        return result | {name: json.dumps(result[name]) for name in AS_JSON if name in result}


def _column_types() -> dict[str, Any]:
    """Of the results. Without them a block whose texts have one length would have other types than the next one."""
    import pyarrow as pa

    counts = [(name, pa.int64()) for name in COUNTS] + [(name, pa.list_(pa.int64())) for name in COUNTS_BY_POSITION]
    return {
        "text": pa.string(),
        "token_ids": pa.list_(pa.int64()),
        "produced_by": pa.list_(pa.string()),
        "finish_reason": pa.string(),
        "status": pa.string(),
        "stats": pa.struct(counts),
        "error": pa.string(),
        "log_probs": pa.list_(pa.float64()),
        "raw_log_probs": pa.list_(pa.float64()),
        **dict.fromkeys(AS_JSON, pa.string()),
    }


def _plain(value: Any) -> Any:
    """What numpy and Arrow give as an array or a scalar, as JSON would have it; None for NaN, which is pandas' word for
    a missing value."""
    value = value.tolist() if hasattr(value, "tolist") else value
    return None if isinstance(value, float) and math.isnan(value) else value
