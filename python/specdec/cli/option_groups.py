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

from .user_errors import user_errors


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
    heading that is the dataclass's docstring, and the dataclass is made of them. Errors about an argument name its
    option."""
    types = get_type_hints(function, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in types.items() if dataclasses.is_dataclass(kind)}
    flat = [inspect.Parameter("context", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)]
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name in groups:
            flat += _options(groups[parameter.name])
        else:
            kind = types[parameter.name]
            flat.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=kind))

    @functools.wraps(function)
    def run(*, context: typer.Context, **given: Any) -> None:
        with user_errors(context):
            made = {
                name: group(**{field.name: given.pop(field.name) for field in dataclasses.fields(group)})
                for name, group in groups.items()
            }
            function(**given, **made)

    del run.__wrapped__  # or the signature would be that of ``function``
    run.__dict__["__signature__"] = inspect.Signature(flat)
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in flat}
    return run


def _options(group: Any) -> list[inspect.Parameter]:
    types = get_type_hints(group)
    found = []
    for field in dataclasses.fields(group):
        typed = copy.copy(field.metadata["option"])
        typed.rich_help_panel = group.__doc__
        kind = inspect.Parameter.KEYWORD_ONLY
        found.append(inspect.Parameter(field.name, kind, default=typed, annotation=types[field.name]))
    return found


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
