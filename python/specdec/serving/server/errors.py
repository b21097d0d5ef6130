"""Errors as OpenAI's interface has them."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel
from starlette.responses import JSONResponse
from starlette.types import Scope

_TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """A refusal that the client is told of.

    Args:
        status: of HTTP, 4xx or 5xx.
        code: a short name for programs, and for the log.
        param: the field of the request that it is about.
        headers: of the response.
    """

    def __init__(
        self, status: int, message: str, code: str, param: str | None = None, headers: dict[str, str] | None = None
    ):
        super().__init__(message)
        self.status, self.message, self.code, self.param, self.headers = status, message, code, param, headers

    @classmethod
    def invalid(cls, error: ValueError, param: str | None = None) -> ApiError:
        """What our own checks say of an argument: a message that begins with its name.

        Args:
            param: the client's name for it; None: the same.
        """
        name, _, what = str(error).partition(": ")
        return refused(param or name, what)

    @classmethod
    def unexpected(cls, request_id: str) -> ApiError:
        """What a client is told of an error whose trace is in the log."""
        return cls(500, f"the server failed; its log says more of request {request_id}", "failed")

    def about(self, param: str) -> ApiError:
        """The same error, with the client's name for its field, with which its message begins."""
        message = param + self.message.removeprefix(self.param or "")
        return ApiError(self.status, message, self.code, param or None, self.headers)

    @property
    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self, scope: Scope) -> JSONResponse:
        """What answers a request, whose line in the log gets the code."""
        scope["state"]["log"]["code"] = self.code
        return JSONResponse(self.body, self.status, self.headers)


def refused(field: str, what: str) -> ApiError:
    """Of the value of a field."""
    return ApiError(400, f"{field}: {what}", "invalid_value", field)


def queue_full(told: str) -> ApiError:
    return ApiError(429, told, "queue_full", headers={"Retry-After": "1"})


class Error(BaseModel):
    message: str
    type: str
    param: str | None
    code: str


class ErrorBody(BaseModel):
    """``ApiError.body``, for the description of the interface."""

    error: Error
