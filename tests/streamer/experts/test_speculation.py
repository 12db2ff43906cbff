"""Predicted reads: taken over when right, given up when wrong, and never a wrong byte either way."""

import random
import threading
import time

import numpy as np
import pytest

from storage.direct_io import pread
from storage.errors import StorageError
from storage.reader import ExpertReader
from streamer.experts.streamed import Slots, StreamedExperts

LOOKAHEAD = 2


def speculating(pool, quota=3, staging=12, threads=4, **reader_options):
    reader = ExpertReader(threads, **reader_options)
    slots = Slots(dict.fromkeys(pool.layers, quota), staging, staging - 4)
    return StreamedExperts(
        pool.span, pool.n_experts, pool.expert_bytes, slots, reader, lookahead=LOOKAHEAD, poison=True
    )


def serve(pool, source, layer, routing, prefill=False, predictions=None):
    seen = []
    with source.open(layer, routing, prefill) as groups:
        for later, predicted in (predictions or {}).items():
            source.predict(later, predicted)
        for group in groups:
            for expert, view in group:
                pool.check(layer, expert, view)
                seen.append(expert)
    assert sorted(seen) == np.unique(routing).tolist()


def row(*experts):
    return np.array([experts], dtype=np.int32)


def settled(source, reads):
    """Wait until the reader has done `reads` reads."""
    deadline = time.monotonic() + 10
    while source.pool.reader.counters.reads < reads and time.monotonic() < deadline:
        time.sleep(0.001)
    assert source.pool.reader.counters.reads == reads


def test_ahead_names_the_next_layers(pool):
    source = speculating(pool)
    assert source.ahead(0) == (1, 2)
    assert source.ahead(1) == (2, 5)
    assert source.ahead(5) == ()
    source.close()


def test_a_right_prediction_is_counted_apart_and_read_once(pool):
    source = speculating(pool)
    serve(pool, source, 1, row(0, 1, 2), predictions={2: row(7, 8, 9)})
    settled(source, 6)
    serve(pool, source, 2, row(7, 9, 4))
    counters, size = source.counters, pool.expert_bytes
    assert (counters.decode_hits, counters.decode_predicted, counters.decode_misses) == (0, 2, 4)
    assert (counters.demand_bytes, counters.useful_bytes, counters.wasted_bytes) == (4 * size, 2 * size, size)
    assert source.pool.reader.counters.reads == 7
    assert source.gate.precision()[2] == [1.0, 0.0, 1.0]
    serve(pool, source, 2, row(7, 9, 4))
    assert counters.decode_hits == 3  # what speculation brought stays like anything else
    source.close()


def test_a_prediction_in_flight_is_waited_for_and_one_that_never_started_is_taken_back(pool):
    gate = threading.Event()

    def read(fd, buffer, offset):
        gate.wait(10)
        return pread(fd, buffer, offset)

    source = speculating(pool, threads=1, read=read)
    source.predict(2, row(7, 8, 9))  # 7 starts, the others wait behind it
    threading.Timer(0.05, gate.set).start()
    serve(pool, source, 2, row(7, 9, 1))
    counters, size = source.counters, pool.expert_bytes
    assert (counters.decode_predicted, counters.decode_misses) == (2, 1)
    assert (counters.useful_bytes, counters.wasted_bytes) == (2 * size, 0)
    assert source.pool.reader.counters.reads == 3  # 8 was never read
    source.close()


def test_a_failed_guess_hurts_nobody_and_its_demand_read_tells_the_truth(pool, faults):
    read = faults()
    source = speculating(pool, threads=1, read=read)
    read.fail_at = {1}
    source.predict(2, row(7))
    deadline = time.monotonic() + 10
    while not source.pool.reader.counters.failed and time.monotonic() < deadline:
        time.sleep(0.001)
    serve(pool, source, 2, row(7, 8))
    assert source.counters.decode_misses == 2
    read.fail_at = {read.calls + 1}
    with pytest.raises(StorageError, match="Input/output error"):
        serve(pool, source, 2, row(10))
    source.close()


def test_a_newer_prediction_takes_back_what_the_older_one_had_not_started(pool):
    gate = threading.Event()

    def read(fd, buffer, offset):
        gate.wait(10)
        return pread(fd, buffer, offset)

    source = speculating(pool, threads=1, read=read)
    source.predict(5, row(1, 2, 3, 4))
    source.predict(5, row(1, 6))
    assert set(source.pool.cache.predicted(5)) - {5 * pool.n_experts + 1} == {5 * pool.n_experts + 6}
    gate.set()
    serve(pool, source, 5, row(6, 1))
    assert source.counters.decode_predicted == 2
    source.close()


def test_random_steps_with_random_predictions_never_yield_a_wrong_byte(pool, faults):
    rng = random.Random(4)
    source = speculating(pool, quota=2, staging=9, read=faults(3, delay_s=0.0005, short=True))
    for _ in range(60):
        last = None
        for layer in pool.layers:
            routing = pool.routing(rng, rows=rng.choice([1, 1, 1, 5])) if last is None or rng.random() < 0.5 else last
            last = pool.routing(rng, rows=1)
            predictions = dict.fromkeys(source.ahead(layer), last)
            if rng.random() < 0.1:
                with source.open(layer, routing, False) as groups:
                    next(groups)  # a cancelled step
                continue
            serve(pool, source, layer, routing, predictions=predictions)
            for key in source.pool.cache.resident(layer):
                slot = source.pool.cache.slot_of(layer, key)
                pool.check(layer, key - layer * pool.n_experts, source.pool.view(slot))
    assert source.counters.useful_bytes > 0
    source.close()
