"""The staging share: keys beyond a quota pass through it, predicted ones land in it, and no slot is ever shared."""

from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache_policy.plan import PlannedCache

GROUPS = (0, 1, 2)
ROWS = st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=5, unique=True), min_size=1, max_size=3)
REQUESTS = st.lists(st.tuples(st.sampled_from(GROUPS), ROWS), max_size=12)


def keys_of(group, rows):
    return [[group * 10 + expert for expert in row] for row in rows]


def test_a_request_beyond_its_quota_is_one_wave_and_leaves_the_quota_behind():
    cache = PlannedCache({0: 2}, staging=4)
    assert cache.n_slots == 6
    plan = cache.plan(0, [[1, 2, 3, 4, 5]])
    assert len(plan.waves) == 1
    cache.run(plan)
    assert cache.resident(0) == {1, 2}
    again = cache.plan(0, [[3, 1, 6, 7]])
    assert again.hits == (1,)
    assert len(again.waves) == 1  # what was borrowed came back
    cache.run(again)
    assert cache.resident(0) == {3, 1}


def test_a_group_without_slots_lives_on_staging():
    cache = PlannedCache({0: 0, 1: 0}, staging=3)
    for _ in range(3):
        for group in (0, 1):
            plan = cache.plan(group, [[group * 10 + 1, group * 10 + 2]])
            assert plan.hits == ()
            cache.run(plan)
            assert cache.resident(group) == frozenset()
    with pytest.raises(ValueError, match="0 slots and 0 staging slots beside speculation"):
        PlannedCache({0: 0}, staging=3, speculation=3)


def test_a_predicted_key_is_taken_over_where_it_lies():
    cache = PlannedCache({0: 2}, staging=3, speculation=2)
    first, second = cache.speculate(0, 5), cache.speculate(0, 6)
    assert cache.speculate(0, 7) is None  # all that speculation may have
    assert cache.speculate(0, 5) is None
    cache.land(0, 5)
    plan = cache.plan(0, [[5, 6, 1]])
    assert plan.hits == ()
    assert plan.predicted == (5, 6)
    assert plan.arriving == {6}
    assert [load.key for load in plan.loads] == [1]
    assert (cache.slot_of(0, 5), cache.slot_of(0, 6)) == (first, second)
    with pytest.raises(RuntimeError, match="before it landed"):
        cache.release(0, 6)
    cache.run(plan)
    assert cache.resident(0) == {5, 6}
    assert cache.slot_of(0, 5) == first


def test_an_unwanted_prediction_goes_when_it_has_landed_or_when_it_is_discarded():
    cache = PlannedCache({0: 1}, staging=3, speculation=2)
    cache.speculate(0, 5)
    cache.speculate(0, 6)
    cache.land(0, 5)
    cache.run(cache.plan(0, [[1]]))
    assert list(cache.predicted(0)) == [6]  # somebody may still write to its slot
    assert cache.speculate(0, 7) is not None
    assert cache.speculate(0, 8) is None
    cache.discard(0, 6)
    assert cache.speculate(0, 8) is not None


def test_a_key_that_is_here_or_asked_for_is_not_speculated_on():
    cache = PlannedCache({0: 2, 1: 1}, staging=2, speculation=1)
    cache.run(cache.plan(0, [[1]]))
    assert cache.speculate(0, 1) is None
    cache.plan(0, [[2]])
    assert cache.speculate(0, 3) is None
    assert cache.speculate(1, 13) is not None


@given(requests=REQUESTS, quota=st.integers(0, 4), staging=st.integers(1, 6))
@settings(deadline=None)
def test_hits_depend_on_the_quota_alone(requests, quota, staging):
    """LRU as a list: with staging, no miss ever costs a slot that the policy would keep."""
    cache = PlannedCache(dict.fromkeys(GROUPS, quota), staging=staging)
    resident = {group: [] for group in GROUPS}
    for group, rows in requests:
        wanted = list(dict.fromkeys(chain.from_iterable(reversed(keys_of(group, rows)))))
        plan = cache.plan(group, keys_of(group, rows))
        assert list(plan.hits) == [key for key in wanted if key in resident[group]]
        cache.run(plan)
        after = wanted + [key for key in resident[group] if key not in wanted]
        resident[group] = after[:quota]
        assert cache.resident(group) == set(resident[group])


