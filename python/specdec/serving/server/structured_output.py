"""What a request says of the form of its texts, as a grammar that is compiled beside the engines."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from ...sampling.grammar import Grammar, GrammarCompiler
from ...sampling.grammar_source import GrammarSource
from .errors import ApiError
from .lanes import Lane
from .request_bodies import GenerationBody

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MAKERS = {
    "json": GrammarSource.json_schema,
    "regex": GrammarSource.regex,
    "choice": GrammarSource.choice,
    "grammar": GrammarSource.lark,
}


class Grammars:
    """Compiles the grammars of requests in few threads of its own, so that large ones hold up each other and nothing
    else. The last ones are kept.

    Args:
        tokenizer: of the model that is served.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        self._tokenizer, self._threads = tokenizer, ThreadPoolExecutor(2, "specdec-grammar")
        self._compiler: GrammarCompiler | None = None

    async def of(self, body: GenerationBody, lane: Lane) -> Grammar | None:
        """Returns what the texts of a request have to be; None: anything.

        Raises:
            ApiError: the library cannot hold it, or it does not go together with other fields.
        """
        field = "response_format" if body.structured_outputs is None else "structured_outputs"
        try:
            if (source := _source(body)) is None:
                return None
            for name in ("min_tokens", "ignore_eos"):
                if getattr(body, name):
                    told = f"{name}: not together with {field}, which says where a text ends"
                    raise ApiError(400, told, "invalid_value", name)
            return await asyncio.get_running_loop().run_in_executor(self._threads, self._compile, source, field, lane)
        except ValueError as error:
            raise ApiError.invalid(error, field) from error

    def _compile(self, source: GrammarSource, field: str, lane: Lane) -> Grammar:
        if self._compiler is None:  # all lanes have one target
            self._compiler = GrammarCompiler(self._tokenizer, lane.vocab_size, lane.eos)
        return self._compiler.compile(source, field)


def _source(body: GenerationBody) -> GrammarSource | None:
    """Raises ApiError, or ValueError naming the field."""
    form, outputs = body.response_format, body.structured_outputs
    asked = form is not None and form.type != "text"
    if outputs is not None:
        if asked:
            told = "structured_outputs: not together with response_format"
            raise ApiError(400, told, "invalid_value", "structured_outputs")
        given = {name: value for name, value in outputs.given.items() if value is not None}
        if len(given) != 1:
            told = f"structured_outputs: got {', '.join(given) or 'nothing'}, allowed: one of {', '.join(_MAKERS)}"
            raise ApiError(400, told, "invalid_value", "structured_outputs")
        ((name, value),) = given.items()
        return _MAKERS[name](value, name="structured_outputs")  # type: ignore[operator]
    if form is None or not asked:
        return None
    if form.type == "json_object":
        return GrammarSource.json_object()
    if form.json_schema is None or form.json_schema.schema_ is None:
        told = "response_format: got json_schema without a schema, allowed: one with it"
        raise ApiError(400, told, "invalid_value", "response_format")
    return GrammarSource.json_schema(form.json_schema.schema_, name="response_format")
