"""The file that STROP_CONFIG names: defaults of options, below the command line and the environment.

    keep-going = true        # for every command that has the option
    [rollout]                # for one command; wins over the above
    samples = 8
    stop = ["\\n"]

Nothing is found by itself: a run under cron must not depend on a home directory. Values are read as if they stood on
the command line. A key that nothing is called is a usage error, and so is a value of the wrong shape: TOML has no null,
so an option is unset by leaving it out, never by the text "None".
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from strop.cli.main import COMMANDS
from strop.core.errors import InputMissing, UsageError

VARIABLE = "STROP_CONFIG"
NOT_IN_FILES = ("help", "schema", "show_config")
# Their presence changes what the command does; at the top of a file they would turn a judge into a sampler.
OWN_TABLE_ONLY = {"calibrate": {"model", "endpoint"}}
NO_VALUES = ("None", "null", "nil")
SECRET = re.compile(r"api_?key|token$|secret|password", re.IGNORECASE)
USERINFO = re.compile(r"(?<=://)[^/@\s]+@")


def defaults_for(name: str, parameters: list[Any]) -> dict[str, Any]:
    """What the file says of the options of command `name`, as Click's default map. {} where no file is named.

    `parameters` are the command's Click parameters. Raises InputMissing for a file that cannot be read and UsageError
    for one that is not TOML, for unknown keys and for values that no option takes.
    """
    source = os.environ.get(VARIABLE)
    if not source:
        return {}
    content = _read(source)
    own, every = content.get(name, {}), {k: v for k, v in content.items() if not isinstance(v, dict)}
    for key, value in content.items():
        if isinstance(value, dict) and key not in COMMANDS:
            raise UsageError(f"{source}: [{key}]: no such command ({_alike(key, list(COMMANDS))})")
    if not isinstance(own, dict):
        raise UsageError(f"{source}: {name}: expected a table of options, [{name}]")
    options = _options(parameters)
    defaults = {}
    for key, value in every.items():
        if _plain(key) in OWN_TABLE_ONLY.get(name, ()):
            continue
        if _plain(key) in options:
            defaults[options[_plain(key)].name] = _value(f"{source}: {key}", options[_plain(key)], value)
        elif not _is_option_elsewhere(_plain(key)):
            raise UsageError(f"{source}: {key}: no command has this option")
    for key, value in own.items():
        if _plain(key) not in options:
            raise UsageError(f"{source}: [{name}] {key}: no such option ({_alike(_plain(key), list(options))})")
        defaults[options[_plain(key)].name] = _value(f"{source}: [{name}] {key}", options[_plain(key)], value)
    return defaults


def _read(source: str) -> dict[str, Any]:
    import tomllib

    try:
        with Path(source).open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise InputMissing(f"{source} (named by {VARIABLE}): {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"{source} (named by {VARIABLE}): not TOML: {error}") from None


def long_name(parameter: Any) -> str:
    """What an option is called in files and --show-config: its long spelling; an argument by its own name."""
    spellings = [str(spelling[2:]) for spelling in parameter.opts if spelling.startswith("--")]
    return spellings[0] if spellings else str(parameter.name).replace("_", "-")


def _plain(key: str) -> str:
    return key.replace("-", "_")


def _options(parameters: list[Any]) -> dict[str, Any]:
    options = {}
    for parameter in parameters:
        if parameter.param_type_name == "option" and parameter.name not in NOT_IN_FILES:
            for spelling in parameter.opts:
                if spelling.startswith("--"):
                    options[_plain(spelling[2:])] = parameter
    return options


def _is_option_elsewhere(key: str) -> bool:
    from strop.cli.app import load_command

    return any(key in _options(load_command(name).params) for name in COMMANDS)


def _alike(word: str, known: list[str]) -> str:
    from difflib import get_close_matches

    near = get_close_matches(word, known, n=1)
    return f"did you mean {near[0].replace('_', '-')}?" if near else f"known: {', '.join(known).replace('_', '-')}"


def _value(place: str, parameter: Any, value: Any) -> Any:
    if isinstance(value, dict):
        raise UsageError(f"{place}: expected a value, not a table")
    if parameter.is_flag:
        if not isinstance(value, bool):
            raise UsageError(f"{place}: expected true or false")
        return value
    if parameter.multiple:
        # A text is one value; iterating over it would make a list of its letters.
        return [_text(place, item) for item in (value if isinstance(value, list) else [value])]
    if isinstance(value, list):
        raise UsageError(f"{place}: expected one value, not a list")
    return _text(place, value)


def _text(place: str, value: Any) -> str:
    if isinstance(value, bool | list | dict):
        raise UsageError(f"{place}: expected a text or a number")
    if value in NO_VALUES:
        raise UsageError(f"{place}: {value!r} is a text; leave the key out to leave the option unset")
    return str(value)


def origin(ctx: Any, parameter: Any) -> str:
    """Where a parameter's value comes from: "command line", "environment NAME", "file NAME" or "default"."""
    source = ctx.get_parameter_source(parameter.name)
    kind = source.name if source else "DEFAULT"
    if kind == "ENVIRONMENT":
        return f"environment {parameter.envvar}"
    if kind == "DEFAULT_MAP":
        return f"file {os.environ.get(VARIABLE, '')}"
    return {"COMMANDLINE": "command line"}.get(kind, "default")


def shown(name: str, value: Any) -> str:
    """A value as --show-config prints it: JSON, so that nothing (null) and the text "None" differ; no secrets."""
    import json

    if value is not None and SECRET.search(name):
        return '"(set, not shown)"'
    return USERINFO.sub("", json.dumps(value, default=str, ensure_ascii=False))
