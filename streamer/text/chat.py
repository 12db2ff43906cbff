"""Render a conversation to the ids the model was trained on (k3-spec §7.3 to §7.6).

Layout: tool-declare, thinking-effort, messages, tool-choice, response-format, generation prefix. No BOS. Each segment
is encoded on its own, so that no text in a message, a name, or a tool result can become a control id.
"""

from collections.abc import Sequence

from streamer.text import tools as tools_
from streamer.text.messages import Message, input_segments
from streamer.text.tokenizer import Tokenizer
from streamer.text.xtml import Segment, encode_segments, open_tag, segments_text


def render(
    messages: Sequence[Message],
    *,
    tokenizer: Tokenizer,
    tools: Sequence[Message] | None = None,
    thinking: bool = True,
    effort: str = "low",
    tool_choice: object = None,
    response_format: object = None,
    add_generation_prompt: bool = True,
) -> list[int]:
    """Return the prompt's ids. Raises UsageError naming the message index and key, or the option, that is wrong."""
    segments = chat_segments(
        messages,
        tools=tools,
        thinking=thinking,
        effort=effort,
        tool_choice=tool_choice,
        response_format=response_format,
        add_generation_prompt=add_generation_prompt,
    )
    return encode_segments(segments, tokenizer)


def render_text(
    messages: Sequence[Message],
    *,
    tools: Sequence[Message] | None = None,
    thinking: bool = True,
    effort: str = "low",
    tool_choice: object = None,
    response_format: object = None,
    add_generation_prompt: bool = True,
) -> str:
    """Return the prompt in readable form, to look at; encoding it does not give the ids of `render`."""
    segments = chat_segments(
        messages,
        tools=tools,
        thinking=thinking,
        effort=effort,
        tool_choice=tool_choice,
        response_format=response_format,
        add_generation_prompt=add_generation_prompt,
    )
    return segments_text(segments)


def chat_segments(
    messages: Sequence[Message],
    *,
    tools: Sequence[Message] | None,
    thinking: bool,
    effort: str,
    tool_choice: object,
    response_format: object,
    add_generation_prompt: bool,
) -> list[Segment]:
    """Return the segments of the whole prompt. Raises UsageError as `render` does."""
    segments = head_segments(tools, thinking, effort)
    segments += input_segments(messages, thinking)
    segments += tools_.tool_choice(tool_choice)
    segments += tools_.response_format(response_format)
    if add_generation_prompt:
        segments += generation_prefix(thinking)
    return segments


def head_segments(tools: Sequence[Message] | None, thinking: bool, effort: str) -> list[Segment]:
    """Return what stands before the first message: the tools, and in thinking mode the effort."""
    tools_.check_effort(effort)  # also where it is not rendered: a typing error must not wait for thinking mode
    segments = tools_.tool_declare(tools) if tools else []
    return segments + tools_.thinking_effort(effort) if thinking else segments


def generation_prefix(thinking: bool) -> list[Segment]:
    """Return the opening of the answer. The model continues inside the think, or the response, channel."""
    return [*open_tag("message", [("role", "assistant")]), *open_tag("think" if thinking else "response")]
