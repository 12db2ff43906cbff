"""Stop strings over text that arrives in any pieces."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamer.config.errors import UsageError
from streamer.text.stop import StopStrings


def run(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    watch = StopStrings(stops)
    shown = []
    for piece in pieces:
        text, stopped = watch.push(piece)
        shown.append(text)
        if stopped:
            return "".join(shown), watch.stopped
    return "".join(shown) + watch.flush(), None


def expected(stops: list[str], text: str) -> tuple[str, str | None]:
    """Character by character: the first place at which some stop string is complete, the longest of those there."""
    for end in range(1, len(text) + 1):
        met = [stop for stop in stops if text[:end].endswith(stop)]
        if met:
            stop = max(met, key=len)
            return text[: end - len(stop)], stop
    return text, None


@settings(deadline=None)
@given(
    stops=st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=4),
    pieces=st.lists(st.text("abc\n", max_size=5), max_size=12),
)
def test_result_does_not_depend_on_the_pieces(stops: list[str], pieces: list[str]) -> None:
    assert run(stops, pieces) == expected(stops, "".join(pieces))


def test_holds_back_only_what_may_become_a_stop() -> None:
    watch = StopStrings(["END"])
    assert watch.push("text EN") == ("text ", False)
    assert watch.push("V") == ("ENV", False)
    assert watch.push("E") == ("", False)
    assert watch.push("ND more") == ("", True)
    assert watch.push("later") == ("", True)
    assert watch.flush() == ""


@pytest.mark.parametrize("stops", [[""], ["a", ""], "END", [3]])
def test_refuses_what_is_not_a_list_of_strings(stops: list[str]) -> None:
    with pytest.raises(UsageError, match="stop: expected"):
        StopStrings(stops)
