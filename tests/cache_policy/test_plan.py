from itertools import chain
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_policy.access import Load
from cache_policy.eviction.lru import Lru
from cache_policy.plan import PlannedCache

TRACE = Path(__file__).parents[3] / "shared" / "data" / "k3-routing-12-tokens.npy"

REQUESTS = st.lists(st.lists(st.lists(st.integers(0, 11), min_size=1, max_size=6, unique=True), max_size=4), max_size=8)


def served(plan):
    return [key for wave in plan.waves for key in wave.serve]


def test_a_cold_cache_loads_everything_into_free_slots():
    cache = PlannedCache({0: 4})
    plan = cache.plan(0, [[1, 2], [3, 1]])
    assert plan.hits == ()
    assert len(plan.waves) == 1
    assert sorted(served(plan)) == [1, 2, 3]
    assert plan.evictions == ()
    assert sorted(load.slot for load in plan.loads) == [0, 1, 2]


def test_hits_are_counted_before_the_request_and_the_least_recent_leaves():
    cache = PlannedCache({0: 3})
    cache.run(cache.plan(0, [[1, 2, 3]]))  # recency: 1 2 3
    plan = cache.plan(0, [[4, 2]])
    assert plan.hits == (2,)
    assert plan.loads == (Load(4, cache.slot_of(0, 3), 3),)
    cache.run(plan)
    assert cache.resident(0) == {1, 2, 4}


def test_a_union_beyond_the_slots_is_served_in_waves_and_keeps_the_best_of_the_last_token():
    cache = PlannedCache({0: 2})
    plan = cache.plan(0, [[1, 2, 3], [4, 5, 1]])
    assert len(plan.waves) == 3
    assert sorted(served(plan)) == [1, 2, 3, 4, 5]
    cache.run(plan)
    assert cache.resident(0) == {4, 5}


def test_hits_are_all_in_the_first_wave_and_lend_their_slot_only_after_it():
    cache = PlannedCache({0: 2})
    cache.run(cache.plan(0, [[1, 2]]))
    plan = cache.plan(0, [[3, 4, 1, 2]])
    assert plan.hits == (1, 2)
    assert plan.waves[0].serve == (1, 2)
    assert plan.waves[0].loads == ()
    assert set(plan.waves[1].evictions) == {1, 2}
    cache.run(plan)
    assert cache.resident(0) == {3, 4}


def test_a_request_whose_best_experts_fill_the_cache_still_streams_the_rest():
    cache = PlannedCache({0: 2})
    cache.run(cache.plan(0, [[1, 2]]))
    plan = cache.plan(0, [[1, 2, 3, 4]])
    assert plan.hits == (1, 2)
    assert sorted(served(plan)) == [1, 2, 3, 4]
    cache.run(plan)
    assert cache.resident(0) == {1, 3}  # one slot had to let 4 and 3 through


def test_one_slot_serves_everything():
    cache = PlannedCache({0: 1})
    plan = cache.plan(0, [[5, 6, 7]])
    assert [wave.serve for wave in plan.waves] == [(6,), (7,), (5,)]
    cache.run(plan)
    assert cache.resident(0) == {5}


def test_quotas_come_from_one_pool():
    cache = PlannedCache({1: 2, 4: 3})
    assert cache.n_slots == 5
    cache.run(cache.plan(1, [[10, 11]]))
    cache.run(cache.plan(4, [[40, 41, 42]]))
    assert {cache.slot_of(1, key) for key in (10, 11)} == {0, 1}
    assert {cache.slot_of(4, key) for key in (40, 41, 42)} == {2, 3, 4}


def test_an_empty_request_opens_nothing():
    cache = PlannedCache({0: 1})
    assert cache.plan(0, []).waves == ()
    assert cache.plan(0, [[]]).waves == ()


def test_refusals():
    with pytest.raises(ValueError, match="group 3 has 0 slots and 0 staging slots"):
        PlannedCache({3: 0})
    cache = PlannedCache({0: 1})
    with pytest.raises(RuntimeError, match="no open request"):
        cache.start(0, 1)
    cache.plan(0, [[2, 1]])
    with pytest.raises(RuntimeError, match="has an open request"):
        cache.plan(0, [[1]])
    with pytest.raises(RuntimeError, match="before it landed"):
        cache.release(0, 1)
    cache.start(0, 1)
    with pytest.raises(RuntimeError, match="before it landed"):
        cache.release(0, 1)
    cache.commit(0, 1)
    with pytest.raises(RuntimeError, match="was not served yet"):
        cache.start(0, 2)


def test_abort_keeps_what_landed_and_forgets_the_rest():
    cache = PlannedCache({0: 3})
    cache.run(cache.plan(0, [[1, 2, 3]]))
    plan = cache.plan(0, [[4, 5, 6]])
    first, second, _ = plan.loads
    cache.start(0, first.key)
    cache.commit(0, first.key)
    cache.start(0, second.key)
    assert cache.resident(0) == {1, 2, 3} - {first.evicts, second.evicts} | {first.key}
    cache.abort(0)
    assert cache.resident(0) == {1, 2, 3} - {first.evicts, second.evicts} | {first.key}
    cache.abort(0)  # nothing open: nothing happens
    again = cache.plan(0, [[first.key, second.key]])
    assert again.hits == (first.key,)
    assert again.evictions == ()


