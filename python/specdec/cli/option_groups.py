"""Options in groups: a command takes dataclasses, and typer gets their fields as its options.

@dataclass(frozen=True)
class Sampling:
    \"""How tokens are drawn\"""  # the heading of these options in --help

    temperature: float = option(0.0, "0 is greedy.")

@command
def draw(prompt: str, sampling: Sampling) -> None: ...
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, get_type_hints

import typer
from typer.core import TyperCommand, TyperOption

from .user_errors import option_name, user_errors


def option(default: Any, help: str | None = None, *names: str, **more: Any) -> Any:
    """A field of a group that is an option.

    Args:
        default: its value where it is not given; ``...``: it must be given.
        help: what ``--help`` says of it.
        names: on the command line; none: the field's, with hyphens.
        more: of what ``typer.Option`` takes.
    """
    of_field = dataclasses.MISSING if default is ... else default
    typed = typer.Option(default, *names, help=help, **more)
    return dataclasses.field(default=of_field, kw_only=True, metadata={"option": typed})


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Returns ``function`` as typer takes it: the fields of each dataclass among its parameters are options under the
    heading that is the dataclass's docstring, and the dataclass is made of them. Such a dataclass may have fields that
    are groups themselves. Errors about an argument name its option."""
    types = get_type_hints(function, include_extras=True)
    flat = [inspect.Parameter("context", _KEYWORD, annotation=typer.Context)]
    for parameter in inspect.signature(function).parameters.values():
        kind = types[parameter.name]
        is_group = dataclasses.is_dataclass(kind)
        flat += _options(kind) if is_group else [parameter.replace(kind=_KEYWORD, annotation=kind)]

    @functools.wraps(function)
    def run(*, context: typer.Context, **given: Any) -> None:
        with user_errors(context):
            function(**{name: _take(name, kind, given) for name, kind in types.items() if name != "return"})

    del run.__wrapped__  # or the signature would be that of ``function``
    run.__dict__["__signature__"] = inspect.Signature(flat)
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in flat}
    return run


def given(group: Any) -> dict[str, tuple[str, Any]]:
    """Of a group, and the groups in it, the options that have another value than their default: by the field's name the
    option's and the value."""
    found: dict[str, tuple[str, Any]] = {}
    for field in dataclasses.fields(group):
        value = getattr(group, field.name)
        if (typed := field.metadata.get("option")) is None:
            found |= given(value)
        elif value != field.default and value != []:
            names = [name for name in typed.param_decls or () if name.startswith("--")]
            found[field.name] = (names[0] if names else option_name(field.name), value)
    return found


_KEYWORD = inspect.Parameter.KEYWORD_ONLY


def _options(group: Any) -> list[inspect.Parameter]:
    types = get_type_hints(group)
    found = []
    for field in dataclasses.fields(group):
        if (typed := copy.copy(field.metadata.get("option"))) is None:
            found += _options(types[field.name])
            continue
        typed.rich_help_panel = group.__doc__
        found.append(inspect.Parameter(field.name, _KEYWORD, default=typed, annotation=types[field.name]))
    return found


def _take(name: str, kind: Any, given: dict[str, Any]) -> Any:
    """The value of a parameter or field: what was given by its name, or a group that is made of its own fields."""
    if not dataclasses.is_dataclass(kind):
        return given.pop(name)
    types = get_type_hints(kind)
    made: Any = kind
    return made(**{field.name: _take(field.name, types[field.name], given) for field in dataclasses.fields(kind)})


class GroupedCommand(TyperCommand):
    """A command whose ``--help`` lists options under the headings of their groups, and the others at the end."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": []}
        for param in self.get_params(ctx):
            if isinstance(param, TyperOption):
                param.show_envvar = False  # they would be half of the page, and all follow from the options' names
            if (record := param.get_help_record(ctx)) is not None:
                of_none = "Arguments" if param.param_type_name == "argument" else "Other"
                sections.setdefault(getattr(param, "rich_help_panel", None) or of_none, []).append(record)
        for heading, records in sections.items():
            if records:
                with formatter.section(heading):
                    formatter.write_dl(records)
