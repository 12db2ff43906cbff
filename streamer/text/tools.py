"""Tool declarations, option messages and tool calls of the chat format (k3-spec §7.4, §7.5).

The texts are wire constants: the model was trained on exactly these bytes.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from streamer.config.errors import UsageError
from streamer.text.xtml import Segment, close_tag, message, open_tag

TOOLS_HEAD = "# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n"
TOOLS_HEAD_DYNAMIC = (
    "## New Tools Available\nThe system dynamically extends the toolset via lazy-loading.\n"
    "You have access to all existing and extended tools.\nHere are the specs for the extended tools.\n\n```json\n"
)
FENCE_END = "\n```"
TOOL_CHOICE = {
    "required": "The system is invoked with `tool_choice=required`.\nYou MUST call tools in the next message.",
    "none": "The system is invoked with `tool_choice=none`.\nYou MUST NOT call any tools in the next message.",
}
_RESPONSE_FORMAT = (
    "The system is invoked with `response_format={}`.\nYour response must be raw JSON data without markdown code blocks"
    " (```json) or any additional formatting."
)
_SCHEMA_HEAD = "\nThe JSON data must match the following schema:\n```json\n"
_EFFORT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the response channel),"
    " supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort={}`."
)
EFFORTS = ("low", "medium", "high", "max")
"""Accepted reasoning efforts. The model was trained on low, high and max; its own prompt lists medium too."""


def _option(kind: str, body: str) -> list[Segment]:
    return message([("role", "system"), ("type", kind)], [Segment(body.strip())])


def _sorted_json(value: object, where: str) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"{where}: expected plain JSON data, found {error}. Pass dicts, lists and scalars.") from error


def tool_declare(tools: object, where: str = "tools", *, dynamic: bool = False) -> list[Segment]:
    """Render the tools that the model may call. Raises UsageError unless `tools` is a list of objects."""
    if not isinstance(tools, Sequence) or isinstance(tools, str) or not all(isinstance(t, Mapping) for t in tools):
        raise UsageError(f"{where}: expected a list of tool objects, found {type(tools).__name__}. Pass OpenAI tools.")
    head = TOOLS_HEAD_DYNAMIC if dynamic else TOOLS_HEAD
    return _option("tool-declare", head + _sorted_json(tools, where) + FENCE_END)


def thinking_effort(effort: str) -> list[Segment]:
    """Render the effort message. Raises UsageError with the accepted values."""
    check_effort(effort)
    return _option("thinking-effort", _EFFORT.format(effort))


def check_effort(effort: str) -> None:
    """Raise UsageError unless `effort` is one of EFFORTS."""
    if effort not in EFFORTS:
        raise UsageError(f"reasoning effort: expected one of {', '.join(EFFORTS)}, found {effort!r}. Choose one.")


def tool_choice(choice: object) -> list[Segment]:
    """Render `required` or `none`; `auto` and None render nothing.

    Raises UsageError for anything else: the format has no words for one named function, and dropping it would be
    silent.
    """
    if choice is None or choice == "auto":
        return []
    if not isinstance(choice, str) or choice not in TOOL_CHOICE:
        raise UsageError(f"tool_choice: expected auto, required or none, found {choice!r}. K3 cannot be told more.")
    return _option("tool-choice", TOOL_CHOICE[choice])


def response_format(value: object) -> list[Segment]:
    """Render json_object or json_schema; None and text render nothing. Raises UsageError for anything else."""
    kind = value.get("type") if isinstance(value, Mapping) else value
    if kind is None or kind == "text":
        return []
    if kind == "json_object":
        return _option("response-format", _RESPONSE_FORMAT.format(kind))
    if kind == "json_schema" and isinstance(value, Mapping):
        schema: object = value.get("json_schema", value)
        if isinstance(schema, Mapping):
            schema = schema.get("schema", schema)
        body = _SCHEMA_HEAD + _sorted_json(schema, "response_format") + FENCE_END
        return _option("response-format", _RESPONSE_FORMAT.format(kind) + body)
    raise UsageError(
        f"response_format: expected type text, json_object or json_schema (with its schema), found {value!r}."
        ' Pass {"type": "json_object"}, for example.'
    )


def call_name(call: object, where: str) -> str:
    """Return the function name of an OpenAI tool call. Raises UsageError naming the key."""
    function = call.get("function") if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        raise UsageError(f"{where}.function.name: expected the tool's name, found {name!r}. Pass OpenAI tool calls.")
    return name


def tool_calls(calls: Sequence[Any], where: str) -> list[Segment]:
    """Render the tools channel of an assistant message; nothing for no calls. Raises UsageError for a malformed one."""
    if not calls:
        return []
    segments = open_tag("tools")
    for index, call in enumerate(calls, start=1):
        place = f"{where}[{index - 1}]"
        segments += open_tag("call", [("tool", call_name(call, place)), ("index", str(index))])
        segments += _arguments(call["function"].get("arguments"), f"{place}.function.arguments")
        segments += close_tag("call")
    return segments + close_tag("tools")


def _arguments(arguments: object, where: str) -> list[Segment]:
    if isinstance(arguments, str):
        if not arguments.strip():
            return []
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            # Input only: the model is shown what a client sent, and never writes this form itself.
            return [*open_tag("json", [("type", "object")]), Segment(arguments), *close_tag("json")]
    else:
        parsed = {} if arguments is None else arguments
    if not isinstance(parsed, Mapping):
        raise UsageError(f"{where}: expected an object, found {type(parsed).__name__}. Pass names and values.")
    segments: list[Segment] = []
    for key, value in parsed.items():
        text, kind = _argument(value, f"{where}.{key}")
        segments += [*open_tag("argument", [("key", str(key)), ("type", kind)]), Segment(text), *close_tag("argument")]
    return segments


def _argument(value: object, where: str) -> tuple[str, str]:
    """Return an argument's text and type. Non-strings keep json's default spacing and the given key order."""
    if isinstance(value, str):
        return value, "string"
    kind = "object"
    if value is None:
        kind = "null"
    elif isinstance(value, bool):  # before number: bool is an int in Python
        kind = "boolean"
    elif isinstance(value, int | float):
        kind = "number"
    elif isinstance(value, list | tuple):
        kind = "array"
    try:
        return json.dumps(value, ensure_ascii=False), kind
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"{where}: expected plain JSON data, found {error}. Pass dicts, lists and scalars.") from error
