"""How should experts be read? Each case answers one question, on files that exist.

    python -m bench.reads FILE... [--case depths] [--rounds 5] [--depth 8]

depths      GB/s of random expert windows with 1 to 16 reads in flight
parts       one expert read as 1 to 8 parts at once: alone, and sixteen experts with 16 reads in flight
background  demand beside speculation that may hold 1 to 8 reads: how long demand waits, what speculation gets
switch      GIL switch interval while a Python thread is busy
touch       first touch of an arena by several threads
streamed    StreamedExperts (policy, queues, hand-over; a slot a read in flight) against plain reads

Fairness: one process, arms in random order every round, medians with spread; O_DIRECT or nothing; other windows each
time, because a virtual drive has a cache of its own. The last line is one JSON object. GB = 1e9 bytes.
"""

import argparse
import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from pathlib import Path
from queue import SimpleQueue

import numpy as np

from bench.common import host, print_json
from storage.arena import Arena
from storage.direct_io import ALIGNMENT, FileTable, OpenFile, pread_full
from storage.probe import DEPTHS, probe_drives, written_windows
from storage.read_queue import Priority, Ticket
from storage.reader import ExpertReader
from storage.span import ExpertSpan
from streamer.experts.streamed import Slots, StreamedExperts

EXPERT_BYTES = 17_547_264  # released size
WINDOW_BYTES = 4285 * ALIGNMENT
BATCH = 16  # experts of one layer for one token

Arm = Callable[[], dict[str, float]]  # one sample: figure → value


