"""``POST /predict``, as ``serving.py`` of LLMSpeculativeSampling answers it.

Source: https://github.com/feifeibear/LLMSpeculativeSampling"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field

from .answer import logged
from .completions import owner_of
from .decoded_text import DecodedText
from .errors import ApiError
from .plan import plan_completion
from .request_bodies import CompletionRequest
from .service import Service

router = APIRouter()

# What that program has fixed.
FIXED: dict[str, Any] = {"max_tokens": 40, "temperature": 1.0, "top_k": 10, "top_p": 0.9}


class PredictBody(BaseModel):
    """The body. There it is the only field that is read; here others are refused."""

    model_config = ConfigDict(extra="forbid", strict=True)

    prompt: str = Field(min_length=1, description="The text to continue.")


@router.post("/predict")
async def predict(request: Request, body: PredictBody) -> str:
    """Returns a JSON string: the prompt and up to 40 tokens after it, sampled at temperature 1 with top-k 10 and top-p
    0.9. Each request has a seed of its own. Unlike there, the text ends where the model ends it."""
    service: Service = request.app.state.service
    asked = CompletionRequest(model=service.name, prompt=body.prompt, **FIXED)
    plan = await plan_completion(service, asked, owner_of(request))
    try:
        text = await DecodedText.begin(service.detokenizer, plan.lane, plan.requests[0], service.metrics)
    except ApiError as error:
        raise plan.renamed(error) from error
    try:
        async for _ in text.pieces():
            pass
    finally:
        await text.close()
        request.state.log.update(logged(plan, [text], stream=False))
    text.check()
    assert text.ended is not None
    tokens = [*plan.prompts[0].tokens, *text.ended.tokens]
    return str(service.tokenizer.decode(tokens, skip_special_tokens=True))