class LowestFirst:
    """A policy that knows nothing of recency: it may rank a resident above what the request asks for."""

    def record(self, group, rows):
        pass

    def order(self, group, keys):
        return iter(sorted(keys))

    def forget(self, group, key):
        pass


def test_a_policy_may_let_keys_pass_through_though_the_union_fits():
    cache = PlannedCache({0: 3}, LowestFirst())
    cache.run(cache.plan(0, [[1, 2, 8]]))
    cache.run(cache.plan(0, [[9, 7]]))
    assert cache.resident(0) == {1, 2, 7}
    assert sorted(served(cache.plan(0, [[5, 6]]))) == [5, 6]


def naive(resident, rows, capacity):
    """LRU as a list, most recent first: what the cache holds after a request that runs to its end."""
    wanted = list(dict.fromkeys(chain.from_iterable(reversed(rows))))
    hits = [key for key in wanted if key in resident]
    after = (wanted + [key for key in resident if key not in wanted])[:capacity]
    misses = [key for key in wanted if key not in resident]
    if misses and all(key in resident for key in after):
        after[-1] = misses[0]  # every slot would stay as it is: the last one lets the misses through
    return hits, after


@given(requests=REQUESTS, capacity=st.integers(1, 9))
@settings(deadline=None)
def test_it_equals_a_naive_simulation(requests, capacity):
    cache, resident = PlannedCache({0: capacity}), []
    for rows in requests:
        hits, resident = naive(resident, rows, capacity)
        plan = cache.plan(0, rows)
        assert list(plan.hits) == hits
        cache.run(plan)
        assert cache.resident(0) == set(resident)


@pytest.mark.parametrize("policy", [Lru, LowestFirst])
@given(requests=REQUESTS, capacity=st.integers(1, 9), data=st.data())
@settings(deadline=None)
def test_slots_are_never_shared_whatever_lands_when(policy, requests, capacity, data):
    """Drive loads in any legal order, stop anywhere: one key a slot, every key once, the books agree with the slots."""
    cache, holds = PlannedCache({0: capacity}, policy()), {}  # slot → key whose bytes are whole
    for rows in requests:
        union = set(chain.from_iterable(rows))
        before = set(holds.values())
        plan = cache.plan(0, rows)
        assert sorted(served(plan)) == sorted(union)
        assert set(plan.hits) == union & before
        asked, waiting, flying, landed = set(union), list(plan.loads), {}, list(plan.hits)
        stop_after = data.draw(st.integers(0, 60))
        for _ in range(stop_after):
            startable = [load for load in waiting if load.evicts not in asked]
            moves = (["start"] if startable else []) + (["land"] if flying else []) + (["serve"] if landed else [])
            if not moves:
                break
            move = data.draw(st.sampled_from(moves))
            if move == "start":
                load = data.draw(st.sampled_from(startable))
                waiting.remove(load)
                assert cache.start(0, load.key) == load.slot
                assert load.slot not in flying.values()
                assert holds.pop(load.slot, None) == load.evicts
                flying[load.key] = load.slot
            elif move == "land":
                key = data.draw(st.sampled_from(sorted(flying)))
                holds[flying.pop(key)] = key
                cache.commit(0, key)
                landed.append(key)
            else:
                key = landed.pop()
                assert holds[cache.slot_of(0, key)] == key
                cache.release(0, key)
                asked.remove(key)
            assert len(holds) + len(flying) <= capacity
        if asked:
            cache.abort(0)
        assert cache.resident(0) == set(holds.values())
        assert all(cache.slot_of(0, key) == slot for slot, key in holds.items())


@pytest.mark.skipif(not TRACE.exists(), reason="the recorded K3 routing is not here")
@pytest.mark.parametrize(("slots", "hit_percent"), [(8, 26.7), (16, 40.0), (24, 46.4), (32, 49.7)])
def test_hit_rate_on_recorded_routing(slots, hit_percent):
    """Twelve tokens of K3, prompt of five as one chunk; decode lookups, against published values."""
    np = pytest.importorskip("numpy")
    trace = np.load(TRACE)  # [layers, tokens, ranks]
    layers, tokens, ranks = trace.shape
    cache = PlannedCache(dict.fromkeys(range(layers), slots))
    hits = 0
    for step in [slice(0, 5), *(slice(t, t + 1) for t in range(5, tokens))]:
        for layer in range(layers):
            plan = cache.plan(layer, trace[layer, step].tolist())
            cache.run(plan)
            hits += len(plan.hits) if step.start else 0
    assert round(100 * hits / (layers * (tokens - 5) * ranks), 1) == hit_percent
