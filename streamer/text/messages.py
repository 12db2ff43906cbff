"""Input messages, OpenAI-shaped, to segments (k3-spec §7.3). Checks each message and names index and key when wrong.

Knows nothing about what stands before and after the messages: that is `streamer.text.chat`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from streamer.config.errors import UsageError
from streamer.text import tools
from streamer.text.xtml import Segment, close_tag, message, open_tag

Message = Mapping[str, Any]

_IMAGE_PARTS = ("image", "image_url", "input_image")


def input_segments(messages: Sequence[Message], thinking: bool) -> list[Segment]:
    """Render the messages in order. Think channels appear in thinking mode only, and then always.

    Raises UsageError for a message that cannot be rendered, naming its index and key.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise UsageError(
            f"messages: expected a list of messages, not empty, found {messages!r}. Pass role and content."
        )
    segments: list[Segment] = []
    calls: Sequence[Any] = ()
    n_results = 0  # tool results since the last assistant message
    at = 0
    while at < len(messages):
        role = _role(messages[at], at)
        if role == "tool":
            run = _tool_run(messages, at)
            segments += tool_run_segments(run, calls, n_results)
            n_results += len(run)
            at += len(run)
            continue
        if role == "assistant":
            calls, n_results = _calls(messages[at], at), 0
            segments += _assistant(messages[at], at, calls, thinking)
        elif role == "system" and messages[at].get("tools"):
            segments += _dynamic_tools(messages[at], at)
        else:
            segments += message(_attributes(messages[at], at, role), content(messages[at], at))
        at += 1
    return segments


def _fault(at: int, key: str, expected: str, found: object, cure: str) -> UsageError:
    shown = repr(found)
    shown = shown if len(shown) <= 80 else shown[:77] + "..."
    return UsageError(f"messages[{at}].{key}: expected {expected}, found {shown}. {cure}")


def _role(entry: object, at: int) -> str:
    if not isinstance(entry, Mapping):
        raise UsageError(f"messages[{at}]: expected an object with role and content, found {type(entry).__name__}.")
    role = entry.get("role")
    if role == "developer":  # newer clients' word for system; the format has only one
        return "system"
    if not isinstance(role, str) or role not in ("system", "user", "assistant", "tool"):
        raise _fault(at, "role", "system, developer, user, assistant or tool", role, "Use one of these.")
    return role


def _attributes(entry: Message, at: int, role: str) -> list[tuple[str, str]]:
    name = entry.get("name")
    if name is not None and not isinstance(name, str):
        raise _fault(at, "name", "a string", name, "Quote it or leave it out.")
    return [("role", role), ("name", name)] if name else [("role", role)]


def content(entry: Message, at: int, *, optional: bool = False) -> list[Segment]:
    """Return the content as segments, one for a string, one for each part of a list.

    `optional` allows it to be absent. Raises UsageError for images, which are not supported yet, and for wrong types.
    """
    value = entry.get("content")
    if value is None and optional:
        return []
    if isinstance(value, str):
        return [Segment(value)]
    if not isinstance(value, list | tuple):
        raise _fault(at, "content", "a string or a list of parts", value, "Pass an empty string for no text.")
    return [Segment(_part(part, at, f"content[{number}]")) for number, part in enumerate(value)]


def _part(part: object, at: int, key: str) -> str:
    if not isinstance(part, Mapping):
        raise _fault(at, key, "an object with a text", part, 'Pass {"type": "text", "text": ...}.')
    if part.get("type") in _IMAGE_PARTS or "image_url" in part:
        raise _fault(at, key, "text", part.get("type"), "Images are not supported yet; remove the part.")
    text = part.get("text")
    if not isinstance(text, str):
        raise _fault(at, f"{key}.text", "a string", text, 'Pass {"type": "text", "text": ...}.')
    return text


def _dynamic_tools(entry: Message, at: int) -> list[Segment]:
    if entry.get("content"):
        raise _fault(at, "content", "none beside tools", entry["content"], "Put it into a system message of its own.")
    return tools.tool_declare(entry["tools"], f"messages[{at}].tools", dynamic=True)


def _calls(entry: Message, at: int) -> Sequence[Any]:
    calls = entry.get("tool_calls")
    if calls is None:
        return ()
    if not isinstance(calls, list | tuple):
        raise _fault(at, "tool_calls", "a list", calls, "Leave it out when there are none.")
    for number, call in enumerate(calls):
        tools.call_name(call, f"messages[{at}].tool_calls[{number}]")
    return calls


def reasoning(entry: Message, at: int) -> str:
    """Return `reasoning_content` or `reasoning`; blank counts as none. Raises UsageError for a wrong type."""
    for key in ("reasoning_content", "reasoning"):
        value = entry.get(key)
        if value is not None and not isinstance(value, str):
            raise _fault(at, key, "a string", value, "Leave it out when there is none.")
        if value:
            return value if value.strip() else ""
    return ""


def _assistant(entry: Message, at: int, calls: Sequence[Any], thinking: bool) -> list[Segment]:
    thought = reasoning(entry, at)
    body: list[Segment] = []
    if thinking:
        body += [*open_tag("think"), Segment(thought), *close_tag("think")]
    text = content(entry, at, optional=bool(calls or thought))
    body += [*open_tag("response"), *text, *close_tag("response")]
    body += tools.tool_calls(calls, f"messages[{at}].tool_calls")
    return message(_attributes(entry, at, "assistant"), body)


def _tool_run(messages: Sequence[Message], at: int) -> list[tuple[int, Message]]:
    end = at
    while end < len(messages) and _role(messages[end], end) == "tool":
        end += 1
    return [(number, messages[number]) for number in range(at, end)]


def tool_run_segments(run: Sequence[tuple[int, Message]], calls: Sequence[Any], n_before: int) -> list[Segment]:
    """Render consecutive tool results, given with their place among the messages.

    They are put into the order of `calls` by tool_call_id, or left as given when any of them matches no call; numbers
    go on from `n_before`. Raises UsageError for a result without a name that matches no call.
    """
    order: dict[object, int] = {}
    for number, call in enumerate(calls):
        if isinstance(call.get("id"), str):
            order.setdefault(call["id"], number)
    matches = {at: _match(entry, at, order) for at, entry in run}
    if all(position is not None for position in matches.values()):
        run = sorted(run, key=lambda item: matches[item[0]] or 0)
    segments: list[Segment] = []
    for index, (at, entry) in enumerate(run, start=n_before + 1):
        position = matches[at]
        name = entry.get("name")
        if position is None and not name and index <= len(calls):
            position = index - 1
        if position is not None:
            name = tools.call_name(calls[position], f"messages[{at}]")
        if not isinstance(name, str) or not name:
            cure = "Give the name of the tool, or the tool_call_id of a call in the assistant message before."
            raise _fault(at, "name", "the tool's name", name, cure)
        attributes = [("role", "tool"), ("tool", name), ("index", str(index))]
        segments += message(attributes, content(entry, at))
    return segments


def _match(entry: Message, at: int, order: Mapping[object, int]) -> int | None:
    call_id = entry.get("tool_call_id")
    if call_id is not None and not isinstance(call_id, str):
        raise _fault(at, "tool_call_id", "a string", call_id, "Repeat the id of the call.")
    return order.get(call_id)
