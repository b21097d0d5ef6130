"""What a request says of the form of its texts, as a grammar that is compiled beside the engines."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TypeAlias

from transformers import PreTrainedTokenizerBase

from ...sampling.grammar import Grammar, GrammarCompiler
from ...sampling.grammar_limits import LANES
from ...sampling.grammar_source import GrammarSource
from .call_grammar import CallGrammar
from .errors import ApiError, queue_full, refused
from .lanes import Lane
from .request_bodies import GenerationBody, ResponseFormat, StructuredOutputs

_Asked: TypeAlias = ResponseFormat | StructuredOutputs | CallGrammar
_MOST_WAITING = 256  # for their grammars; as many texts may wait for rows
_MAKERS = {
    "json": GrammarSource.json_schema,
    "regex": GrammarSource.regex,
    "choice": GrammarSource.choice,
    "grammar": GrammarSource.lark,
}


class Grammars:
    """Compiles the grammars of requests beside the engines: those that take long hold up each other and nothing else,
    and those of clients who have left are given up. The last ones are kept.

    Args:
        tokenizer: of the model that is served.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._tokenizer, self._waiting = tokenizer, 0
        self._quick = ThreadPoolExecutor(2, "specdec-grammar")
        self._slow = ThreadPoolExecutor(1, "specdec-large-grammar")
        self._compiler: GrammarCompiler | None = None

    async def of(self, body: GenerationBody, calls: CallGrammar | None, lane: Lane) -> Grammar | None:
        """Returns what the texts of a request have to be; None: anything.

        Args:
            calls: the grammar of its answers, if they have to call tools.

        Raises:
            ApiError: the library cannot hold it, it does not go together with other fields, or too many wait.
        """
        form, outputs = body.response_format, body.structured_outputs
        if form is not None and form.type == "text":
            form = None
        given = {"response_format": form, "structured_outputs": outputs, "tools": calls}
        asked = {name: value for name, value in given.items() if value is not None}
        if not asked:
            return None
        field, *others = reversed(asked)
        if others:
            raise refused(field, f"not together with {others[0]}")
        for name in ("min_tokens", "ignore_eos"):
            if getattr(body, name):
                raise refused(name, f"not together with {field}: a grammar says where a text ends")
        if self._waiting >= _MOST_WAITING:
            raise queue_full(f"{self._waiting} grammars wait to be compiled, allowed: {_MOST_WAITING}")
        self._waiting += 1
        try:
            if self._compiler is None:  # all lanes have one target
                self._compiler = GrammarCompiler(self._tokenizer, lane.vocab_size, lane.eos)
            return await self._compiled(self._compiler, field, asked[field])
        except ValueError as error:
            raise ApiError.invalid(error, field) from error
        finally:
            self._waiting -= 1

    async def _compiled(self, compiler: GrammarCompiler, field: str, asked: _Asked) -> Grammar:
        loop = asyncio.get_running_loop()
        source = await loop.run_in_executor(self._quick, _source_of, asked)
        if (kept := compiler.kept(source)) is not None:
            return kept
        # The first trial of all begins a process, which takes longer than other requests should wait.
        verdict = await asyncio.wrap_future(await loop.run_in_executor(self._quick, compiler.trial, source, field))
        threads = self._quick if verdict.seconds < LANES[0].cpu_seconds else self._slow
        return await loop.run_in_executor(threads, compiler.tried, source, verdict, field)


def _source_of(asked: _Asked) -> GrammarSource:
    if isinstance(asked, CallGrammar):
        return asked.source()
    return _of_format(asked) if isinstance(asked, ResponseFormat) else _of_outputs(asked)


def _of_format(form: ResponseFormat) -> GrammarSource:
    if form.type == "json_object":
        return GrammarSource.json_object()
    if form.json_schema is None or form.json_schema.schema_ is None:
        raise refused("response_format", "got json_schema without a schema, allowed: one with it")
    return GrammarSource.json_schema(form.json_schema.schema_, name="response_format")


def _of_outputs(outputs: StructuredOutputs) -> GrammarSource:
    given = {name: value for name, value in outputs.given.items() if value is not None}
    if len(given) != 1:
        names = ", ".join(_MAKERS)
        raise refused("structured_outputs", f"got {', '.join(given) or 'nothing'}, allowed: one of {names}")
    ((name, value),) = given.items()
    return _MAKERS[name](value, name="structured_outputs")
