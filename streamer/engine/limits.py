"""How much memory this process may take here: the host, its cgroups, its address space. Reads, decides nothing."""

import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

CGROUPS = Path("/sys/fs/cgroup")
_NO_LIMIT = 2**60  # cgroup v1 says "no limit" with a huge number


@dataclass(frozen=True, slots=True)
class MemoryLimits:
    """Bytes there are for this machine or container, bytes still free, and what sets each bound.

    Page cache counts as free: the kernel gives it up.
    """

    total_bytes: int
    available_bytes: int
    bound: str


def memory_limits() -> MemoryLimits:
    """Measure the limits of this process. What it holds already counts as its own, not as taken."""
    memory, own = psutil.virtual_memory(), psutil.Process().memory_info()
    total, available, bound = memory.total, memory.available + own.rss, "this machine"
    for limit, used, path in _cgroups():
        if limit < total:
            total, bound = limit, f"the cgroup {path}"
        available = min(available, limit - used + own.rss)
    address_space, _ = resource.getrlimit(resource.RLIMIT_AS)
    if address_space != resource.RLIM_INFINITY:
        # Half a gigabyte of address space belongs to libraries and thread stacks that never become memory.
        room = address_space - own.vms + own.rss
        if room < total:
            total, bound = room, "the limit on address space (ulimit -v)"
        available = min(available, room)
    return MemoryLimits(max(total, 0), max(min(available, total), 0), bound)


def _cgroups() -> Iterator[tuple[int, int, str]]:
    """Yield (limit, used, path) of each cgroup around this process that limits memory, v1 and v2."""
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            yield from _ancestors(CGROUPS, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            yield from _ancestors(CGROUPS / "memory", path, *names)


def _ancestors(
    root: Path, path: str, limit_name: str, used_name: str, cache_name: str
) -> Iterator[tuple[int, int, str]]:
    """A limit anywhere above holds too. In a container the path may be the host's: then only the root is visible."""
    group = root / path.lstrip("/")
    for level in (group, *group.parents):
        if level != root and root not in level.parents:
            return
        limit, used = _number(level / limit_name), _number(level / used_name)
        if limit is not None and used is not None and limit < _NO_LIMIT:
            yield limit, max(used - _inactive_file(level / "memory.stat", cache_name), 0), f"/{level.relative_to(root)}"


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _inactive_file(path: Path, name: str) -> int:
    try:
        fields = dict(line.split() for line in path.read_text().splitlines())
    except (OSError, ValueError):
        return 0
    return int(fields.get(name, 0))
