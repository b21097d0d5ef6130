"""Triton's interpreter in a fifth of its time."""

from __future__ import annotations

import dataclasses
import functools
from types import FunctionType
from typing import Any

from triton import language
from triton.runtime import interpreter


def _skip_what_has_no_effect() -> None:
    """Makes the interpreter compute no checks for overflow, whose outcome it looks at with ``debug`` only, which is
    off, and remember numpy's dtype of each of Triton's."""
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    dtype_of = interpreter._get_np_dtype
    of_number = functools.cache(dtype_of)  # pointers have no hash

    def remembered(dtype: language.dtype) -> Any:
        return dtype_of(dtype) if dtype.scalar.is_ptr() else of_number(dtype.scalar)

    interpreter._get_np_dtype = remembered


def patch_once_a_launch() -> None:
    """Makes the interpreter replace the functions of ``triton.language`` once a launch.

    It does so again in every call of a device function, where all of them are replaced already; looking for them takes
    longer than what the function computes. Other work without an effect is left out as well.
    """
    _skip_what_has_no_effect()
    patch = interpreter._patch_lang
    patched: set[tuple[bool, bool]] = set()  # for which functions, by the modules that they see, in this launch

    @functools.cache
    def seen_by(fn: FunctionType) -> tuple[bool, bool]:
        modules = list(filter(lambda value: value is language or value is language.core, fn.__globals__.values()))
        return language in modules, language.core in modules

    def patch_unless_patched(fn: FunctionType) -> Any:
        seen = seen_by(fn)
        if seen in patched:
            return None  # to a call of a device function, which asks for no scope
        patched.add(seen)
        scope = patch(fn)
        if scope is not None:  # older versions of Triton put nothing back
            restore = scope.restore

            def restore_and_forget() -> None:
                patched.clear()
                restore()

            scope.restore = restore_and_forget
        return scope

    interpreter._patch_lang = patch_unless_patched
