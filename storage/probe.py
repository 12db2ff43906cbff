"""Measures drives on a checkpoint's own files: random expert-sized O_DIRECT reads at several depths.

Never through the page cache, which would answer with the speed of memory: a drive without O_DIRECT is not measured.
Neither are holes, which a file system invents without asking the drive. Two seconds tell a drive's rate within a few
percent, not its rate when it is hot or full.
"""

import os
import random
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from threading import Lock

from storage import describe
from storage.arena import Arena
from storage.direct_io import FileTable, OpenFile, ReadFn, aligned_window, pread, pread_full
from storage.drive import device_of, mount_point
from storage.errors import StorageError

DEPTHS = (1, 2, 4, 8, 16)
DEFAULT_DEPTH = 8  # of a drive that could not be measured
TOLERANCE = 0.03  # what more reads in flight must gain: each of them delays those that come after
PROBE_S = 2.0

_MAX_WINDOWS = 4096  # enough not to read one twice in two seconds
_ROUNDS = 2

Window = tuple[OpenFile, int]  # (file, aligned offset)
Interval = tuple[float, float]  # when a read began and ended, seconds


@dataclass(frozen=True, slots=True)
class DriveProbe:
    """What was measured on one drive.

    `gb_s` maps depth → GB/s (1e9) and is empty where nothing could be measured; `notes` are sentences for a person.
    """

    name: str  # mount point
    window_bytes: int
    gb_s: Mapping[int, float]
    depth: int  # reads to keep in flight
    unix_s: float  # when
    notes: tuple[str, ...] = ()


def probe_drives(
    files: Iterable[Path], payload_bytes: int, seconds: float = PROBE_S, read: ReadFn = pread
) -> dict[int, DriveProbe]:
    """Measure each drive that holds some of `files`, one after the other; return device (`drive.device_of`) → probe.

    What goes wrong is a note of its drive.

    Args:
        files: shards of one checkpoint.
        payload_bytes: bytes of one expert; 16 windows of them are held in memory meanwhile.
        seconds: of measuring, on each drive.
        read: the read call; tests count here.
    """
    of_drive: dict[int, list[Path]] = {}
    for path in files:
        of_drive.setdefault(device_of(path), []).append(path)
    return {device: _probe_drive(paths, payload_bytes, seconds, read) for device, paths in of_drive.items()}


def choose_depth(gb_s: Mapping[int, float]) -> int:
    """Return the smallest depth whose rate is within TOLERANCE of the best, or DEFAULT_DEPTH where there is none."""
    enough = (1.0 - TOLERANCE) * max(gb_s.values(), default=0.0)
    return min((depth for depth, rate in gb_s.items() if rate >= enough), default=DEFAULT_DEPTH)


def bytes_within(intervals: Iterable[Interval], nbytes: int, begin: float, end: float) -> float:
    """Return the bytes read from `begin` to `end` by reads of `nbytes` each, those at the edges in proportion.

    Whole reads alone would favour small depths: the more in flight, the more are cut off at the end.
    """
    return sum(nbytes * max(0.0, min(last, end) - max(first, begin)) / (last - first) for first, last in intervals)


def _probe_drive(paths: Sequence[Path], payload_bytes: int, seconds: float, read: ReadFn) -> DriveProbe:
    name, table = mount_point(paths[0]), FileTable()
    window_bytes = aligned_window(0, payload_bytes)[1]
    notes: list[str] = []
    gb_s: dict[int, float] = {}
    try:
        files = [file for file in [table.acquire(path) for path in paths] if file.direct]
        notes += [f"{place} is not measured: {reason}" for place, reason in table.fallbacks.items()]
        sparse = [file.path.name for file in files if _first_hole(file, 0) < os.fstat(file.fd).st_size]
        if sparse:
            text = f"{describe.shards(sparse)} on {name} have holes, which read as zeros and are not measured"
            notes.append(f"{text}. Was all of it written?")
        windows = written_windows(files, window_bytes)
        if windows:
            gb_s = _sweep(windows, window_bytes, seconds, read)
        else:
            notes.append(f"{name} has no {window_bytes:,} bytes in one file that can be read with O_DIRECT")
    except (StorageError, OSError) as error:
        notes.append(f"{name} could not be measured: {error}")
    finally:
        table.close()
    return DriveProbe(name, window_bytes, gb_s, choose_depth(gb_s), time.time(), tuple(notes))


def _first_hole(file: OpenFile, offset: int) -> int:
    """Return where the next hole begins: the end of the file where it has none, or cannot have any."""
    return os.lseek(file.fd, offset, os.SEEK_HOLE)


def written_windows(files: Sequence[OpenFile], window_bytes: int) -> list[Window]:
    """Return disjoint windows of written bytes in random order."""
    windows = [
        (file, offset)
        for file in files
        for offset in range(0, os.fstat(file.fd).st_size - window_bytes + 1, window_bytes)
    ]
    random.shuffle(windows)  # other ones each time: what was read lately may lie in a cache below the drive
    written = (window for window in windows if _first_hole(*window) >= window[1] + window_bytes)
    return list(islice(written, _MAX_WINDOWS))


def _sweep(windows: Sequence[Window], window_bytes: int, seconds: float, read: ReadFn) -> dict[int, float]:
    """Return depth → GB/s; the depths take turns, up and down and again, so that a drift of the drive cancels out."""
    arena = Arena(max(DEPTHS), window_bytes)
    endless = cycle(windows)
    turns = (*DEPTHS, *reversed(DEPTHS)) * _ROUNDS
    slice_s = seconds / len(turns)
    totals = dict.fromkeys(DEPTHS, 0.0)
    try:
        for depth in turns:
            begin = time.perf_counter()
            intervals = _read_until(begin + slice_s, depth, arena, endless, read)
            totals[depth] += bytes_within(intervals, window_bytes, begin, begin + slice_s)
    finally:
        arena.close()
    return {depth: nbytes / (2 * _ROUNDS * slice_s) / 1e9 for depth, nbytes in totals.items()}


def _read_until(deadline: float, depth: int, arena: Arena, windows: Iterator[Window], read: ReadFn) -> list[Interval]:
    """Keep `depth` reads in flight until the deadline; return when each began and ended."""
    lock, intervals = Lock(), list[Interval]()

    def work(slot: int) -> None:
        while (begin := time.perf_counter()) < deadline:
            with lock:
                file, offset = next(windows)
            buffer = arena.slot(slot)[: arena.payload_bytes]
            pread_full(file, buffer, offset, len(buffer), read)
            intervals.append((begin, time.perf_counter()))

    with ThreadPoolExecutor(depth) as pool:
        list(pool.map(work, range(depth)))
    return intervals