class Driver:
    """Random legal moves of one request; `holds` is what the bytes in the slots are, independently of the books."""

    def __init__(self, cache, data):
        self.cache, self.data, self.holds, self.flying = (
            cache,
            data,
            {},
            {},
        )  # slot → key; predicted (group, key) → slot

    def speculate(self, group, key):
        slot = self.cache.speculate(group, key)
        if slot is not None:
            assert slot not in self.busy()
            self.holds.pop(slot, None)
            self.flying[group, key] = slot

    def settle(self, group):
        """Before a request: some predictions have landed, some failed."""
        for key in [key for g, key in self.flying if g == group]:
            fate = self.data.draw(st.sampled_from(["land", "fail", "fly"]))
            if fate == "land":
                self.holds[self.flying.pop((group, key))] = key
                self.cache.land(group, key)
            elif fate == "fail":
                del self.flying[group, key]
                self.cache.discard(group, key)

    def busy(self):
        resident = {self.cache.slot_of(g, key) for g in GROUPS for key in self.cache.resident(g)}
        return resident | set(self.flying.values())

    def request(self, group, rows):
        plan = self.cache.plan(group, rows)
        for key in [key for g, key in self.flying if g == group and key not in plan.arriving]:
            del self.flying[group, key]  # cancelled
            self.cache.discard(group, key)
        flying = {key: self.flying.pop((group, key)) for key in plan.arriving}
        landed, waiting = [k for k in plan.waves[0].serve if k in (*plan.hits, *plan.predicted)], list(plan.loads)
        landed = [key for key in landed if key not in plan.arriving]
        asked = set(chain.from_iterable(rows))
        for _ in range(self.data.draw(st.integers(0, 40))):
            startable = [load for load in waiting if load.evicts not in asked]
            moves = (["start"] if startable else []) + (["land"] if flying else []) + (["serve"] if landed else [])
            if not moves:
                break
            move = self.data.draw(st.sampled_from([*moves, "speculate"]))
            if move == "start":
                load = self.data.draw(st.sampled_from(startable))
                waiting.remove(load)
                slot = self.cache.start(group, load.key)
                assert slot not in flying.values()
                assert slot not in self.flying.values()
                self.holds.pop(slot, None)
                flying[load.key] = slot
            elif move == "land":
                key = self.data.draw(st.sampled_from(sorted(flying)))
                self.holds[flying.pop(key)] = key
                self.cache.commit(group, key)
                landed.append(key)
            elif move == "serve":
                key = landed.pop()
                assert self.holds[self.cache.slot_of(group, key)] == key
                self.cache.release(group, key)
                asked.remove(key)
            else:
                other = (group + 1) % len(GROUPS)
                self.speculate(other, other * 10 + self.data.draw(st.integers(0, 9)))
        if asked:
            self.cache.abort(group)


@given(requests=REQUESTS, quota=st.integers(0, 4), staging=st.integers(1, 6), data=st.data())
@settings(deadline=None)
def test_no_slot_is_shared_with_speculation_whatever_happens_when(requests, quota, staging, data):
    cache = PlannedCache(dict.fromkeys(GROUPS, quota), staging=staging, speculation=staging - 1)
    driver = Driver(cache, data)
    for group, rows in requests:
        driver.settle(group)
        driver.request(group, keys_of(group, rows))
        for each in GROUPS:
            resident = cache.resident(each)
            assert len(resident) <= quota
            assert all(driver.holds[cache.slot_of(each, key)] == key for key in resident)
    for group, key in list(driver.flying):
        cache.discard(group, key)
    for group in GROUPS:  # no slot was lost: a request may still use all of staging
        assert len(cache.plan(group, keys_of(group, [list(range(10))])).waves[0].loads) >= min(staging, 10 - quota)
        cache.abort(group)
