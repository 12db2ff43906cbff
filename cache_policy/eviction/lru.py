"""LRU with rank-ordered recency: inside one request the best-ranked expert of the last token is the most recent."""

from collections.abc import Collection, Iterator

from cache_policy.eviction.policy import Rows, retention_order


class Lru:
    """Keep what was asked for last."""

    def __init__(self) -> None:
        self._recency: dict[int, dict[int, None]] = {}  # group → keys, least recent first

    def record(self, group: int, rows: Rows) -> None:
        """Make the request's keys the most recent ones, in retention order."""
        recency = self._recency.setdefault(group, {})
        for key in reversed(retention_order(rows)):
            recency.pop(key, None)
            recency[key] = None

    def order(self, group: int, keys: Collection[int]) -> Iterator[int]:
        """Yield `keys`, most recent first."""
        return (key for key in reversed(self._recency.get(group, {})) if key in keys)

    def forget(self, group: int, key: int) -> None:
        """Drop the key's recency."""
        self._recency[group].pop(key, None)
