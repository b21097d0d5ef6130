"""Help in groups, for a command with many options."""

from __future__ import annotations

from typing import Any, ClassVar

from typer.core import TyperCommand, TyperOption


class GroupedCommand(TyperCommand):
    """A command whose ``--help`` lists its options under the headings of ``groups``: names of parameters by heading.
    What has no heading comes last."""

    groups: ClassVar[dict[str, tuple[str, ...]]] = {}

    def format_options(self, ctx: Any, formatter: Any) -> None:
        for param in self.get_params(ctx):
            if isinstance(param, TyperOption):
                param.show_envvar = False  # they would be half of the page, and all follow from the options' names
        records = {param.name: param.get_help_record(ctx) for param in self.get_params(ctx)}
        for heading, names in self.groups.items():
            with formatter.section(heading):
                formatter.write_dl([record for name in names if (record := records.pop(name)) is not None])
        with formatter.section("Other"):
            formatter.write_dl([record for record in records.values() if record is not None])
