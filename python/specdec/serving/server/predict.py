"""``POST /predict``, as ``serving.py`` of LLMSpeculativeSampling answers it.

Source: https://github.com/feifeibear/LLMSpeculativeSampling"""

from __future__ import annotations

import asyncio
import secrets

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field

from specdec_kernels import SamplingParams

from ..requests import Request as DecodingRequest
from .errors import ApiError
from .service import Service
from .texts import Text

router = APIRouter()

# What that program has fixed.
NEW_TOKENS = 40
PARAMS = SamplingParams(temperature=1.0, top_k=10, top_p=0.9)


class Prediction(BaseModel):
    """The body. There it is the only field that is read; here others are refused."""

    model_config = ConfigDict(extra="forbid", strict=True)

    prompt: str = Field(min_length=1, description="The text to continue.")


@router.post("/predict")
async def predict(request: Request, body: Prediction) -> str:
    """Returns a JSON string: the prompt and up to 40 tokens after it, sampled at temperature 1 with top-k 10 and top-p
    0.9. Each request has a seed of its own. Unlike there, the text ends where the model ends it."""
    service: Service = request.app.state.service
    prompt = (await asyncio.to_thread(service.tokenizer, body.prompt)).input_ids
    lane = await service.lanes.get()
    seed = secrets.randbits(63)
    wanted = DecodingRequest(prompt, NEW_TOKENS, PARAMS, seed, banned_tokens=service.tail)
    text = await Text.begin(service.tokenizer, lane, wanted, service.metrics)
    async for _ in text.pieces():
        pass
    assert text.outcome is not None
    if text.finish_reason == "error":
        raise ApiError(500, "the text could not be decoded", code="decoding_failed")
    return str(service.tokenizer.decode([*prompt, *text.outcome.tokens], skip_special_tokens=True))
