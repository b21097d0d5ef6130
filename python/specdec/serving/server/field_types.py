"""What the fields of requests are made of. Types are strict, and unknown fields are refused."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler, ValidationError, WrapValidator
from pydantic_core import CoreSchema, PydanticCustomError
from pydantic_core.core_schema import no_info_after_validator_function


def told(allowed: str) -> WrapValidator:
    """Replaces what pydantic says of each member of a union by one message."""

    def read(value: Any, handler: Any) -> Any:
        try:
            return handler(value)
        except ValidationError:
            raise PydanticCustomError("form", "allowed: {allowed}", {"allowed": allowed}) from None

    return WrapValidator(read)


class only:  # noqa: N801  # it is written in annotations, like a function
    """Refuses a field that is not supported, unless its value is one of these, or null."""

    def __init__(self, *harmless: object):
        self._harmless = harmless

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return no_info_after_validator_function(self._read, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {"enum": [None, *self._harmless]}

    def _read(self, value: object) -> object:
        if value is not None and not any(value == each and type(value) is type(each) for each in self._harmless):
            words = " or ".join(["null", *(repr(each) for each in self._harmless)])
            raise PydanticCustomError("unsupported", "not supported here, allowed: {words}", {"words": words})
        return value


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
