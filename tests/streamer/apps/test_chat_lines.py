"""What a line means in a conversation."""

import pytest

from streamer.apps.chat import Command, parse
from streamer.apps.prompt import parse_ids
from streamer.config.errors import UsageError


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("hello", "hello"),
        (" /help", " /help"),
        ("//etc/hosts", "/etc/hosts"),
        ("//", "/"),
        ("/", Command("", "")),
        ("/help", Command("help", "")),
        ("/system  be brief ", Command("system", "be brief")),
        ("/system be\nbrief", Command("system", "be\nbrief")),
        ("/etc/hosts\nis a file", "/etc/hosts\nis a file"),
        ("/Help me", Command("Help", "me")),
    ],
)
def test_lines(text: str, meaning: object) -> None:
    assert parse(text) == meaning


def test_ids() -> None:
    assert parse_ids("3,17 101,\n5") == [3, 17, 101, 5]
    for text in ("1.5", "-1", "1,,x", "१", "99999999999"):
        with pytest.raises(UsageError, match="--ids"):
            parse_ids(text)
