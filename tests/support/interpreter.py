"""Triton's interpreter in a third of its time."""

from __future__ import annotations

from types import FunctionType
from typing import Any

from triton import language
from triton.runtime import interpreter


def patch_once_a_launch() -> None:
    """Makes the interpreter replace the functions of ``triton.language`` once a launch.

    It does so again in every call of a device function, where all of them are replaced already; looking for them takes
    longer than what the function computes.
    """
    patch = interpreter._patch_lang
    patched: set[tuple[bool, bool]] = set()  # for which functions, by the modules that they see, in this launch

    def patch_unless_patched(fn: FunctionType) -> Any:
        modules = list(filter(lambda value: value is language or value is language.core, fn.__globals__.values()))
        seen = (language in modules, language.core in modules)
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
