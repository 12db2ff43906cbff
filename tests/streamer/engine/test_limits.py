"""What the process may take: host, cgroups of both versions, address space."""

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from streamer.engine import limits


def test_never_more_than_the_host_has() -> None:
    found = limits.memory_limits()
    assert 0 < found.available_bytes <= found.total_bytes <= psutil.virtual_memory().total


def group(root: Path, path: str, **files: str) -> None:
    directory = root / path
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / name.replace("__", ".")).write_text(text)


def test_a_limit_of_any_cgroup_above_holds_and_cache_counts_as_free(tmp_path: Path) -> None:
    group(tmp_path, "a", memory__max="1000\n", memory__current="700\n", memory__stat="anon 5\ninactive_file 300\n")
    group(tmp_path, "a/b", memory__max="max\n", memory__current="600\n")
    group(tmp_path, "a/b/c", memory__max="800\n", memory__current="500\n")
    names = ("memory.max", "memory.current", "inactive_file")
    assert list(limits._ancestors(tmp_path, "/a/b/c", *names)) == [(800, 500, "/a/b/c"), (1000, 400, "/a")]


def test_version_one_says_no_limit_with_a_huge_number(tmp_path: Path) -> None:
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    group(tmp_path, "x", memory__limit_in_bytes=str(2**63 - 4096), memory__usage_in_bytes="10")
    assert list(limits._ancestors(tmp_path, "/x", *names)) == []
    (tmp_path / "x" / "memory.limit_in_bytes").write_text("5000")
    assert list(limits._ancestors(tmp_path, "/x", *names)) == [(5000, 10, "/x")]


def test_the_tightest_bound_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "_cgroups", lambda: iter([(2**30, 2**28, "/box"), (2**29, 2**28, "/box/inner")]))
    found = limits.memory_limits()
    assert found.total_bytes == 2**29
    assert found.bound == "the cgroup /box/inner"
    assert found.available_bytes <= 2**29


def test_address_space_limit_counts() -> None:
    """What `ulimit -v` leaves, in a process of its own."""
    code = (
        "import resource, psutil; own = psutil.Process().memory_info(); limit = own.vms + 2**30; "
        "resource.setrlimit(resource.RLIMIT_AS, (limit, limit)); "
        "from streamer.engine.limits import memory_limits; m = memory_limits(); "
        "print(m.available_bytes, m.bound)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    available, _, bound = run.stdout.strip().partition(" ")
    assert 0 < int(available) < 2**30 + 2**27
    assert "ulimit -v" in bound
