"""Estimates while a prompt is read, and the words for them."""

import pytest

from streamer.apps.prompt_meter import PromptMeter
from streamer.cli.progress import duration


def test_estimates() -> None:
    now = [0.0]
    meter = PromptMeter(total=400, chunk=100, n_layers=10, clock=lambda: now[0])
    assert meter.remaining_s is None
    now[0] = 5.0
    meter.layer = 5  # half a chunk in 5 s
    assert meter.remaining_s == pytest.approx(35.0)
    now[0] = 12.0
    meter.advance(100)
    assert meter.remaining_s == pytest.approx(36.0)
    assert not meter.finished
    meter.advance(400)
    assert meter.finished
    assert meter.remaining_s == 0


@pytest.mark.parametrize(
    ("seconds", "words"), [(0.2, "1 s"), (59, "59 s"), (300, "5 min"), (3599, "1 h 00 min"), (3900, "1 h 05 min")]
)
def test_durations(seconds: float, words: str) -> None:
    assert duration(seconds) == words
