"""A strict reader of one JSON object: typed reads that collect every problem instead of stopping at the first.

Knows nothing about Kimi K3; `streamer.config.parse` says which keys it has.
"""

import difflib
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

MAX_INTEGER = 2**40  # above any width, count or context length: a larger number is a typing error


class Problems:
    """What is wrong with one configuration file: missing keys apart, so that they are named together."""

    def __init__(self) -> None:
        self.missing: list[str] = []
        self.wrong: list[str] = []
        self.wrong_keys: set[str] = set()  # dotted paths

    def __bool__(self) -> bool:
        return bool(self.missing or self.wrong)

    def lines(self) -> list[str]:
        """Return one line a problem; all missing keys share one."""
        missing = [f"missing: {', '.join(dict.fromkeys(self.missing))}"] if self.missing else []
        return missing + list(dict.fromkeys(self.wrong))


class Section:
    """One JSON object at `path` ('' for the file itself). A failed read records why and returns a placeholder."""

    def __init__(self, values: Mapping[str, Any], path: str, problems: Problems) -> None:
        self.values = values
        self.path = path
        self.problems = problems

    def key(self, name: str) -> str:
        """Return the dotted path of a key."""
        return f"{self.path}.{name}" if self.path else name

    def wrong(self, name: str, expected: str) -> None:
        """Record that `name` has a value that cannot be used."""
        self.problems.wrong_keys.add(self.key(name))
        self.problems.wrong.append(f"{self.key(name)} is {_short(self.values.get(name))}; expected {expected}")

    def is_wrong(self, name: str) -> bool:
        """Whether a read of `name` failed, so that its value is a placeholder that nothing may be compared with."""
        return self.key(name) in self.problems.wrong_keys or not self.has(name)

    def has(self, name: str) -> bool:
        """Whether the key is present and not null."""
        return self.values.get(name) is not None

    def is_integer(self, name: str) -> bool:
        """Whether the key holds an integer, so that other keys can be compared with it."""
        return type(self.values.get(name)) is int

    def _value(self, name: str) -> Any:
        if not self.has(name):
            self.problems.missing.append(self.key(name) + (" (is null)" if name in self.values else ""))
        return self.values.get(name)

    def integer(self, name: str, minimum: int = 1, maximum: int = MAX_INTEGER) -> int:
        """Read an integer in [minimum, maximum]."""
        value = self._value(name)
        if value is None:
            return minimum
        if type(value) is not int or not minimum <= value <= maximum:  # bool is an int to isinstance
            upper = "" if maximum == MAX_INTEGER else f" and at most {maximum}"
            self.wrong(name, f"an integer of at least {minimum}{upper}")
            return minimum
        return value

    def positive(self, name: str) -> float:
        """Read a finite number above zero."""
        value = self.number(name)
        if value <= 0 and not self.is_wrong(name):
            self.wrong(name, "a number above 0")
            return 1.0
        return value

    def number(self, name: str) -> float:
        """Read a finite number."""
        value = self._value(name)
        if value is None:
            return 1.0
        if type(value) not in (int, float) or not math.isfinite(value):
            self.wrong(name, "a finite number")
            return 1.0
        return float(value)

    def integers(self, name: str) -> list[int]:
        """Read a list of integers."""
        value = self._value(name)
        if value is None:
            return []
        if not isinstance(value, list) or any(type(item) is not int for item in value):
            self.wrong(name, "a list of integers")
            return []
        return value

    def section(self, name: str) -> "Section":
        """Read a nested object."""
        value = self._value(name)
        if value is not None and not isinstance(value, dict):
            self.wrong(name, "an object")
            value = None
        return Section(value or {}, self.key(name), self.problems)

    def fixed(self, name: str, expected: object, reason: str, *, required: bool = True) -> None:
        """Require the only value that this engine implements; `reason` says what another value would mean."""
        if not self.has(name) and not required:
            return
        value = self._value(name)
        if value is not None and (value != expected or isinstance(value, bool) != isinstance(expected, bool)):
            self.wrong(name, f"{_short(expected)} ({reason})")

    def known(self, names: Iterable[str], inert: Iterable[str], inert_prefixes: Sequence[str]) -> None:
        """Refuse keys that are neither used nor known to be inert; null values say nothing and pass."""
        names = list(names)
        allowed = {*names, *inert}
        for name in self.values:
            if name in allowed or name.startswith(tuple(inert_prefixes)) or not self.has(name):
                continue
            close = difflib.get_close_matches(name, names, n=1, cutoff=0.75)
            hint = f"did you mean {close[0]}?" if close else "it may change the equations, so it is not ignored"
            self.problems.wrong.append(f"{self.key(name)} is not a key that this engine knows; {hint}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
