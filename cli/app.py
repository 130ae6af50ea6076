"""The Typer application: commands are listed from a table and imported only when called."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command_from_info

from strop.cli.main import COMMANDS, EPILOG

if TYPE_CHECKING:
    from collections.abc import Callable

UsageFailure: type[Any] = typer._click.exceptions.ClickException
Context: type[Any] = typer.Context


class LazyGroup(TyperGroup):
    """A group that knows its commands' names without importing them."""

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        """The names, in the order of the table."""
        return list(COMMANDS)

    def get_command(self, ctx: typer.Context, cmd_name: str) -> Any:  # type: ignore[override]
        """The command, its module imported now."""
        if cmd_name not in COMMANDS:
            return None
        return load_command(cmd_name)


def load_command(name: str) -> Any:
    """The Click command of one tool."""
    app = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False, add_completion=False)
    module = import_module(f"strop.cli.{COMMANDS[name][0]}")
    app.command(
        name,
        context_settings={
            "help_option_names": ["-h", "--help"],
            "max_content_width": 100,
            "auto_envvar_prefix": _envvar_prefix(name),
        },
    )(module.command)
    return get_command_from_info(app.registered_commands[0], pretty_exceptions_short=True, rich_markup_mode=None)


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

    import os

    if "_STROP_COMPLETE" in os.environ:
        from typer._completion_classes import completion_init

        completion_init()
    return app
