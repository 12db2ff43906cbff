"""Does `StreamedExperts` reach the drive? GB/s of expert reads against raw O_DIRECT preads of the same file.

    python -m bench.reads DIRECTORY [--experts 96] [--depth 8] [--rounds 5]

Fairness: one process, one file of random bytes, the same expert windows at the same depth, arms alternated, medians
with spread. O_DIRECT on both sides, or the run says that it measures the page cache. The
streamed arm includes policy, queues and hand-over; its slots equal the depth, so every read waits for a slot. The
last line is one JSON object. GB = 10^9 bytes.
"""

import argparse
import json
import os
import platform
import random
import statistics
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from storage.arena import Arena
from storage.direct_io import FileTable, OpenFile, aligned_window, pread_full
from storage.reader import ExpertReader
from storage.span import ExpertSpan
from streamer.experts.streamed import StreamedExperts

EXPERT_BYTES = 17_547_264  # released size
HEADER_BYTES = 100_003  # experts start at odd offsets in released shards
MAX_FILE_BYTES = 4_000_000_000


def write_file(path: Path, n_experts: int) -> None:
    """Random bytes, on the drive and not only in the page cache."""
    rng = np.random.default_rng(0)
    with open(path, "wb") as file:
        file.write(bytes(HEADER_BYTES))
        for _ in range(n_experts):
            file.write(rng.bytes(EXPERT_BYTES))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def raw(file: OpenFile, arena: Arena, order: list[int], depth: int) -> float:
    """Return GB/s of plain preads of every expert's window, `depth` at a time."""

    def read(job: tuple[int, int]) -> None:
        index, expert = job
        offset = HEADER_BYTES + expert * EXPERT_BYTES
        start, length = aligned_window(offset, EXPERT_BYTES) if file.direct else (offset, EXPERT_BYTES)
        pread_full(file, arena.slot(index % arena.n_slots)[:length], start, offset - start + EXPERT_BYTES)

    with ThreadPoolExecutor(depth) as pool:
        started = time.perf_counter()
        list(pool.map(read, enumerate(order)))
        return len(order) * EXPERT_BYTES / (time.perf_counter() - started) / 1e9


def streamed(source: StreamedExperts, order: list[int]) -> float:
    """Return GB/s of one request for all of them; the few hits of the last request are not counted."""
    before_bytes, started = source.counters.bytes_read, time.perf_counter()
    with source.open(0, np.array([order], dtype=np.int32), prefill=True) as experts:
        for _ in experts:
            pass
    return (source.counters.bytes_read - before_bytes) / (time.perf_counter() - started) / 1e9


def measure(path: Path, n_experts: int, depth: int, rounds: int) -> tuple[dict[str, list[float]], str]:
    """Alternate the two arms; return their rates in GB/s, and how the file was read."""
    table = FileTable()
    file = table.acquire(path)
    arena = Arena(2 * depth, EXPERT_BYTES)

    def span(_: int, expert: int) -> ExpertSpan:
        return ExpertSpan(path, ((HEADER_BYTES + expert * EXPERT_BYTES, EXPERT_BYTES),))

    source = StreamedExperts(span, [0], n_experts, EXPERT_BYTES, depth, ExpertReader(depth))
    rates: dict[str, list[float]] = {"raw": [], "streamed": []}
    for index in range(rounds):
        order = random.Random(index).sample(range(n_experts), n_experts)
        for arm in ("raw", "streamed") if index % 2 == 0 else ("streamed", "raw"):
            rates[arm].append(raw(file, arena, order, depth) if arm == "raw" else streamed(source, order))
    source.close()
    table.close()
    return rates, "O_DIRECT" if file.direct else f"page cache: {next(iter(table.fallbacks.values()))}"


def main() -> None:
    """Parse, write the file, measure, print the table and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="on the drive to measure; the file is deleted at the end")
    parser.add_argument("--experts", type=int, default=96, help="experts in the file, 17.5 MB each")
    parser.add_argument("--depth", type=int, default=8, help="reads in flight")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of both arms")
    args = parser.parse_args()
    if args.experts * EXPERT_BYTES + HEADER_BYTES > MAX_FILE_BYTES:
        parser.error(f"--experts {args.experts} makes a file above 4 GB; expected at most 227")
    with tempfile.TemporaryDirectory(dir=args.directory, prefix="bench-io-") as scratch:
        path = Path(scratch) / "experts"
        write_file(path, args.experts)
        rates, mode = measure(path, args.experts, args.depth, args.rounds)
    medians = {arm: statistics.median(values) for arm, values in rates.items()}
    share = medians["streamed"] / medians["raw"]
    print(f"{'arm':<10} {'GB/s':>7} {'min':>7} {'max':>7}   {mode}")
    for arm, values in rates.items():
        print(f"{arm:<10} {medians[arm]:>7.2f} {min(values):>7.2f} {max(values):>7.2f}")
    print(f"streamed reaches {share:.1%} of the drive at depth {args.depth}")
    config = {"depth": args.depth, "experts": args.experts, "rounds": args.rounds, "mode": mode}
    print(json.dumps({"bench": "io", "machine": platform.machine()} | config | {"share": share} | rates))


if __name__ == "__main__":
    main()
