"""The schemas of tools, and what is wrong with the arguments of a call, in words for the model."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

# The JSON Schema of each tool's arguments, by the tool's name.
Tools = Mapping[str, Mapping[str, Any]]

# How much of a name that a model made up is repeated to it.
MAX_NAME = 128


def tool_schemas(tools: Iterable[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The tools by name, from the list that chat templates take: {"type": "function", "function": {...}} each."""
    functions = [tool.get("function", tool) for tool in tools]
    return {function["name"]: function.get("parameters") or {} for function in functions}


def tools_in_words(tools: Iterable[Mapping[str, Any]]) -> str:
    """What a policy is told whose chat template knows no tools; the format of calls is that of Hermes."""
    listed = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    return (
        f"You can call these tools, each described by its JSON Schema:\n<tools>\n{listed}\n</tools>\n"
        "To call one, write a JSON object with its name and arguments between tags:\n<tool_call>\n"
        '{"name": "NAME", "arguments": {"ARGUMENT": "VALUE"}}\n</tool_call>'
    )


def argument_problem(value: Any, schema: Mapping[str, Any], path: str = "") -> str | None:
    """What is wrong with a value under a JSON Schema, in words; None where nothing is.

    Looks at type, enum, properties, required, additionalProperties (where false) and items; other words of the schema
    are the tool's own business.
    """
    where = f"argument {path!r}" if path else "arguments"
    types = types_of(schema)
    if types and not any(_is_a(value, type_) for type_ in types):
        return f"{where} should be {' or '.join(types)}, not {kind_of(value)}"
    if isinstance(choices := schema.get("enum"), list) and value not in choices:
        return f"{where} should be one of {json.dumps(choices, ensure_ascii=False)}"
    if isinstance(value, dict):
        properties = mapping_of(schema.get("properties"))
        for key in schema.get("required") or []:
            if key not in value:
                return f"argument {f'{path}.{key}' if path else key!r} is missing"
        for key, member in value.items():
            if key not in properties and schema.get("additionalProperties") is False:
                return f"there is no argument {key[:MAX_NAME]!r}"
            inner = f"{path}.{key}" if path else key
            if (problem := argument_problem(member, mapping_of(properties.get(key)), inner[:MAX_NAME])) is not None:
                return problem
    elif isinstance(value, list) and (items := mapping_of(schema.get("items"))):
        for i, member in enumerate(value):
            if (problem := argument_problem(member, items, f"{path}[{i}]")) is not None:
                return problem
    return None


def types_of(schema: Mapping[str, Any]) -> list[str]:
    """The types a schema allows; [] where it says nothing of them."""
    types = schema.get("type")
    return [types] if isinstance(types, str) else list(types) if isinstance(types, list) else []


def _is_a(value: Any, type_: str) -> bool:
    if type_ == "number":
        return isinstance(value, int | float) and not isinstance(value, bool)
    if type_ == "integer":
        return not isinstance(value, bool) and (isinstance(value, int) or (isinstance(value, float) and value % 1 == 0))
    return kind_of(value) == type_


def kind_of(value: Any) -> str:
    """The JSON name of a value's type."""
    if value is None:
        return "null"
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return names.get(type(value), type(value).__name__)


def mapping_of(value: Any) -> Mapping[str, Any]:
    """A value that ought to be a mapping; {} where it is none."""
    return value if isinstance(value, Mapping) else {}