class Windows:
    """Endless random expert windows of the files, each read once before one is read again."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._table = FileTable()
        files = [self._table.acquire(path) for path in paths]
        if not all(file.direct for file in files):
            sys.exit(f"no O_DIRECT: {self._table.fallbacks}")
        self.found = written_windows(files, WINDOW_BYTES)
        self._endless = cycle(self.found)

    def take(self, n: int) -> list[tuple[OpenFile, int]]:
        """Return the next `n` windows."""
        return [next(self._endless) for _ in range(n)]

    def spans(self, n: int) -> list[ExpertSpan]:
        """Return the next `n` as experts that start at an odd offset inside."""
        return [ExpertSpan(file.path, ((offset + 8, EXPERT_BYTES),)) for file, offset in self.take(n)]


def depths(windows: Windows, paths: Sequence[Path], _: int) -> dict[str, Arm]:
    """All depths are one arm: the probe alternates them itself."""

    def run() -> dict[str, float]:
        (drive,) = probe_drives(paths, EXPERT_BYTES, seconds=6.0).values()
        return {f"depth {depth} GB/s": rate for depth, rate in drive.gb_s.items()}

    return {"probe": run}


def parts(windows: Windows, _: Sequence[Path], __: int) -> dict[str, Arm]:
    """Cut each window into `n` parts of whole blocks, all read at once."""
    pool, arena = ThreadPoolExecutor(BATCH), Arena(BATCH, EXPERT_BYTES)

    def part(file: OpenFile, offset: int, buffer: memoryview) -> None:
        pread_full(file, buffer, offset, len(buffer))

    def read(experts: int, n: int) -> float:
        step = -(-WINDOW_BYTES // n // ALIGNMENT) * ALIGNMENT
        jobs = []
        for slot, (file, offset) in enumerate(windows.take(experts)):
            for first in range(0, WINDOW_BYTES, step):
                jobs.append((file, offset + first, arena.slot(slot)[first : min(first + step, WINDOW_BYTES)]))
        started = time.perf_counter()
        list(pool.map(lambda job: part(*job), jobs))
        return time.perf_counter() - started

    def run(n: int) -> dict[str, float]:
        alone = statistics.median(read(1, n) for _ in range(8))
        return {"alone ms": alone * 1e3, "sixteen ms": statistics.median(read(BATCH, n) for _ in range(3)) * 1e3}

    return {f"{n} parts": lambda n=n: run(n) for n in (1, 2, 4, 8)}


def background(windows: Windows, _: Sequence[Path], depth: int) -> dict[str, Arm]:
    """Layers of 8 demand reads and 10 ms of other work, while speculation always has something to read."""

    def run(bound: int) -> dict[str, float]:
        reader, arena = ExpertReader(depth, background=max(bound, 1)), Arena(8 + 24, EXPERT_BYTES)
        done, guessed, waits = SimpleQueue[Ticket](), SimpleQueue[Ticket](), []
        guesses = windows.spans(24) if bound else []
        reader.submit_many(
            [(8 + i, s, arena.slot(8 + i)) for i, s in enumerate(guesses)], guessed, Priority.SPECULATION
        )
        speculated, begin = 0, time.perf_counter()
        for _ in range(20):
            started = time.perf_counter()
            reader.submit_many([(i, span, arena.slot(i)) for i, span in enumerate(windows.spans(8))], done)
            for _ in range(8):
                done.get()
            waits.append(time.perf_counter() - started)
            time.sleep(0.01)
            while not guessed.empty():
                slot = guessed.get().key
                speculated += 1
                reader.submit(slot, windows.spans(1)[0], arena.slot(slot), guessed, Priority.SPECULATION)
        seconds = time.perf_counter() - begin
        reader.close()
        demand = 20 * 8 * EXPERT_BYTES / seconds / 1e9
        return {
            "demand wait ms": statistics.median(waits) * 1e3,
            "speculated GB/s": speculated * EXPERT_BYTES / seconds / 1e9,
            "in all GB/s": demand + speculated * EXPERT_BYTES / seconds / 1e9,
        }

    return {f"background {n}" if n else "no speculation": lambda n=n: run(n) for n in (0, 1, 2, 4, 8)}


def switch(windows: Windows, _: Sequence[Path], depth: int) -> dict[str, Arm]:
    """Read 64 experts while another thread computes in Python, and hand each over to this one."""
    arena = Arena(64, EXPERT_BYTES)

    def run(interval_s: float, busy: bool) -> dict[str, float]:
        stop, before = threading.Event(), sys.getswitchinterval()
        sys.setswitchinterval(interval_s)
        turns = [0]

        def compute() -> None:
            while not stop.is_set():
                turns[0] += sum(range(1000)) > 0

        worker = threading.Thread(target=compute)
        if busy:
            worker.start()
        reader, done = ExpertReader(depth), SimpleQueue[Ticket]()
        started = time.perf_counter()
        reader.submit_many([(i, span, arena.slot(i)) for i, span in enumerate(windows.spans(64))], done)
        for _ in range(64):
            done.get()
        seconds = time.perf_counter() - started
        stop.set()
        reader.close()
        if busy:
            worker.join()
        sys.setswitchinterval(before)
        return {"GB/s": 64 * EXPERT_BYTES / seconds / 1e9, "k turns/s": turns[0] / seconds / 1e3}

    arms: dict[str, Arm] = {"idle": lambda: run(0.005, busy=False)}
    return arms | {f"busy {ms} ms": lambda ms=ms: run(ms / 1e3, busy=True) for ms in (5, 1, 0.1)}


def touch(_: Windows, __: Sequence[Path], ___: int) -> dict[str, Arm]:
    """Fault 4 GB in, one byte a page; threads take turns at 64 MB parts."""
    step = 1 << 26

    def run(threads: int) -> dict[str, float]:
        arena = Arena(229, EXPERT_BYTES, touch=False)
        content = np.frombuffer(arena._map, np.uint8)
        with ThreadPoolExecutor(threads) as pool:
            started = time.perf_counter()
            list(pool.map(lambda first: _touch(content[first : first + step]), range(0, arena.nbytes, step)))
            seconds = time.perf_counter() - started
        return {"GB/s": arena.nbytes / seconds / 1e9}

    return {f"{n} threads": lambda n=n: run(n) for n in (1, 2, 4)}


def _touch(part: np.ndarray) -> None:
    part[::4096] = 0


def streamed(windows: Windows, _: Sequence[Path], depth: int) -> dict[str, Arm]:
    """Sixty-four experts in one request of a source with `depth` slots, or by plain reads in as many threads."""
    arena, pool, spans = Arena(depth, EXPERT_BYTES), ThreadPoolExecutor(depth), windows.spans(1)
    source = StreamedExperts(
        lambda _, expert: spans[expert % 64], 1 << 20, EXPERT_BYTES, Slots({0: depth}), ExpertReader(depth)
    )
    first = [0]

    def plain() -> dict[str, float]:
        jobs = list(enumerate(windows.take(64)))
        started = time.perf_counter()
        list(pool.map(lambda j: pread_full(j[1][0], arena.slot(j[0] % depth), j[1][1], WINDOW_BYTES), jobs))
        return {"GB/s": 64 * EXPERT_BYTES / (time.perf_counter() - started) / 1e9}

    def through_source() -> dict[str, float]:
        spans[:] = windows.spans(64)
        first[0] += 64  # other experts each time: no hits
        started = time.perf_counter()
        with source.open(0, np.arange(first[0], first[0] + 64, dtype=np.int32)[None], prefill=True) as experts:
            for _ in experts:
                pass
        return {"GB/s": 64 * EXPERT_BYTES / (time.perf_counter() - started) / 1e9}

    return {"plain": plain, "streamed": through_source}


CASES = {case.__name__: case for case in (depths, parts, background, switch, touch, streamed)}


def main() -> None:
    """Run one case; print the table and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", help="large files on one drive, read only")
    parser.add_argument("--case", choices=CASES, default="depths")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--depth", type=int, default=max(DEPTHS) // 2, help="reads in flight where it is not varied")
    args = parser.parse_args()
    windows = Windows(args.files)
    arms = CASES[args.case](windows, args.files, args.depth)
    samples: dict[str, dict[str, list[float]]] = {name: {} for name in arms}
    for _ in range(args.rounds):
        for name in random.sample(list(arms), len(arms)):
            for figure, value in arms[name]().items():
                samples[name].setdefault(figure, []).append(value)
    for name, figures in samples.items():
        for figure, values in figures.items():
            low, high = min(values), max(values)
            print(f"{name:<16} {figure:<18} {statistics.median(values):>9.2f} {low:>9.2f} {high:>9.2f}")
    settings = {"bench": "reads", "case": args.case, "rounds": args.rounds, "depth": args.depth}
    print_json(settings | {"windows": len(windows.found), "samples": samples, "host": host()})


if __name__ == "__main__":
    main()
