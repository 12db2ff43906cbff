"""One answer on the screen: thinking on standard error where it is wanted, the response on standard output."""

from __future__ import annotations

from typing import TYPE_CHECKING

from streamer.cli.screen import Screen

if TYPE_CHECKING:
    from streamer.text.parsed import Delta


class AnswerView:
    """Shows deltas as they come. Thinking that is not shown is counted: it may take minutes."""

    def __init__(self, screen: Screen, show_thinking: bool) -> None:
        self._screen = screen
        self._show_thinking = show_thinking
        self._n_hidden = 0
        self._thinking_on_screen = False

    def show(self, delta: Delta) -> None:
        """Print the next piece."""
        if delta.channel == "response":
            self._end_thinking()
            self._screen.text(delta.text)
        elif not self._show_thinking:
            self._n_hidden += 1
            self._screen.status(f"thinking: about {self._n_hidden:,} tokens so far")
        else:
            if not self._thinking_on_screen:
                self._thinking_on_screen = True
                self._screen.dim("thinking: ")
            self._screen.dim(delta.text)

    def finish(self) -> None:
        """End what is open, however the answer ended."""
        self._screen.clear_status()
        self._end_thinking()
        self._screen.end_line()

    def _end_thinking(self) -> None:
        if self._thinking_on_screen:
            self._thinking_on_screen = False
            self._screen.dim("\n\n")
