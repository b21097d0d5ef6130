"""The choices of ``POST /v1/chat/completions``."""

from __future__ import annotations

from typing import Any

from .answer_reader import Call, Delta
from .decoded_text import DecodedText, Piece, Token
from .plan import Plan
from .request_bodies import ChatRequest
from .service import Service


class ChatForm:
    """Attributes:
    readers: of the texts.
    """

    prefix, object, chunk_object = "chatcmpl-", "chat.completion", "chat.completion.chunk"

    def __init__(self, service: Service, body: ChatRequest, plan: Plan):
        self._names, self._tokenizer, self._body = service.names, service.tokenizer, body
        self.readers = [plan.reading.new_reader() for _ in plan.requests]

    def choice(self, index: int, text: DecodedText, whole: Piece) -> dict[str, Any]:
        reader = self.readers[index]
        reader.push(whole.text)
        reader.finish()
        content = None if reader.calls and not reader.content else reader.content
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        message |= _thought(reader.reasoning)
        if reader.calls:
            message["tool_calls"] = [*map(_call, reader.calls)]
        return {"index": index, "message": message, "logprobs": self._log_probs(whole.tokens)}

    def openings(self, index: int) -> list[dict[str, Any]]:
        return [{"index": index, "delta": {"role": "assistant", "content": "", "refusal": None}, "logprobs": None}]

    def part(self, index: int, piece: Piece) -> dict[str, Any]:
        new = self.readers[index].push(piece.text)
        delta = self._delta(index, new) or {"content": ""}
        return {"index": index, "delta": delta, "logprobs": self._log_probs(piece.tokens)}

    def last(self, index: int) -> dict[str, Any]:
        return {"index": index, "delta": self._delta(index, self.readers[index].finish()), "logprobs": None}

    def finish_reason(self, index: int, text: DecodedText) -> str:
        return "tool_calls" if self.readers[index].calls and text.finish_reason == "stop" else text.finish_reason

    def reasoning_tokens(self) -> int:
        """Those that its text has when it is tokenized again."""
        texts = [reader.reasoning for reader in self.readers if reader.reasoning]
        return sum(map(len, self._tokenizer(texts, add_special_tokens=False).input_ids)) if texts else 0

    def _delta(self, index: int, new: Delta) -> dict[str, Any]:
        delta: dict[str, Any] = _thought(new.reasoning)
        if new.content:
            delta["content"] = new.content
        if new.calls:
            first = len(self.readers[index].calls) - len(new.calls)
            delta["tool_calls"] = [{"index": i, **_call(call)} for i, call in enumerate(new.calls, first)]
        return delta

    def _log_probs(self, tokens: list[Token]) -> dict[str, Any] | None:
        return self._names.chat(tokens) if self._body.logprobs else None


def _thought(text: str) -> dict[str, Any]:
    """Under the name of vLLM and OpenAI's own models, and that of DeepSeek: clients know one of them."""
    return {"reasoning": text, "reasoning_content": text} if text else {}


def _call(call: Call) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
