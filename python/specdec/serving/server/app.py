"""The application: routes, guards and errors put together."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from . import operations, predict
from .errors import ApiError
from .service import Service


def create_app(service: Service) -> FastAPI:
    """Returns the ASGI application that serves ``service``."""
    app = FastAPI(title="specdec", docs_url=None, redoc_url=None)
    app.state.service = service

    @app.exception_handler(ApiError)
    async def refused(request: Request, error: ApiError) -> JSONResponse:
        return JSONResponse(error.body, error.status, error.headers)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        param = ".".join(map(str, first["loc"][1:])) or None
        told = ApiError(400, f"{param or 'body'}: {first['msg']}", param, first["type"])
        return JSONResponse(told.body, told.status)

    @app.exception_handler(HTTPException)
    async def not_found(request: Request, error: HTTPException) -> JSONResponse:
        told = ApiError(error.status_code, str(error.detail))
        return JSONResponse(told.body, error.status_code, error.headers)

    for routes in (operations, predict):
        app.include_router(routes.router)
    return app
