import threading

import numpy as np
import pytest

import storage.arena
from storage.arena import POISON, Arena, slot_bytes
from storage.direct_io import ALIGNMENT
from storage.errors import StorageError


def test_a_slot_takes_the_payload_at_any_offset_of_its_window():
    assert slot_bytes(17_547_264) == 4285 * ALIGNMENT
    assert slot_bytes(1) == ALIGNMENT
    assert slot_bytes(2) == 2 * ALIGNMENT  # may straddle a page boundary


def test_slots_are_page_aligned_and_apart():
    arena = Arena(3, 5000)
    for i in range(3):
        view = np.frombuffer(arena.slot(i), dtype=np.uint8)
        assert view.ctypes.data % ALIGNMENT == 0
        assert view.size == arena.slot_bytes
        view[:] = i + 1
    assert [int(arena.slot_view(i, 4095, 5000).min()) for i in range(3)] == [1, 2, 3]
    assert arena.slot_view(0, 7, 10).flags.c_contiguous
    assert np.shares_memory(arena.slot_view(0, 7, 10), arena.slot_view(0, 0, 20))


def test_poison_fills_a_slot_only_where_it_was_asked_for():
    for poison in (False, True):
        arena = Arena(2, 100, poison=poison)
        arena.poison(1)
        assert (arena.slot_view(1, 0, arena.slot_bytes) == (POISON if poison else 0)).all()
        assert not arena.slot_view(0, 0, 100).any()


def test_touching_reports_progress():
    seen = []
    arena = Arena(4, 5000, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(arena.nbytes, arena.nbytes)]
    assert arena.nbytes == 4 * arena.slot_bytes


def test_many_threads_touch_every_page_and_progress_ascends(monkeypatch):
    monkeypatch.setattr(storage.arena, "_TOUCH_STEP_BYTES", 3 * ALIGNMENT)
    touched, seen, step = [], [], Arena._touch_step
    monkeypatch.setattr(Arena, "_touch_step", lambda arena, first: (touched.append(first), step(arena, first)))
    arena = Arena(10, 5000, progress=lambda done, total: seen.append((done, total)))
    assert sorted(touched) == list(range(0, arena.nbytes, 3 * ALIGNMENT))
    assert seen == [(min(first + 3 * ALIGNMENT, arena.nbytes), arena.nbytes) for first in sorted(touched)]


def test_no_room_for_threads_and_an_interrupt_while_touching(monkeypatch):
    monkeypatch.setattr(storage.arena, "_TOUCH_STEP_BYTES", ALIGNMENT)

    def interrupt(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Arena(10, 5000, progress=interrupt)

    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(StorageError, match=r"expected \d+ threads for touching memory, found no room"):
        Arena(10, 5000)


def test_what_does_not_exist_is_refused():
    arena = Arena(2, 5000)
    with pytest.raises(IndexError, match="slot 2 does not exist; the arena has 2"):
        arena.slot(2)
    with pytest.raises(ValueError, match="expected at most that"):
        arena.slot_view(0, arena.slot_bytes - 4, 5)


def test_close_is_idempotent_and_a_view_in_use_stays_readable():
    arena = Arena(1, 5000)
    view = arena.slot_view(0, 0, 5000)
    arena.close()
    arena.close()
    assert not view.any()
    with pytest.raises(IndexError):
        arena.slot(0)
