"""The kernels' thread pool: one, sized to physical cores, checked at start."""

import os

import numba
import psutil


def physical_cores() -> int:
    """Physical cores this process may run on: hyper-threads share the vector units that kernels live on."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(allowed, psutil.cpu_count(logical=False) or allowed))


def start_threads(requested: int | None) -> int:
    """Size the pool to `requested` threads, or the physical cores; returns how many there are."""
    launched: int = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]  # set when numba is imported
    count = min(requested or physical_cores(), launched)
    numba.set_num_threads(count)
    return count


def active_threads() -> int:
    """How many threads the pool has now."""
    count: int = numba.get_num_threads()
    return count
