"""The Typer application: commands are listed from a table and imported only when called."""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command_from_info

from strop.cli import config, helptext
from strop.cli.main import COMMANDS, EPILOG
from strop.cli.shared_options import SHARED

if TYPE_CHECKING:
    from collections.abc import Callable

UsageFailure: type[Any] = typer._click.exceptions.ClickException
Context: type[Any] = typer.Context
# What help calls a value of Click's types, where the option does not say.
METAVARS = {
    "int": "INT", "integer": "INT", "int range": "INT", "integer range": "INT",
    "float": "NUMBER", "float range": "NUMBER", "str": "TEXT", "text": "TEXT",
}  # fmt: skip
LONGEST_CHOICES = 50


class LazyGroup(TyperGroup):
    """A group that knows its commands' names without importing them."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        # Only the keys are read, for "did you mean"; the commands come from get_command.
        self.commands = dict.fromkeys(COMMANDS)  # type: ignore[assignment]

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        """The names, in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: typer.Context, cmd_name: str) -> Any:  # type: ignore[override]
        """The command, its module imported now."""
        if cmd_name not in COMMANDS:
            return None
        return load_command(cmd_name)


class ToolCommand(TyperCommand):
    """A command whose help keeps its own options apart from those that every tool has.

    Its defaults may come from the file that STROP_CONFIG names, and an error about a value says where the value stood.
    """

    def make_context(self, info_name: str | None, args: list[str], parent: Any = None, **extra: Any) -> Any:
        """The context of a call, with the defaults of STROP_CONFIG."""
        if os.environ.get("STROP_CONFIG") and not extra.get("resilient_parsing"):
            extra["default_map"] = config.defaults_for(self.name or "", self.params)
        try:
            return super().make_context(info_name, args, parent=parent, **extra)
        except UsageFailure as failure:
            parameter = getattr(failure, "param", None)
            if parameter is not None and failure.ctx is not None:
                place = config.origin(failure.ctx, parameter)
                if place not in ("command line", "default"):
                    failure.message = f"{failure.message} (from the {place})"
            raise

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        """Options that only tell something ask for nothing: `strop train --schema` needs no --out."""
        if {"--schema", "--show-config"} & set(args):
            for param in self.params:
                param.required = False
        return super().parse_args(ctx, args)

    def format_help_text(self, ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override]
        """The docstring, wrapped to the width there is."""
        formatter.write_paragraph()
        formatter.write(helptext.rendered(helptext.parse(self.help or ""), formatter.width))

    def format_options(self, ctx: typer.Context, formatter: Any) -> None:  # type: ignore[override]
        """Own options, then shared ones. Environment variables are said once, not on every line."""
        sections: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": [], SHARED: []}
        for param in self.get_params(ctx):
            line = param.get_help_record(ctx)
            if line is not None:
                is_option = param.param_type_name == "option"
                panel = getattr(param, "rich_help_panel", None) if is_option else "Arguments"
                sections[panel or "Options"].append(line)
        for title, lines in sections.items():
            if lines:
                with formatter.section(title):
                    formatter.write_dl(lines)
        formatter.write_paragraph()
        formatter.write_text(
            f"Each option is also read from the environment: {_envvar_prefix(self.name or '')}_OPTION."
        )


def load_command(name: str) -> Any:
    """The Click command of one tool."""
    app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)
    module = import_module(f"strop.cli.{COMMANDS[name][0]}")
    settings = {"help_option_names": ["-h", "--help"]}
    app.command(name, cls=ToolCommand, context_settings=settings)(module.command)
    info = app.registered_commands[0]
    command: Any = get_command_from_info(info, pretty_exceptions_short=True, rich_markup_mode=None)
    for param in command.params:
        if param.param_type_name == "option":
            # By the option's spelling, not by the name of our parameter (--from is `from_`).
            param.envvar = f"{_envvar_prefix(name)}_{config.long_name(param).upper().replace('-', '_')}"
        param.show_envvar = False
        if param.metavar is None and not getattr(param, "is_flag", False):
            param.metavar = METAVARS.get(param.type.name)
            choices = getattr(param.type, "choices", ())
            if len("|".join(choices)) > LONGEST_CHOICES:
                param.metavar = "NAME"
                param.help = f"{param.help} One of: {', '.join(choices)}."
    return command


def _envvar_prefix(name: str) -> str:
    return f"STROP_{name.upper().replace('-', '_')}"


def build_app() -> Callable[..., Any]:
    """The application that `main` calls."""
    app = typer.Typer(
        cls=LazyGroup,
        name="strop",
        rich_markup_mode=None,
        pretty_exceptions_enable=False,
        add_completion=False,
        epilog=EPILOG,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @app.callback()
    def root() -> None:
        """Unix tools for loops in which a language model improves on its own work."""

    if "_STROP_COMPLETE" in os.environ:
        from typer._completion_classes import completion_init

        completion_init()
    return app
