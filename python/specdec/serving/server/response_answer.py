"""Answers ``POST /v1/responses``: what a model thinks, says and calls as items, whole or as events."""

from __future__ import annotations

import copy
import json
import time
import uuid
from collections.abc import Iterator
from typing import Any, NamedTuple

from .answer import Answer
from .answer_reader import AnswerReader, Delta
from .chat_form import ChatForm
from .decoded_text import DecodedText
from .errors import ApiError
from .events import Write
from .plan import Plan
from .request_bodies import ChatRequest
from .response_body import ResponsesRequest
from .service import Service

Event = dict[str, Any]


class _Text(NamedTuple):
    """Items with a text: how their ids begin, what they and their parts have, and what events of the text have."""

    prefix: str
    item: dict[str, Any]
    part: dict[str, Any]
    event: dict[str, Any]


_NO_LOG_PROBS: dict[str, Any] = {"logprobs": []}
_TEXTS = {
    "message": _Text(
        "msg",
        {"role": "assistant"},
        {"type": "output_text", "text": "", "annotations": [], **_NO_LOG_PROBS},
        _NO_LOG_PROBS,
    ),
    "reasoning": _Text("rs", {"summary": []}, {"type": "reasoning_text", "text": ""}, {}),
}


class Output:
    """The items of one answer, in the order in which it has them, and the events that tell of them.

    Attributes:
        items: as they are so far.
    """

    def __init__(self, reader: AnswerReader):
        self.items: list[dict[str, Any]] = []
        self._reader, self._writes = reader, ""  # the type of the last item, if it may go on

    def push(self, text: str) -> Iterator[Event]:
        yield from self._add(self._reader.push(text))

    def finish(self, status: str) -> Iterator[Event]:
        """The rest, if the text ends here. Its last item has this status."""
        yield from self._add(self._reader.finish())
        if not self.items:
            yield from self._write("message", "")
        yield from self._close(status)

    def _add(self, new: Delta) -> Iterator[Event]:
        for kind, text in (("reasoning", new.reasoning), ("message", new.content)):
            if text:
                yield from self._write(kind, text)
        for call in new.calls:
            yield from self._close("completed")
            item = {"type": "function_call", "id": _id("fc"), "call_id": call.id, "name": call.name, "arguments": ""}
            yield self._begin({**item, "status": "in_progress"})
            yield self._event("function_call_arguments.delta", delta=call.arguments)
            yield self._event("function_call_arguments.done", arguments=call.arguments)
            self.items[-1] |= {"arguments": call.arguments, "status": "completed"}
            yield self._event("output_item.done", item=self.items[-1])

    def _write(self, kind: str, text: str) -> Iterator[Event]:
        own = _TEXTS[kind]
        if self._writes != kind:
            yield from self._close("completed")
            item = {"type": kind, "id": _id(own.prefix), **own.item}
            yield self._begin({**item, "status": "in_progress", "content": []})
            self._writes, self.items[-1]["content"] = kind, [{**own.part}]
            yield self._event("content_part.added", content_index=0, part=own.part)
        self.items[-1]["content"][0]["text"] += text
        yield self._event(f"{own.part['type']}.delta", content_index=0, delta=text, **own.event)

    def _close(self, status: str) -> Iterator[Event]:
        if not self._writes:
            return
        own, item = _TEXTS[self._writes], self.items[-1]
        (part,) = item["content"]
        yield self._event(f"{own.part['type']}.done", content_index=0, text=part["text"], **own.event)
        yield self._event("content_part.done", content_index=0, part=part)
        self._writes, item["status"] = "", status
        yield self._event("output_item.done", item=item)

    def _begin(self, item: dict[str, Any]) -> Event:
        self.items.append(item)
        return self._event("output_item.added", item=item)

    def _event(self, name: str, **fields: Any) -> Event:
        own = {} if "item" in fields else {"item_id": self.items[-1]["id"]}
        place = {"output_index": len(self.items) - 1}
        return copy.deepcopy({"type": f"response.{name}", **own, **place, **fields})


class ResponsesAnswer(Answer):
    """Args:
    body: what was asked for; ``chat``: the same as a chat, of which the plan is.
    """

    def __init__(self, service: Service, body: ResponsesRequest, chat: ChatRequest, plan: Plan):
        self._chat = ChatForm(service, chat, plan)
        super().__init__(service, chat, plan, self._chat)
        self._output = Output(self._chat.readers[0])
        tools = [tool.model_dump(exclude_none=True) for tool in body.tools or []]
        choice = body.tool_choice or "auto"
        form = None if body.text is None else body.text.format
        self._head = {
            "id": _id("resp"),
            "object": "response",
            "created_at": int(time.time()),
            "model": service.name,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": {},
            "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None,
            "store": False,
            "temperature": 1.0 if body.temperature is None else body.temperature,
            "text": {"format": {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)},
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": [{"strict": False, "parameters": {}, **tool} for tool in tools],
            "top_p": 1.0 if body.top_p is None else body.top_p,
            "truncation": "disabled",
        }

    async def whole(self) -> dict[str, Any]:
        (text,) = self._texts
        async for piece in text.pieces():
            for _ in self._output.push(piece.text):
                pass
        text.check()
        for _ in self._output.finish(_status(text)):
            pass
        return self._response(_status(text), text)

    async def stream(self, write: Write) -> None:
        told = 0

        def line(event: Event) -> str:
            nonlocal told
            told += 1
            return f"event: {event['type']}\ndata: {json.dumps({**event, 'sequence_number': told - 1})}\n\n"

        (text,) = self._texts
        for name in ("created", "in_progress"):
            await write(line({"type": f"response.{name}", "response": self._response("in_progress")}))
        try:
            async for piece in text.pieces():
                await write("".join(map(line, self._output.push(piece.text))))
            text.check()
            await write("".join(map(line, self._output.finish(_status(text)))))
            last, error = _status(text), None
        except ApiError as failure:
            last, error = "failed", {"code": "server_error", "message": failure.message}
        response = {**self._response(last, text if error is None else None), "error": error}
        await write(line({"type": f"response.{last}", "response": response}))

    def _response(self, status: str, ended: DecodedText | None = None) -> dict[str, Any]:
        """As it is; ``ended``: its text, once that has ended."""
        response: dict[str, Any] = {**self._head, "status": status, "error": None, "incomplete_details": None}
        response |= {"output": copy.deepcopy(self._output.items), "usage": None}
        if status == "incomplete":
            response["incomplete_details"] = {"reason": "max_output_tokens"}
        if ended is None:
            return response
        totals = self._totals()
        counts = totals["usage"]
        cached = {"cached_tokens": counts["prompt_tokens_details"]["cached_tokens"], "cache_write_tokens": 0}
        thought = counts["completion_tokens_details"]["reasoning_tokens"]
        usage = {"input_tokens": counts["prompt_tokens"], "input_tokens_details": cached}
        usage |= {"output_tokens": counts["completion_tokens"], "output_tokens_details": {"reasoning_tokens": thought}}
        usage |= {"total_tokens": counts["total_tokens"]}
        return {**response, "usage": usage, "metrics": totals["metrics"], "specdec": self._told(ended)}


def _status(text: DecodedText) -> str:
    return "incomplete" if text.finish_reason == "length" else "completed"


def _id(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"
