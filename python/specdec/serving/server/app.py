"""The application: routes, guards and errors put together."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route

from . import completions, operations, page, predict
from .errors import ApiError, ErrorBody
from .guards import Guards
from .request_bodies import refusal
from .request_log import Failures, RequestLog
from .service import Service


def create_app(service: Service, on_loopback: bool = False) -> FastAPI:
    """Returns the ASGI application that serves ``service``. The engines of the service end with the application.

    Args:
        on_loopback: whether it is reached by the loopback interface alone; names of other hosts are then refused.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        await service.lanes.close()

    app = FastAPI(
        title="specdec",
        docs_url=None,
        redoc_url=None,
        lifespan=lifespan,
        middleware=_middleware(service, on_loopback),
        responses={kind: {"model": ErrorBody} for kind in ("4XX", "5XX")},
    )
    app.state.service = service

    @app.exception_handler(ApiError)
    async def refused(request: Request, error: ApiError) -> JSONResponse:
        return error.response(request.scope)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        return refusal(error.errors()).response(request.scope)

    @app.exception_handler(HTTPException)
    async def not_found(request: Request, error: HTTPException) -> JSONResponse:
        code = HTTPStatus(error.status_code).name.lower()  # not_found, method_not_allowed
        headers = dict(error.headers) if error.headers else None
        told = str(error.detail)
        if error.status_code in (HTTPStatus.NOT_FOUND, HTTPStatus.METHOD_NOT_ALLOWED):
            told = f"{request.method[:20]} {request.url.path[:100]}: {told}; allowed: {', '.join(offered)}"
        return ApiError(error.status_code, told, code, headers=headers).response(request.scope)

    parts = [part.router for part in (completions, operations, page, predict)]
    routes = [route for each in (app, *parts) for route in each.routes if isinstance(route, Route)]
    offered = [
        f"{method} {route.path_format}" for route in routes for method in sorted((route.methods or set()) - {"HEAD"})
    ]
    for router in parts:
        app.include_router(router)
    shared = bool(service.settings.cors_origins)
    app.add_middleware(RequestLog, routes=routes, answered=service.metrics.answered, shared=shared)
    return app


def _middleware(service: Service, on_loopback: bool) -> list[Middleware]:
    """From the outermost to the innermost; the log is around them."""
    cors: dict[str, Any] = {"allow_methods": ["GET", "POST"], "allow_headers": ["*"]}
    cors["expose_headers"] = ["X-Request-Id"]
    origins = list(service.settings.cors_origins)
    return [
        *([Middleware(CORSMiddleware, allow_origins=origins, **cors)] if origins else []),
        Middleware(Failures),
        Middleware(Guards, service=service, on_loopback=on_loopback),
    ]
