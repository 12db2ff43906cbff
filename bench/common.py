"""What every benchmark here shares: the read-bandwidth probe, alternated medians, facts about the host.

A rate is only worth something beside the roofline of the same machine in the same minute: rates on shared machines
drift by 15 % between runs. So the probe and the cases take turns in one process and each is reported by its median.
GB = 1e9 bytes.
"""

import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import llvmlite
import numba
import numpy as np
from numba import njit, prange

PROBE = "probe"
_STREAMS = 4


@njit(parallel=True, nogil=True, cache=True)
def _read(words, tasks, sums):
    """Read int64 [N] once: `tasks` tasks share it, each with four streams a quarter of its part apart, interleaved."""
    quarter = words.shape[0] // (tasks * _STREAMS)
    for task in prange(tasks):
        first = task * _STREAMS * quarter
        a, b = words[first : first + quarter], words[first + quarter : first + 2 * quarter]
        c, d = words[first + 2 * quarter : first + 3 * quarter], words[first + 3 * quarter : first + 4 * quarter]
        total_a, total_b, total_c, total_d = np.int64(0), np.int64(0), np.int64(0), np.int64(0)
        for i in range(quarter):
            total_a += a[i]
            total_b += b[i]
            total_c += c[i]
            total_d += d[i]
        sums[task] = total_a + total_b + total_c + total_d


@dataclass(slots=True)
class Case:
    """One thing to time: `run(i)` makes the i-th call, which moves `nbytes`; `i` picks a block not touched lately."""

    name: str
    nbytes: int
    run: Callable[[int], object]
    note: str = ""
    seconds: list[float] = field(default_factory=list)  # per call, the mean of each sample
    _calls: int = 0
    _per_sample: int = 1

    def warm_up(self, sample_s: float) -> None:
        """Compile, and find how many calls fill a sample."""
        self.run(0)
        start = time.perf_counter()
        self.run(1)
        self._per_sample = max(2, int(sample_s / (time.perf_counter() - start)))
        self._calls = 2

    def sample(self) -> None:
        """Time one sample."""
        start = time.perf_counter()
        for _ in range(self._per_sample):
            self.run(self._calls)
            self._calls += 1
        self.seconds.append((time.perf_counter() - start) / self._per_sample)

    @property
    def call_s(self) -> float:
        """Median seconds of a call."""
        return statistics.median(self.seconds)

    @property
    def gb_s(self) -> float:
        """Median rate."""
        return self.nbytes / self.call_s / 1e9


def read_probe(arena: np.ndarray, slice_bytes: int = 1 << 27) -> Case:
    """The roofline: read an arena (uint8, far larger than the last cache), a slice a call, in four streams a thread."""
    words = arena[: arena.size // 8 * 8].view(np.int64)
    size = min(slice_bytes // 8, words.size)
    slices = words.size // size
    tasks = numba.get_num_threads()
    sums = np.empty(tasks, np.int64)

    def run(i: int) -> None:
        first = i % slices * size
        _read(words[first : first + size], tasks, sums)

    return Case(PROBE, size * 8, run, "reads")


def alternate(cases: list[Case], rounds: int, sample_s: float) -> None:
    """Take `rounds` samples of every case, in another random order each round."""
    for case in cases:
        case.warm_up(sample_s)
    shuffle = random.Random(0)
    for _ in range(rounds):
        for case in shuffle.sample(cases, len(cases)):
            case.sample()


def _first_line(path: Path, start: str = "") -> str | None:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    return next((line for line in lines if line.startswith(start)), None)


def last_cache_bytes() -> int | None:
    """Size of the last cache as the kernel sees it; in a virtual machine the real one may be larger and shared."""
    text = _first_line(Path("/sys/devices/system/cpu/cpu0/cache/index3/size"))
    return int(text.rstrip("K")) * 1024 if text and text.endswith("K") else None


def commit() -> str | None:
    """The commit that is checked out, read from the files of the repository."""
    git = Path(__file__).resolve().parent.parent / ".git"
    head = _first_line(git / "HEAD")
    if head is None or not head.startswith("ref: "):
        return head
    ref = head.removeprefix("ref: ")
    packed = (_first_line(git / "packed-refs") and (git / "packed-refs").read_text(encoding="utf-8").splitlines()) or []
    return _first_line(git / ref) or next((line.split()[0] for line in packed if line.endswith(f" {ref}")), None)


def host() -> dict[str, object]:
    """Facts that a number depends on."""
    model = _first_line(Path("/proc/cpuinfo"), "model name")
    flags = (_first_line(Path("/proc/cpuinfo"), "flags") or "").split()
    wanted = ("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_int8", "amx_bf16")
    memory = _first_line(Path("/proc/meminfo"), "MemTotal")
    return {
        "cpu": model.split(":")[1].strip() if model else platform.processor(),
        "features": [flag for flag in wanted if flag in flags],
        "cores": os.cpu_count(),
        "threads": numba.get_num_threads(),
        "threading_layer": numba.threading_layer(),
        "last_cache_mib": (last_cache_bytes() or 0) / 2**20 or None,
        "memory_gib": round(int(memory.split()[1]) / 2**20, 1) if memory else None,
        "load_average": os.getloadavg()[0],
        "kernel": platform.release(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "numba": numba.__version__,
        "llvm": ".".join(map(str, llvmlite.binding.llvm_version_info)),
    }


def print_json(document: dict[str, object]) -> None:
    """Print the last line of a benchmark: one JSON document on one line."""
    print(json.dumps(document, ensure_ascii=False, separators=(",", ":")))
