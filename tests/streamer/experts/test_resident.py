import random
import time

import numpy as np
import pytest

from storage.errors import StorageError
from storage.reader import ExpertReader
from streamer.experts.resident import ResidentExperts


def resident(pool, progress=None, **reader_options):
    reader = ExpertReader(3, **reader_options)
    return ResidentExperts(pool.span, pool.layers, pool.n_experts, pool.expert_bytes, reader, progress)


@pytest.mark.parametrize("direct", [True, False])
def test_every_expert_has_the_files_bytes(pool, faults, direct):
    source, rng = resident(pool, direct=direct, read=faults(5, delay_s=0.0003, short=True)), random.Random(2)
    for layer in pool.layers:
        with source.open(layer, np.arange(pool.n_experts, dtype=np.int32).reshape(4, 6), prefill=True) as experts:
            for expert, view in next(experts):
                pool.check(layer, expert, view)
        routing = pool.routing(rng, rows=3)
        with source.open(layer, routing, prefill=False) as experts:
            assert [expert for expert, _ in next(experts)] == np.unique(routing).tolist()
    source.close()
    source.close()


def test_everything_is_a_hit_and_progress_reaches_the_end(pool):
    seen = []
    source = resident(pool, lambda done, total: seen.append((done, total)))
    total_bytes = len(pool.layers) * pool.n_experts * pool.expert_bytes
    assert seen[-1] == (total_bytes, total_bytes)
    assert seen == sorted(seen)
    with source.open(1, np.array([[1, 2], [2, 3]], dtype=np.int32), prefill=True):
        pass
    with source.open(2, np.array([[1, 2]], dtype=np.int32), prefill=False):
        pass
    counters = source.counters
    assert (counters.prefill_hits, counters.decode_hits) == (3, 2)
    assert (counters.prefill_misses, counters.decode_misses) == (0, 0)
    assert counters.bytes_read == total_bytes
    source.close()


def test_a_failed_read_names_the_file_and_leaves_no_read_behind(pool, faults):
    read = faults()
    read.fail_at = {9}
    reader = ExpertReader(3, read=read)
    with pytest.raises(StorageError, match=r"layer-\d: reading \d+ bytes at offset \d+ failed"):
        ResidentExperts(pool.span, pool.layers, pool.n_experts, pool.expert_bytes, reader)
    calls = read.calls
    time.sleep(0.05)
    assert read.calls == calls
    reader.close()
