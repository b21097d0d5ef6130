"""``POST /v1/completions``, ``/v1/chat/completions`` and ``/v1/responses``."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from ...detokenize import continuation
from .answer import Answer
from .chat_form import ChatForm
from .decoded_text import DecodedText, Piece, Token, spelled
from .errors import ApiError
from .events import EventStream
from .plan import Plan, plan_chat, plan_completion
from .request_bodies import ChatRequest, CompletionRequest
from .response_answer import ResponsesAnswer
from .response_body import ResponsesRequest, as_chat, renamed
from .service import Service

router = APIRouter(prefix="/v1")


@router.post("/completions")
async def completions(request: Request, body: CompletionRequest) -> Response:
    service: Service = request.app.state.service
    plan = await plan_completion(service, body, owner_of(request))
    return await respond(request, Answer(service, body, plan, CompletionForm(service, body, plan)), body.stream)


@router.post("/chat/completions")
async def chat_completions(request: Request, body: ChatRequest) -> Response:
    service: Service = request.app.state.service
    plan = await plan_chat(service, body, owner_of(request))
    return await respond(request, Answer(service, body, plan, ChatForm(service, body, plan)), body.stream)


@router.post("/responses")
async def responses(request: Request, body: ResponsesRequest) -> Response:
    service: Service = request.app.state.service
    chat = as_chat(body)
    try:
        plan = await plan_chat(service, chat, owner_of(request))
        return await respond(request, ResponsesAnswer(service, body, chat, plan), body.stream)
    except ApiError as error:
        raise renamed(error) from error


def owner_of(request: Request) -> Any:
    """Whose key the request came with; None: without keys."""
    return getattr(request.state, "owner", None)


async def respond(request: Request, answer: Answer, stream: bool | None) -> Response:
    """Decodes what was planned. Where the client leaves, this is cancelled, and so are the texts."""
    await answer.begin()

    async def close() -> None:
        await answer.close()
        request.state.log.update(answer.logged)

    if stream:
        return EventStream(answer.stream, close)
    try:
        return JSONResponse(await answer.whole())
    finally:
        await close()


class CompletionForm:
    prefix, object, chunk_object = "cmpl-", "text_completion", "text_completion"

    def __init__(self, service: Service, body: CompletionRequest, plan: Plan):
        self._names, self._tokenizer, self._body, self._plan = service.names, service.tokenizer, body, plan

    def choice(self, index: int, text: DecodedText, whole: Piece) -> dict[str, Any]:
        tokens, echo = whole.tokens, ""
        if self._body.echo:
            echo = self._echo(index)
            prompt = spelled(self._tokenizer, text.request.prompt, text.prompt_scores(self._body.logprobs))
            tokens = [
                *(token._replace(start=min(token.start, len(echo))) for token in prompt),
                *(token._replace(start=len(echo) + token.start) for token in tokens),
            ]
        return self._part(index, echo + whole.text, tokens)

    def openings(self, index: int) -> list[dict[str, Any]]:
        return [self._part(index, self._echo(index), [])] if self._body.echo else []

    def part(self, index: int, piece: Piece) -> dict[str, Any]:
        return self._part(index, piece.text, piece.tokens)

    def last(self, index: int) -> dict[str, Any]:
        return {"index": index, "text": "", "logprobs": None}

    def finish_reason(self, index: int, text: DecodedText) -> str:
        return text.finish_reason

    def reasoning_tokens(self) -> int:
        return 0

    def _part(self, index: int, text: str, tokens: list[Token]) -> dict[str, Any]:
        asked = self._body.logprobs is not None
        return {"index": index, "text": text, "logprobs": self._names.completion(tokens) if asked else None}

    def _echo(self, index: int) -> str:
        prompt = self._plan.prompts[index // (self._body.n or 1)]
        return prompt.text if prompt.text is not None else continuation(self._tokenizer, [], prompt.tokens)
