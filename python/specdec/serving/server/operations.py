"""What a server tells about itself: its models, whether it lives, whether it takes requests, and its metrics."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from specdec_kernels import __version__

from .errors import ApiError
from .service import Service

router = APIRouter()


@router.get("/v1/models")
async def models(request: Request) -> dict[str, Any]:
    """The one model that is served, in OpenAI's list."""
    return {"object": "list", "data": [await _model(request.app.state.service)]}


@router.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> dict[str, Any]:
    """The model of this name, which may contain slashes."""
    service: Service = request.app.state.service
    if name != service.name:
        raise ApiError(404, f"model: got {name[:60]!r}, allowed: {service.name!r}", "model_not_found", "model")
    return await _model(service)


@router.get("/health")
async def health(request: Request) -> dict[str, str]:
    """200 while the process lives and no engine has died, else 503."""
    _check_engines(request.app.state.service)
    return {"status": "ok"}


@router.get("/ready")
async def ready(request: Request) -> dict[str, str]:
    """200 while requests are taken; 503 while the server starts or drains, or after an engine has died."""
    service: Service = request.app.state.service
    _check_engines(service)
    if service.draining.is_set():
        raise ApiError(503, "the server is shutting down", "shutting_down")
    if not service.lanes.running:
        raise ApiError(503, "the server is starting", "starting")
    return {"status": "ready"}


@router.get("/version")
async def version() -> dict[str, str]:
    return {"version": __version__}


@router.get("/metrics", response_class=Response)
async def metrics(request: Request) -> Response:
    """Metrics in Prometheus' text format, or in OpenMetrics' if the Accept header asks for it."""
    service: Service = request.app.state.service
    body, content_type = service.metrics.render(request.headers.get("accept", ""))
    return Response(body, headers={"Content-Type": content_type})


async def _model(service: Service) -> dict[str, Any]:
    """OpenAI's object, with vLLM's max_model_len."""
    lane = await service.lanes.get()
    return {
        "id": service.name,
        "object": "model",
        "created": service.created,
        "owned_by": "specdec",
        "root": service.name,
        "parent": None,
        "max_model_len": lane.max_length,
    }


def _check_engines(service: Service) -> None:
    stopped = [f"{lane.drafter}/{lane.rule}" for lane in service.lanes.running if lane.engine.stopped is not None]
    if stopped:  # why is for the log, not for those who have no key
        raise ApiError(503, f"stopped engines: {', '.join(stopped)}", "engine_stopped")
