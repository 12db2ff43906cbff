import os
import random
import threading
import time
from itertools import chain

import numpy as np
import pytest

from storage.errors import StorageError
from storage.read_queue import Ticket
from storage.reader import ExpertReader
from streamer.experts.factory import open_experts
from streamer.experts.resident import ResidentExperts
from streamer.experts.streamed import Slots, StreamedExperts


def streamed(pool, slots, direct=True, threads=4, staging=0, **reader_options):
    reader = ExpertReader(threads, direct, **reader_options)
    shares = Slots(dict.fromkeys(pool.layers, slots), staging)
    return StreamedExperts(pool.span, pool.n_experts, pool.expert_bytes, shares, reader, poison=True)


def serve(pool, source, layer, routing, prefill=False, stop_after=None):
    """Check every expert's bytes; return their ids in the order in which they came."""
    seen = []
    with source.open(layer, routing, prefill) as experts:
        for expert, view in one_by_one(experts):
            pool.check(layer, expert, view)
            seen.append(expert)
            if len(seen) == stop_after:
                break
    return seen


def one_by_one(groups):
    return chain.from_iterable(groups)


def check_residents(pool, source):
    """What the cache says is here has the bytes of the file."""
    for layer in pool.layers:
        for key in source.pool.cache.resident(layer):
            pool.check(layer, key - layer * pool.n_experts, source.pool.view(source.pool.cache.slot_of(layer, key)))


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("slots", [1, 2, 4, 7, 16, 24])
def test_yielded_bytes_are_the_files_bytes_at_every_capacity(pool, faults, slots, direct):
    rng = random.Random(slots)
    source = streamed(pool, slots, direct, read=faults(slots, delay_s=0.0005, short=True))
    for step in range(6):
        for layer in pool.layers:
            routing = pool.routing(rng, rows=rng.choice([1, 3, 8]))
            seen = serve(pool, source, layer, routing, prefill=step == 0)
            assert sorted(seen) == np.unique(routing).tolist()
            check_residents(pool, source)
    source.close()


def test_every_expert_of_a_layer_through_one_slot_ends_at_the_end_of_the_file(pool):
    source = streamed(pool, 1)
    routing = np.arange(pool.n_experts, dtype=np.int32).reshape(1, -1)
    assert sorted(serve(pool, source, 5, routing)) == list(range(pool.n_experts))
    source.close()


def test_hits_come_first_and_counters_add_up(pool):
    source = streamed(pool, 6)
    serve(pool, source, 1, np.array([[0, 1, 2], [3, 1, 0]], dtype=np.int32), prefill=True)
    order = serve(pool, source, 1, np.array([[9, 0, 3, 8]], dtype=np.int32))
    assert set(order[:2]) == {0, 3}
    counters = source.counters
    assert (counters.prefill_hits, counters.prefill_misses) == (0, 4)
    assert (counters.decode_hits, counters.decode_misses) == (2, 2)
    assert counters.bytes_read == 6 * pool.expert_bytes
    assert source.pool.reader.counters.reads == 6
    assert source.pool.reader.counters.nbytes >= counters.bytes_read
    assert counters.wait_s > 0
    source.close()


def test_misses_are_submitted_on_entry_in_file_order(pool):
    offsets, gate = [], threading.Event()

    def read(fd, buffer, offset):
        offsets.append(offset)
        gate.wait(10)
        return os.preadv(fd, [buffer], offset)

    source = streamed(pool, 8, threads=1, read=read)
    with source.open(1, np.array([[7, 2, 19, 4, 11]], dtype=np.int32), False) as experts:
        deadline = time.monotonic() + 10
        while not offsets and time.monotonic() < deadline:
            time.sleep(0.001)
        gate.set()
        assert [expert for expert, _ in one_by_one(experts)] == [2, 4, 7, 11, 19]
    source.close()


def test_slots_do_not_drain_between_waves(pool):
    """The next read of a slot starts when its expert was served, while other reads of the wave are still out."""
    slow, order = threading.Event(), []

    def read(fd, buffer, offset):
        if offset <= pool.span(1, 0).pieces[0][0] < offset + len(buffer):
            slow.wait(10)
        return os.preadv(fd, [buffer], offset)

    source = streamed(pool, 3, threads=3, read=read)
    with source.open(1, np.arange(12, dtype=np.int32)[None, ::-1].copy(), False) as experts:
        for expert, view in one_by_one(experts):
            pool.check(1, expert, view)
            order.append(expert)
            if len(order) == 7:
                slow.set()
    assert sorted(order) == list(range(12))
    assert order.index(0) >= 7  # submitted in the first wave
    source.close()


