"""One pool of page-aligned slots: mapped once, touched once, never grown."""

import mmap
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from storage.direct_io import ALIGNMENT
from storage.errors import StorageError

POISON = 0xFF  # as a block scale this byte is NaN: a kernel that reads a freed slot raises its flag

_TOUCH_STEP_BYTES = 1 << 27
_TOUCH_THREADS = 8  # the kernel clears pages in each, until memory is busy


def slot_bytes(payload_bytes: int) -> int:
    """Return the bytes of a slot: the payload at any offset inside its aligned window, in whole pages."""
    return -(-(payload_bytes + ALIGNMENT - 1) // ALIGNMENT) * ALIGNMENT


class Arena:
    """`n_slots` slots, each able to take the aligned window of a payload wherever that starts in its file.

    First touch can be slower than a drive (2.3 GB/s with 4 KiB pages, 11 GB/s with huge pages, 21 by two threads), so
    it happens here and not while experts arrive.

    Args:
        n_slots: number of slots.
        payload_bytes: bytes of one expert.
        poison: fill a slot with `POISON` when it is given up; for tests.
        touch: fault the memory in now. False where every slot is read once at start anyway.
        progress: called with (bytes touched, bytes in all).
        what: what the slots hold, for the error.

    Raises:
        StorageError: the memory cannot be mapped.
    """

    def __init__(
        self,
        n_slots: int,
        payload_bytes: int,
        poison: bool = False,
        touch: bool = True,
        progress: Callable[[int, int], None] | None = None,
        what: str = "expert slots",
    ) -> None:
        self.n_slots = n_slots
        self.payload_bytes = payload_bytes
        self.slot_bytes = slot_bytes(payload_bytes)
        self.poisoning = poison
        self.nbytes = max(n_slots, 1) * self.slot_bytes
        try:
            self._map = mmap.mmap(-1, self.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise StorageError(
                f"cannot map {self.nbytes} bytes for {n_slots} {what}: {error.strerror}; lower the memory budget"
            ) from error
        _advise_huge_pages(self._map)
        self._bytes = np.frombuffer(self._map, dtype=np.uint8)
        if touch:
            self._touch(progress)

    def slot(self, slot: int) -> memoryview:
        """Return a whole slot, writable and page-aligned: what a read is submitted with."""
        first = self._first(slot)
        return memoryview(self._map)[first : first + self.slot_bytes]

    def slot_view(self, slot: int, skip: int, nbytes: int) -> np.ndarray:
        """Return uint8[nbytes] of the slot from byte `skip` on: the payload inside its window. No copy."""
        if skip + nbytes > self.slot_bytes:
            raise ValueError(f"slot has {self.slot_bytes} bytes; expected at most that, got {skip} + {nbytes}")
        first = self._first(slot) + skip
        return self._bytes[first : first + nbytes]

    def poison(self, slot: int) -> None:
        """Overwrite a slot that was given up, where the arena was made for it; else do nothing."""
        if self.poisoning:
            first = self._first(slot)
            self._bytes[first : first + self.slot_bytes] = POISON

    def close(self) -> None:
        """Give the memory back, at the latest when the last view of it is gone. Idempotent."""
        self.n_slots = 0
        self._bytes = np.empty(0, dtype=np.uint8)
        try:
            self._map.close()
        except BufferError:
            return  # somebody still holds a view; the mapping goes with it

    def _first(self, slot: int) -> int:
        if not 0 <= slot < self.n_slots:
            raise IndexError(f"slot {slot} does not exist; the arena has {self.n_slots}")
        return slot * self.slot_bytes

    def _touch(self, progress: Callable[[int, int], None] | None) -> None:
        firsts = range(0, self.nbytes, _TOUCH_STEP_BYTES)
        n_threads = min(len(firsts), os.cpu_count() or 1, _TOUCH_THREADS)
        pool = ThreadPoolExecutor(n_threads)
        try:
            try:
                steps = pool.map(self._touch_step, firsts)
            except RuntimeError as error:
                raise StorageError(
                    f"expected {n_threads} threads for touching memory, found no room. Raise the limit on memory"
                    " or on processes (ulimit -v, ulimit -u, a container's pids limit)."
                ) from error
            for first, _ in zip(firsts, steps, strict=True):
                if progress is not None:
                    progress(min(first + _TOUCH_STEP_BYTES, self.nbytes), self.nbytes)
        finally:
            pool.shutdown(cancel_futures=True)  # an interrupt does not wait for the rest

    def _touch_step(self, first: int) -> None:
        self._bytes[first : first + _TOUCH_STEP_BYTES : mmap.PAGESIZE] = 0


def _advise_huge_pages(mapping: mmap.mmap) -> None:
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is None:
        return
    try:
        mapping.madvise(advice)
    except OSError:
        return  # a kernel without transparent huge pages: slower to touch, same bytes
