"""What each signal does, and when."""

import os
import signal

import pytest

from streamer.cli import interrupt
from streamer.cli.interrupt import Interrupts


class EndedError(Exception):
    """Stands for the end of the process."""


@pytest.fixture(autouse=True)
def _no_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    def end(code: int) -> None:
        raise EndedError(code)

    monkeypatch.setattr(os, "_exit", end)


def test_the_first_cancels_and_a_later_one_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    before = signal.getsignal(signal.SIGINT)
    with Interrupts() as interrupts, interrupts.during(lambda: done.append("cancel"), lambda: done.append("clean")):
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)  # a nervous press
        assert (done, interrupts.stopped, interrupts.terminated) == (["cancel"], True, False)
        interrupts.repeat()
        monkeypatch.setattr(interrupt, "SAME_PRESS_S", 0.0)
        with pytest.raises(EndedError, match="130"):
            os.kill(os.getpid(), signal.SIGTERM)
        assert done == ["cancel", "cancel", "clean"]
    assert signal.getsignal(signal.SIGINT) is before


def test_while_loading_the_process_ends() -> None:
    done: list[str] = []
    with Interrupts() as interrupts, interrupts.loading(lambda: done.append("clean")):
        with pytest.raises(EndedError, match="130"):
            os.kill(os.getpid(), signal.SIGINT)
        assert done == ["clean"]


def test_at_other_times_it_is_a_keyboard_interrupt() -> None:
    with Interrupts() as interrupts:
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
        assert interrupts.terminated
        with interrupts.during(lambda: None):
            assert not interrupts.stopped