@pytest.mark.parametrize("slots", [2, 6])
def test_a_drive_error_fails_its_request_and_the_next_one_works(pool, faults, slots):
    read = faults()
    source, rng = streamed(pool, slots, read=read), random.Random(3)
    for failing in range(1, 6):
        routing = pool.routing(rng, rows=6)
        read.calls, read.fail_at = 0, {failing}
        with pytest.raises(StorageError, match=r"layer-2: .*at offset \d+ failed after \d+: Input/output error"):
            serve(pool, source, 2, routing)
        read.fail_at = set()
        check_residents(pool, source)
        assert sorted(serve(pool, source, 2, routing)) == np.unique(routing).tolist()
    source.close()


def test_a_file_truncated_while_running_is_named_and_other_layers_go_on(pool):
    source = streamed(pool, 4)
    routing = np.array([[0, 1, 22, 23]], dtype=np.int32)
    serve(pool, source, 2, routing)
    os.truncate(pool.path(5), pool.span(5, 23).offset + 5000)
    with pytest.raises(StorageError, match=r"layer-5: file truncated: expected \d+ bytes at offset \d+, got \d+"):
        serve(pool, source, 5, routing)
    assert sorted(serve(pool, source, 2, routing + 0)) == [0, 1, 22, 23]
    assert sorted(serve(pool, source, 5, np.array([[0, 3]], dtype=np.int32))) == [0, 3]
    source.close()


def test_leaving_early_never_yields_wrong_bytes_later(pool, faults):
    rng = random.Random(11)
    read = faults(7, delay_s=0.0003, short=True)
    source = streamed(pool, 5, read=read)
    for _ in range(200):
        layer, routing = rng.choice(pool.layers), pool.routing(rng, rows=rng.choice([1, 1, 4]))
        union = np.unique(routing).tolist()
        read.fail_at = {read.calls + rng.randint(1, 8)} if rng.random() < 0.1 else set()
        stop_after = rng.choice([None, 1, 2, len(union)])
        try:
            seen = serve(pool, source, layer, routing, stop_after=stop_after)
        except StorageError:
            continue
        assert len(set(seen)) == len(seen) == min(stop_after or len(union), len(union))
        check_residents(pool, source)
    source.close()


def test_leaving_at_once_and_an_error_of_the_consumer_leave_the_cache_whole(pool):
    source, routing = streamed(pool, 4), np.array([[1, 2, 3], [4, 5, 6]], dtype=np.int32)
    with source.open(1, routing, False):
        pass
    with pytest.raises(ZeroDivisionError), source.open(1, routing, False) as experts:
        _ = next(experts)[0][0] / 0
    assert sorted(serve(pool, source, 1, routing)) == [1, 2, 3, 4, 5, 6]
    with source.open(1, np.empty((0, 3), dtype=np.int32), False) as experts:
        assert list(experts) == []
    source.close()


def test_an_interrupt_while_waiting_for_started_reads_is_made_good_at_the_next_request(pool, faults, monkeypatch):
    source, rng = streamed(pool, 5, read=faults(1, delay_s=0.01)), random.Random(5)
    wait, interrupts = Ticket.wait, []

    def interrupted(ticket):
        if not interrupts:
            interrupts.append(ticket)
            raise KeyboardInterrupt
        wait(ticket)

    monkeypatch.setattr(Ticket, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        serve(pool, source, 2, pool.routing(rng, rows=4), stop_after=1)
    routing = pool.routing(rng, rows=4)
    assert sorted(serve(pool, source, 2, routing)) == np.unique(routing).tolist()
    check_residents(pool, source)
    source.close()


def test_experts_are_not_served_after_their_context(pool):
    source = streamed(pool, 4)
    with source.open(1, np.array([[1, 2]], dtype=np.int32), False) as experts:
        next(experts)
    with pytest.raises(RuntimeError, match="after their context was left"):
        next(experts)
    with source.open(2, np.array([[1, 2]], dtype=np.int32), False) as experts:
        next(experts)
        source.close()
        source.close()
        with pytest.raises(RuntimeError, match="after their context was left"):
            next(experts)


def test_the_factory_holds_everything_where_the_slots_do(pool):
    for slots, kind in [(24, ResidentExperts), (23, StreamedExperts)]:
        shares = Slots(dict.fromkeys(pool.layers, slots))
        source = open_experts(pool.span, pool.n_experts, pool.expert_bytes, shares, ExpertReader(2))
        assert isinstance(source, kind)
        assert serve(pool, source, 5, np.array([[23]], dtype=np.int32)) == [23]
        source.close()
