"""A pool of random experts in files: unaligned starts, one or six pieces, the last expert at the end of its file."""

import errno
import os
import random
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from storage.direct_io import ALIGNMENT, pread
from storage.span import ExpertSpan

LAYERS = (1, 2, 5)
N_EXPERTS = 24
EXPERT_BYTES = 6 * 1700 + 1
HEADER_BYTES = 1003  # odd, as in released shards


@dataclass
class Pool:
    """One file a layer; in a scattered pool every expert is six pieces that are not in file order."""

    directory: Path
    scattered: bool = False
    layers: tuple[int, ...] = LAYERS
    n_experts: int = N_EXPERTS
    expert_bytes: int = EXPERT_BYTES
    _bytes: dict[tuple[int, int], bytes] = field(default_factory=dict)

    def write(self) -> None:
        for layer in self.layers:
            blob = os.urandom(HEADER_BYTES + self.n_experts * self.expert_bytes)
            self.path(layer).write_bytes(blob)
            for expert in range(self.n_experts):
                pieces = self.span(layer, expert).pieces
                self._bytes[layer, expert] = b"".join(blob[at : at + nbytes] for at, nbytes in pieces)

    def path(self, layer: int) -> Path:
        return self.directory / f"layer-{layer}"

    def span(self, layer: int, expert: int) -> ExpertSpan:
        first = HEADER_BYTES + expert * self.expert_bytes
        if not self.scattered:
            return ExpertSpan(self.path(layer), ((first, self.expert_bytes),))
        part = self.expert_bytes // 6
        cuts = [(first + i * part, part if i < 5 else self.expert_bytes - 5 * part) for i in range(6)]
        return ExpertSpan(self.path(layer), tuple(cuts[i] for i in (2, 3, 0, 1, 4, 5)))

    def check(self, layer: int, expert: int, view: np.ndarray) -> None:
        assert view.dtype == np.uint8
        assert view.tobytes() == self._bytes[layer, expert], f"wrong bytes: layer {layer}, expert {expert}"

    def routing(self, rng: random.Random, rows: int, top_k: int = 4) -> np.ndarray:
        chosen = [rng.sample(range(self.n_experts), top_k) for _ in range(rows)]
        return np.array(chosen, dtype=np.int32).reshape(rows, top_k)


class Faults:
    """A read call with random delays and short reads, and a drive error at chosen calls."""

    def __init__(self, seed: int = 0, delay_s: float = 0.0, short: bool = False):
        self._rng, self._delay_s, self._short = random.Random(seed), delay_s, short
        self._lock, self.calls, self.fail_at = threading.Lock(), 0, set()

    def __call__(self, fd: int, buffer: memoryview, offset: int) -> int:
        with self._lock:
            self.calls += 1
            fails = self.calls in self.fail_at
            delay_s, share = self._rng.random() * self._delay_s, self._rng.random()
        if delay_s:
            time.sleep(delay_s)
        if fails:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        got = pread(fd, buffer, offset)
        short = int(got * share) // ALIGNMENT * ALIGNMENT  # whole blocks, as a direct read gives them
        return short if self._short and short and share > 0.5 else got


@pytest.fixture(params=[False, True], ids=["contiguous", "six pieces"])
def pool(request, tmp_path):
    pool = Pool(tmp_path, scattered=request.param)
    pool.write()
    return pool


@pytest.fixture
def faults():
    return Faults
