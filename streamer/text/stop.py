"""Stop strings over a stream of text: matched across token boundaries, never shown, held back no longer than needed."""

from collections.abc import Sequence

from streamer.config.errors import UsageError


class StopStrings:
    """Watch for the earliest stop string in text that arrives in pieces.

    The stop string that is complete first wins; of two that end together, the longer. So the result does not depend on
    how the text was cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises UsageError for an empty stop string, which would stop everything at once."""
        if isinstance(stops, str) or not all(isinstance(stop, str) and stop for stop in stops):
            raise UsageError(f"stop: expected a list of strings that are not empty, found {stops!r}. Fix it.")
        self._stops = tuple(stops)
        self._longest = max((len(stop) for stop in stops), default=0)
        self._held = ""
        self.stopped: str | None = None
        """The stop string that was met."""

    def push(self, text: str) -> tuple[str, bool]:
        """Take the next piece; return the text that may be shown and whether a stop string was met.

        After a stop, nothing more is shown.
        """
        if self.stopped is not None:
            return "", True
        buffer = self._held + text
        found = [(at, stop) for stop in self._stops if (at := buffer.find(stop)) >= 0]
        if found:
            at, self.stopped = min(found, key=lambda match: (match[0] + len(match[1]), match[0]))
            self._held = ""
            return buffer[:at], True
        hold = self._hold(buffer)
        self._held = buffer[hold:]
        return buffer[:hold], False

    def _hold(self, buffer: str) -> int:
        """Return where the longest tail that could still begin a stop string starts."""
        for start in range(max(0, len(buffer) - self._longest + 1), len(buffer)):
            tail = buffer[start:]
            if any(stop.startswith(tail) for stop in self._stops):
                return start
        return len(buffer)

    def flush(self) -> str:
        """Return the text still held back, when the stream ends without a stop."""
        held, self._held = self._held, ""
        return held
